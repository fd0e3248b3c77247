#!/usr/bin/env bats
# k3-router --http when things take long or break: comments, clients that leave, daemons that die, the end of the server.
load http_helpers
SOME=${LONG%,*},'"max_tokens":300' # a second or some

setup_file() {
    # a ring and a cache so small that every pass waits for k3-trunkd
    up --ctx 2048 --ring-mb 2 --trunk-gb 0.003 --cache-gb 0.0005 --sequences 2
    serve --ping "${K3_PING_S:-2}"
    ask /v1/completions "{$SOME}" | jq -r .choices[0].text >"$BATS_FILE_TMPDIR/whole"
}
teardown_file() {
    stop_server
    down
}
teardown() {
    [ -z "${STOPPED:-}" ] || kill -CONT "$STOPPED"
    [ -z "${PROXY:-}" ] || kill "$PROXY"
}

in_background() { # in_background NAME BODY: PID; the reply goes to $BATS_TEST_TMPDIR/NAME
    (echo "$BASHPID" >"$BATS_TEST_TMPDIR/$1.pid" && exec curl -sS -i -N -m $((120 * SLOW)) "$URL/v1/completions" --data-binary "$2") 2>/dev/null 3>&- |
        /usr/bin/python3 "$ROOT/tests/proc/http_client.py" - stamp >"$BATS_TEST_TMPDIR/$1" 3>&- &
    PID=$!
}
arrived() { # arrived NAME PATTERN SECONDS
    for _ in $(seq $(($3 * 20 * SLOW))); do
        grep -q -- "$2" "$BATS_TEST_TMPDIR/$1" 2>/dev/null && return 0
        sleep 0.05
    done
    tail -3 "$BATS_TEST_TMPDIR/$1"
    return 1
}
text_of() { # text_of NAME: of a stream
    sed 's/^[0-9.]* //' "$BATS_TEST_TMPDIR/$1" | events | jq -rj '.choices[0].text // ""'
}
whole() { # whole NAME
    text_of "$1" | cmp - <(head -c -1 "$BATS_FILE_TMPDIR/whole")
}

# By hand also as K3_STAND_S=90 K3_CUT_S=30 K3_PING_S=5.
@test "k3-trunkd stands still for 21 seconds: streams hear a comment, plain replies white space, others are served" {
    local stand=${K3_STAND_S:-21} cut=${K3_CUT_S:-12} direct=$URL
    /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" proxy "$cut" >"$BATS_TEST_TMPDIR/proxy" 3>&- &
    PROXY=$!
    for _ in $(seq $((100 * SLOW))); do [ -s "$BATS_TEST_TMPDIR/proxy" ] && break; sleep 0.05; done
    URL=$(cat "$BATS_TEST_TMPDIR/proxy") # all three ask through a proxy that cuts what is silent
    in_background a "{$SOME,\"stream\":true}"
    a=$PID
    arrived a 'data: .*"text":"..*"' 20
    STOPPED=$(pid_of k3-trunkd)
    kill -STOP "$STOPPED"
    in_background b '{"prompt":"The capital of France is","temperature":0,"stream":true}'
    b=$PID
    in_background c '{"prompt":"The capital of France is","temperature":0}'
    c=$PID
    arrived b 'data: {"id"' 5 # the head and the first chunk come before anything is computed
    URL=$direct
    sleep "$stand"
    ask /v1/models "" -m 5 | jq -e .data
    ask /health "" -m 5 | jq -e '.status == "ok"'
    kill -CONT "$STOPPED"
    STOPPED=''
    wait $a $b $c
    [ "$(wc -l <"$BATS_TEST_TMPDIR/proxy")" = 1 ] # nothing was cut
    whole a
    [ "$(text_of b)" = " Paris." ]
    for f in a b; do [ "$(grep -c '^[0-9.]* : [a-z]' "$BATS_TEST_TMPDIR/$f")" -ge $((stand * 3 / 4 / ${K3_PING_S:-2})) ]; done
    grep -qE '^[0-9.]* : (prefill|decode) layer [0-9]+/[0-9]+ tokens [0-9]+.* waiting for trunk$' "$BATS_TEST_TMPDIR/a"
    grep -qE '^[0-9.]* : queued, 0 before it, 2 running$|^[0-9.]* : (prefill|queued)' "$BATS_TEST_TMPDIR/b"
    # never ten seconds of silence, in any of the three
    for f in a b c; do
        awk 'NR > 1 && $1 - last > 10 { print FILENAME, $1 - last; bad = 1 } { last = $1 } END { exit bad }' "$BATS_TEST_TMPDIR/$f"
    done
    sed 's/^[0-9.]* //' "$BATS_TEST_TMPDIR/c" | sed '1,/^$/d' | jq -e '.choices[0].text == " Paris."'
    [ "$(sed 's/^[0-9.]* //' "$BATS_TEST_TMPDIR/c" | sed '1,/^$/d' | grep -c '^$')" -ge 2 ]
}

