#!/usr/bin/env bats
# k3-computed --prefetch: experts are read a layer early, and no bit changes.
load computed_helpers

teardown() { stop_all; }
tokens() { # the tokens of an answer, whole
    local i
    submit "$ID" 12 | ask >/dev/null
    for i in {1..100}; do
        request poll "$ID" '"from":0,"wait_ms":1000' | ask >"$BATS_TEST_TMPDIR/poll"
        grep -q '"done"' "$BATS_TEST_TMPDIR/poll" && break
    done
    grep -o '"token":[0-9]*' "$BATS_TEST_TMPDIR/poll"
}

@test "guessed experts are there when they are demanded, and the tokens are the same" {
    all_three
    tokens >"$BATS_TEST_TMPDIR/plain"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/plain")" -eq 12 ]
    [ "$(stat_of k3-expertd prefetches)" -eq 0 ]
    stop_all
    all_three --prefetch 4
    tokens >"$BATS_TEST_TMPDIR/ahead"
    cmp "$BATS_TEST_TMPDIR/plain" "$BATS_TEST_TMPDIR/ahead"
    [ "$(stat_of k3-expertd prefetches)" -gt 300 ]
    hits=$(stat_of k3-expertd prefetch_hits)
    [ "$hits" -gt 100 ] # most of what was guessed comes
    [ "$(ctl info computed | jq '.. | .prefetch? // empty')" -eq 4 ]
}

@test "gates that are not pinned: said once, and the answer is the same" {
    rm -f "$LOG"/*.log
    trunkd --trunk-gb 0.0021 && expertd && computed --prefetch 4 && logged computed event=ready
    grep -q 'event=prefetch_without_gates pinned=0 of=8' "$LOG/computed.log"
    [ "$(tokens | wc -l)" -eq 12 ]
    [ "$(stat_of k3-expertd prefetches)" -eq 0 ]
}

@test "more than there are experts is refused" {
    status=0
    "$K3_BIN/k3-computed" --model "$DEMO" --instance "$INSTANCE" --prefetch 33 2>"$BATS_TEST_TMPDIR/err" || status=$?
    [ "$status" -eq 2 ]
    grep -q 'prefetch 33: .*32 experts' "$BATS_TEST_TMPDIR/err"
}
