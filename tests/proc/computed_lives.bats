#!/usr/bin/env bats
# k3-computed and the deaths of others and its own: waits for peers, reattaches, survives unreadable weights, leaves in time.
load computed_helpers

setup() { rm -f "$LOG"/*.log; }
teardown() { stop_all; }

undisturbed() { # the tokens of the answer that is disturbed below
    all_three --ctx 4096 --batch-rows 16
    { submit $ID 400; request collect; } | ask | tail -1 | jq -c .tokens
    stop_all
}

@test "it waits for k3-trunkd and k3-expertd, says for whom, and leaves at once when told to" {
    computed
    logged computed "event=waiting for=k3-trunkd"
    [ "$(stat_of k3-computed waiting)" -eq 1 ]
    kill -TERM "$COMPUTED"
    ends_within "$COMPUTED" 20
    [ "$STATUS" -eq 0 ]
    computed
    trunkd
    logged computed "event=waiting for=k3-expertd"
    [ "$(stat_of k3-computed waiting)" -eq 2 ]
    refute grep -q event=ready "$LOG/computed.log"
    expertd
    logged computed event=ready
    { submit $ID 1; request collect; } | ask | tail -1 | jq -e '.tokens == [295]'
}

@test "k3-trunkd and k3-expertd are killed in the middle of an answer: it waits, reattaches, and the answer is the same" {
    right=$(undisturbed)
    all_three --ctx 4096 --batch-rows 16
    submit $ID 400 | ask >/dev/null
    request poll $ID '"from":20,"wait_ms":5000' | ask >/dev/null
    kill -KILL "$TRUNKD"; wait "$TRUNKD" || true
    logged computed event=trunkd_gone
    request poll $ID '"from":0' | ask | jq -e '.progress.waiting == "trunk" and (.events | length) < 200'
    trunkd
    logged computed "event=trunkd_reattached generation=2"
    n=$(request poll $ID | ask | jq .next)
    request poll $ID "\"from\":$((n + 10)),\"wait_ms\":5000" | ask | jq -e '.state == "decode"'
    kill -KILL "$EXPERTD"; wait "$EXPERTD" || true
    expertd
    [ "$(request collect $ID | ask | jq -c .tokens)" = "$right" ]
    logged computed event=expertd_reattached
    [ "$(stat_of k3-computed trunk_reattached)" -eq 1 ]
    [ "$(stat_of k3-computed expert_reattached)" -eq 1 ]
}

@test "waiting costs no CPU: without requests, and for weights that do not come in the middle of a pass" {
    all_three --ctx 4096 --batch-rows 16
    ticks() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$1/stat"; } # utime + stime
    least() { # least PID: hundredths of CPU time in one second, the better of three: the end of what was before is no waiting
        local i a n=1000
        for i in 1 2 3; do
            a=$(ticks "$1"); sleep 1; a=$(($(ticks "$1") - a))
            [ "$a" -lt "$n" ] && n=$a
        done
        echo "$n"
    }
    for pid in "$COMPUTED" "$TRUNKD" "$EXPERTD"; do [ "$(least "$pid")" -le $((2 * SLOW)) ]; done
    submit $ID 4000 | ask >/dev/null
    request poll $ID '"from":5,"wait_ms":5000' | ask >/dev/null
    kill -STOP "$TRUNKD"
    n=$(least "$COMPUTED") m=$(least "$EXPERTD")
    waiting=$(request poll $ID '"from":0' | ask | jq -r '.progress.waiting')
    kill -CONT "$TRUNKD"
    echo "computed $n expertd $m waiting $waiting"
    [ "$n" -le $((2 * SLOW)) ] && [ "$m" -le $((2 * SLOW)) ]
    [ "$waiting" = trunk ]
}

@test "an answer is cancelled while k3-trunkd is dead; the next one is right" {
    all_three --ctx 4096 --batch-rows 16
    submit $ID 4000 | ask >/dev/null
    request poll $ID '"from":5,"wait_ms":5000' | ask >/dev/null
    kill -KILL "$TRUNKD"; wait "$TRUNKD" || true
    logged computed event=trunkd_gone
    request cancel | ask | jq -e .ok
    request collect | ask | jq -e '.events[-1].reason == "cancelled"'
    { submit 00000000000000000000000000000002 9; } | ask >/dev/null
    trunkd
    request collect 00000000000000000000000000000002 | ask | jq -e '.tokens == [295,319,268,1055,262,392,277,338,13]'
}

@test "SIGTERM in the middle of an answer: the client hears why, and it leaves within two seconds" {
    all_three --ctx 4096 --sequences 2 --batch-rows 16
    { submit $ID 4000; submit 00000000000000000000000000000002 4000; submit 00000000000000000000000000000003 4000; } | ask >/dev/null
    request poll $ID '"from":5,"wait_ms":5000' | ask >/dev/null
    { request poll 00000000000000000000000000000003; request collect 00000000000000000000000000000003; } |
        ask >"$BATS_TEST_TMPDIR/queued" 3>&- &
    probe=$!
    { request poll; request collect; } | ask >"$BATS_TEST_TMPDIR/running" 3>&- &
    for f in queued running; do # each has had its first reply, and collects
        for ((i = 0; i < 400; i++)); do [ -s "$BATS_TEST_TMPDIR/$f" ] && break; sleep 0.05; done
        [ -s "$BATS_TEST_TMPDIR/$f" ]
    done
    sleep 0.3
    kill -TERM "$COMPUTED"
    ends_within "$COMPUTED" 20
    [ "$STATUS" -eq 0 ]
    wait $probe $!
    for f in queued running; do
        tail -n 1 "$BATS_TEST_TMPDIR/$f" >"$BATS_TEST_TMPDIR/last"
        jq -e '.events[-1] | .type == "error" and .code == 3 and (.message | contains("shutting down"))' "$BATS_TEST_TMPDIR/last"
    done
    [ ! -e "$RUN/computed.sock" ]
    [ -z "$(find /dev/shm -name "k3.*.$INSTANCE.k3-computed.*")" ]
}

@test "SIGTERM while k3-trunkd is dead in the middle of a pass: it leaves within two seconds" {
    all_three --ctx 4096 --batch-rows 16
    submit $ID 4000 | ask >/dev/null
    request poll $ID '"from":5,"wait_ms":5000' | ask >/dev/null
    kill -KILL "$TRUNKD" "$EXPERTD"; wait "$TRUNKD" "$EXPERTD" || true
    sleep 0.5
    request poll | ask | jq -e '.state == "decode" and .progress.waiting != "none"'
    kill -TERM "$COMPUTED"
    ends_within "$COMPUTED" 20
    [ "$STATUS" -eq 0 ]
}

@test "a weight that cannot be read fails the answer with code 4, naming file and offset; the next one is answered" {
    MODEL=$BATS_TEST_TMPDIR/model
    cp -r "$DEMO" "$MODEL"
    all_three --ctx 4096 --batch-rows 16
    for shard in 2 4; do # layers, then embedding and lm_head
        file=$MODEL/model-0000$shard-of-000004.safetensors
        cp "$file" "$BATS_TEST_TMPDIR/whole"
        submit $ID 4000 | ask >/dev/null
        request poll $ID '"from":5,"wait_ms":5000' | ask >/dev/null
        truncate -s 4096 "$file"
        request collect | ask >"$BATS_TEST_TMPDIR/out"
        jq -e --arg f "$file" '.events[-1] | .type == "error" and .code == 4 and (.message | contains($f))' "$BATS_TEST_TMPDIR/out" || {
            jq -c '.events[-1]' "$BATS_TEST_TMPDIR/out"; return 1; }
        cat "$BATS_TEST_TMPDIR/whole" >"$file" # the same inode: the daemons have it open
        request forget | ask >/dev/null
        { submit $ID 9; request collect; request forget; } | ask | sed -n 2p | jq -e '.tokens == [295,319,268,1055,262,392,277,338,13]'
    done
    [ "$(stat_of k3-computed failed)" -eq 2 ]
}