@test "a client that leaves ends its own answer and no other: running, waiting, plain or stream" {
    in_background a "{$LONG,\"stream\":true}"
    a=$PID
    arrived a 'data: .*"text":"..*"' 20
    cancelled=$(stat_of k3-computed cancelled)
    curl -sS -N -m 60 "$URL/v1/completions" --data-binary "{$LONG,\"stream\":true}" >/dev/null 3>&- &
    b=$!
    for _ in $(seq 100); do [ "$(stat_of k3-computed sequences_running)" = 2 ] && break; sleep 0.05; done
    curl -sS -m 60 "$URL/v1/completions" --data-binary "{$LONG}" >/dev/null 3>&- &
    c=$! # two run, this one waits
    for _ in $(seq 100); do [ "$(stat_of k3-router answers_queued)" = 1 ] && [ "$(stat_of k3-computed sequences_running)" = 2 ] && break; sleep 0.05; done
    [ "$(stat_of k3-router answers_queued)" = 1 ]
    kill $c
    for _ in $(seq $((60 * SLOW))); do [ "$(stat_of k3-router answers_queued)" = 0 ] && break; sleep 0.05; done
    [ "$(stat_of k3-router answers_queued)" = 0 ]
    kill $b
    for _ in $(seq $((60 * SLOW))); do [ "$(stat_of k3-computed sequences_running)" = 1 ] && break; sleep 0.05; done
    [ "$(stat_of k3-computed sequences_running)" = 1 ]
    [ "$(stat_of k3-computed cancelled)" -eq $((cancelled + 1)) ]
    server_says 'end=client_gone' 5
    # and one whose plain answer runs
    curl -sS -m 60 "$URL/v1/completions" --data-binary "{$LONG}" >/dev/null 3>&- &
    d=$!
    for _ in $(seq 100); do [ "$(stat_of k3-computed sequences_running)" = 2 ] && break; sleep 0.05; done
    kill $d
    for _ in $(seq $((60 * SLOW))); do [ "$(stat_of k3-computed cancelled)" -eq $((cancelled + 2)) ] && break; sleep 0.05; done
    [ "$(stat_of k3-computed cancelled)" -eq $((cancelled + 2)) ]
    # the first one has noticed nothing
    n=$(wc -l <"$BATS_TEST_TMPDIR/a")
    for _ in $(seq 100); do [ "$(wc -l <"$BATS_TEST_TMPDIR/a")" -gt $((n + 20)) ] && break; sleep 0.05; done
    [ "$(wc -l <"$BATS_TEST_TMPDIR/a")" -gt $((n + 20)) ]
    kill "$(cat "$BATS_TEST_TMPDIR/a.pid")"
    wait $a || true
    idle 10
}

@test "every weight daemon and k3-computed killed in the middle of a stream: it goes on to the byte" {
    for d in k3-trunkd k3-expertd k3-computed; do
        in_background a "{$SOME,\"stream\":true}"
        a=$PID
        arrived a 'data: .*"text":"..*"' 20
        kill -KILL "$(pid_of $d)"
        wait $a
        whole a
        tail -2 "$BATS_TEST_TMPDIR/a" | grep -q 'data: \[DONE\]'
        ctl wait --timeout $((20 * SLOW))
    done
    grep -q ': k3-computed \(went away\|was restarted\)' "$BATS_TEST_TMPDIR/a"
}

