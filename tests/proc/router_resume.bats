#!/usr/bin/env bats
# An answer survives the router and k3-computed: --resume after SIGKILL, waiting for a k3-computed that went away.
load helpers
load long_answer

setup_file() {
    up --ctx 2048
    export STATE=$BATS_FILE_TMPDIR/state
    whole_answer
}
teardown_file() { down; }
setup() { STATE=$BATS_TEST_TMPDIR/state; }
teardown() { kill_answer; }

@test "the router is killed in the middle and --resume gives the whole answer" {
    start 1000
    wait_tokens 100
    kill -KILL $PID
    finished 137
    [ "$(grep -c '^t ' "$(journal)")" -lt 1400 ]
    refute grep -q '^end' "$(journal)"
    id=$(basename "$(journal)" .journal)
    timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$STATE" --resume "$id" >"$BATS_TEST_TMPDIR/again"
    cmp "$BATS_TEST_TMPDIR/again" "$BATS_FILE_TMPDIR/whole"
    tail -1 "$(journal)" | grep -qx 'end stop 128[12]'
    # What was shown before was the beginning of it, and a second time the journal alone is enough.
    cmp -n "$(wc -c <"$BATS_TEST_TMPDIR/out")" "$BATS_TEST_TMPDIR/out" "$BATS_FILE_TMPDIR/whole"
    router --instance t-nobody --state-dir "$STATE" --resume "$id" | cmp - "$BATS_FILE_TMPDIR/whole"
    [ "$(router --state-dir "$STATE" --resume "$id" --json | jq -r .finish_reason)" = stop ]
}

@test "no token is shown that is not in the journal" {
    for room in 300 700 1500; do
        rm -rf "$STATE"
        start $room
        wait_tokens 50
        kill -KILL $PID
        finished 137
        # The journal's tokens as text, from an answer cut to that length.
        printf 'Tell me' | router --state-dir "$BATS_TEST_TMPDIR/s2" "${LONG[@]}" --max-tokens "$(grep -c '^t ' "$(journal)")" \
            >"$BATS_TEST_TMPDIR/covered"
        cmp -n "$(wc -c <"$BATS_TEST_TMPDIR/out")" "$BATS_TEST_TMPDIR/out" "$BATS_TEST_TMPDIR/covered"
        rm -rf "$BATS_TEST_TMPDIR/s2"
    done
}

@test "k3-computed and the router both die; --resume submits again what the journal holds" {
    start 1000
    wait_tokens 150
    kill -KILL $PID
    finished 137
    kill -KILL "$(pid_of k3-computed)"
    sleep 0.3
    ctl wait --timeout $((20 * SLOW))
    printf 't 9' >>"$(journal)" # a torn last line
    id=$(basename "$(journal)" .journal)
    router --state-dir "$STATE" --resume "$id" | cmp - "$BATS_FILE_TMPDIR/whole"
}

@test "k3-computed is killed; the router waits, says one line and goes on to the byte" {
    start 500
    wait_tokens 60
    kill -KILL "$(pid_of k3-computed)"
    finished 0
    cmp "$BATS_TEST_TMPDIR/out" "$BATS_FILE_TMPDIR/whole"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -qE 'k3-computed (went away; waiting for it|was restarted); [0-9]+ tokens are safe' "$BATS_TEST_TMPDIR/err"
}

@test "k3-computed stops in good order and is started again; the answer goes on to the byte" {
    start 500
    wait_tokens 60
    kill -TERM "$(pid_of k3-computed)"
    finished 0
    cmp "$BATS_TEST_TMPDIR/out" "$BATS_FILE_TMPDIR/whole"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -qE 'k3-computed (went away; waiting for it|was restarted); [0-9]+ tokens are safe' "$BATS_TEST_TMPDIR/err"
}

@test "an interrupt cancels the answer; the family lives; the journal says so" {
    start 500
    wait_tokens 50
    kill -INT $PID
    finished 1
    grep -q 'cancelled after' "$BATS_TEST_TMPDIR/err"
    tail -1 "$(journal)" | grep -qx 'end cancelled'
    [ "$(router --state-dir "$STATE" <<<"What is the capital of France?")" = "The capital of France is Paris." ]
}

@test "a request that another router shows is not resumed twice" {
    start 500
    wait_tokens 50
    run router --state-dir "$STATE" --resume "$(basename "$(journal)" .journal)"
    [ "$status" -eq 2 ]
    [[ "$output" == *"another k3-router"* ]]
    finished 0
    cmp "$BATS_TEST_TMPDIR/out" "$BATS_FILE_TMPDIR/whole"
}

@test "nobody there: exit 3 at once, and how to start" {
    start=$SECONDS
    run router --instance t-nobody --state-dir "$STATE" <<<x
    [ "$status" -eq 3 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"run/k3-run up --instance t-nobody"* ]]
    [ $((SECONDS - start)) -le $((5 * SLOW)) ]
}

@test "nobody comes back: exit 3 after --wait, and how to go on" {
    supervisor=$("$ROOT/run/k3-run" status --instance "$INSTANCE" --bin-dir "$K3_BIN" | sed -n 's/.*k3-run pid \([0-9]*\).*/\1/p')
    computed=$(pid_of k3-computed)
    start 500 --wait 2
    wait_tokens 50
    kill -STOP "$supervisor" # so that it starts no other
    kill -KILL "$computed"
    status=0
    finished 3 || status=1
    kill -CONT "$supervisor"
    [ "$status" -eq 0 ]
    id=$(basename "$(journal)" .journal)
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 2 ]
    grep -q 'did not come back within 2 s' "$BATS_TEST_TMPDIR/err"
    grep -q -- "--resume $id" "$BATS_TEST_TMPDIR/err"
    ctl wait --timeout $((20 * SLOW))
    router --state-dir "$STATE" --resume "$id" | cmp - "$BATS_FILE_TMPDIR/whole"
}

@test "k3-computed that ends ten times without one more token: the router says so and keeps the request" {
    down
    up --ctx 4096 --kernels c --threads 1 # seconds for a prompt
    local status=0
    "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$STATE" --ids "$(seq -s, 1 500),$(seq -s, 1 500),$(seq -s, 1 500),$(seq -s, 1 500)" \
        --max-tokens 1 </dev/null >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
    PID=$!
    for _ in $(seq 100); do
        kill -0 $PID 2>/dev/null || break
        until [ "$(stat_of k3-computed sequences_running)" = 1 ] || ! kill -0 $PID 2>/dev/null; do sleep 0.05; done
        sleep 0.2
        kill -KILL "$(pid_of k3-computed)" 2>/dev/null || true
    done
    wait $PID || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ $status -eq 3 ]
    grep -qE 'k3-computed ended 10 times while it computed this answer, without one more token; .*k3-computed.log; 0 tokens are safe' \
        "$BATS_TEST_TMPDIR/err"
    [ -n "$(journal)" ]
    refute grep -q '^end' "$(journal)"
}
