# A long answer that a test acts in the middle of, however fast or slow the machine is.
# 1,429 tokens of noise, a few seconds; greedy answers of the demo model are over too soon to be interrupted.
LONG=(--raw --temperature 100 --top-p 1 --seed 8 --max-tokens 1500)

whole_answer() { # the same answer in one go, to compare with
    printf 'Tell me' | router --state-dir "$STATE" "${LONG[@]}" >"$BATS_FILE_TMPDIR/whole"
    [ "$(wc -c <"$BATS_FILE_TMPDIR/whole")" -gt 4000 ]
}
kill_answer() { # for teardown
    for p in ${PID:-} ${GATE:-}; do kill -KILL "$p" 2>/dev/null || true; done
}
# The long answer in the background, held up after ROOM bytes of text until open_gate.  Sets PID, GATE.
start() { # start ROOM OPTION...
    local room=$1
    shift
    printf 'Tell me' >"$BATS_TEST_TMPDIR/in"
    rm -f "$BATS_TEST_TMPDIR/fifo" "$BATS_TEST_TMPDIR/ready"
    /usr/bin/python3 "$ROOT/tests/proc/gate.py" "$BATS_TEST_TMPDIR/fifo" "$room" "$BATS_TEST_TMPDIR/out" \
        >"$BATS_TEST_TMPDIR/ready" 3>&- &
    GATE=$!
    until grep -q ready "$BATS_TEST_TMPDIR/ready"; do sleep 0.02; done
    "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$STATE" "${LONG[@]}" "$@" <"$BATS_TEST_TMPDIR/in" \
        >"$BATS_TEST_TMPDIR/fifo" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
    PID=$!
}
open_gate() { # what the router has written, and writes from now on, is in $BATS_TEST_TMPDIR/out after wait $GATE
    kill -USR1 $GATE
}
finished() { # finished STATUS: the router ends with it
    local status=0
    open_gate
    wait $PID || status=$?
    wait $GATE
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq "$1" ]
}
journal() { ls "$STATE"/*.journal 2>/dev/null; }
wait_tokens() { # wait_tokens N: until the journal holds N tokens
    for _ in $(seq $((1500 * SLOW))); do
        [ -n "$(journal)" ] && [ "$(grep -c '^t ' "$(journal)")" -ge "$1" ] && return 0
        sleep 0.02
    done
    return 1
}