@test "while a daemon is not there: 503 with the reason, on health and on new requests" {
    STOPPED=$(cut -d' ' -f2 "$(run_dir "$INSTANCE")/k3-run.lock")
    kill -STOP "$STOPPED" # nobody restarts it
    kill -KILL "$(pid_of k3-expertd)"
    for _ in $(seq 50); do [ "$(curl -sS -o /dev/null -w '%{http_code}' "$URL/health")" = 503 ] && break; sleep 0.05; done
    refused 503 null /health
    refused 503 null /v1/completions '{"prompt":"x"}'
    ask /v1/completions '{"prompt":"x"}' -i | tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    grep -qE '^Retry-After: [0-9]+$' "$BATS_TEST_TMPDIR/o"
    grep -q '"message":"k3-expertd is not running' "$BATS_TEST_TMPDIR/o"
    refused 400 prompt /v1/completions '{"prompt":5}' # what can never succeed is no 503
    ask /v1/models | jq -e .data
    kill -CONT "$STOPPED"
    STOPPED=''
    ctl wait --timeout $((20 * SLOW))
    ask /health | jq -e '.status == "ok"'
}

@test "SIGTERM: streams end with an error, exit 0, and --resume has the whole answer" {
    for i in 1 2 3; do # two run, one waits
        in_background s$i "{$SOME,\"stream\":true}"
        pids+=($PID)
    done
    for i in 1 2; do arrived s$i 'data: .*"text":"..*"' 20; done
    arrived s3 'data: ' 20
    stop_server
    wait "${pids[@]}"
    for i in 1 2 3; do
        sed 's/^[0-9.]* //' "$BATS_TEST_TMPDIR/s$i" >"$BATS_TEST_TMPDIR/p"
        events <"$BATS_TEST_TMPDIR/p" | tail -1 | jq -e '.error | .type == "unavailable_error" and (.message | test("stop"))'
        tail -3 "$BATS_TEST_TMPDIR/p" | grep -q 'data: \[DONE\]'
    done
    idle 5 # nothing is computed for nobody
    id=$(events <"$BATS_TEST_TMPDIR/p" | head -1 | jq -r .id)
    router --resume "${id#cmpl-}" | cmp - "$BATS_FILE_TMPDIR/whole"
    [ ! -e "/dev/shm/k3.$(id -u).$INSTANCE.k3-router.stats" ]
}

@test "a server that was killed leaves an answer: the next one ends it, and it can be resumed" {
    serve
    in_background a "{$SOME,\"stream\":true}"
    a=$PID
    arrived a 'data: .*"text":"..*"' 20
    kill -KILL "$SERVER"
    wait $a || true
    serve
    server_says 'event=orphan_ended' 5
    idle 5
    id=$(sed 's/^[0-9.]* //' "$BATS_TEST_TMPDIR/a" | events | head -1 | jq -r .id)
    router --resume "${id#cmpl-}" | cmp - "$BATS_FILE_TMPDIR/whole"
    stop_server
}

@test "k3-run up --http: a member like the others" {
    stop_server || true # an earlier test has ended it
    down
    run up --ctx 512 --http 0.0.0.0:0
    [ "$status" -eq 2 ]
    [[ "$output" == *"anybody in the network could ask"* ]]
    nothing_left "$INSTANCE"
    up --ctx 512 --http 127.0.0.1:0 --state-dir "$BATS_TEST_TMPDIR/state" --served-name k3
    URL=http://$(ctl info router --json | jq -r '.["k3-router"].address')
    ask /v1/models | jq -e '.data[0].id == "k3"'
    ask /v1/completions '{"prompt":"The capital of France is","temperature":0}' | jq -e '.choices[0].text == " Paris."'
    kill -KILL "$(pid_of k3-router)"
    for _ in $(seq 50); do [ "$(ctl ping router 2>/dev/null | grep -c 'state=ready.*generation=2')" = 1 ] && break; sleep 0.1; done
    "$ROOT/run/k3-run" status --instance "$INSTANCE" | grep -qE '^k3-router .* ready .* 2 +1$'
    "$ROOT/run/k3-run" restart router --instance "$INSTANCE" 3>&-
    down
    nothing_left "$INSTANCE"
}
