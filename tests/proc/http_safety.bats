#!/usr/bin/env bats
# k3-router --http: who may ask, and how much; clients that send or read slowly.
load http_helpers

setup_file() {
    up --ctx 2048 --ring-mb 2 --trunk-gb 0.003 --cache-gb 0.0005
    KEY=abcdefghijklmnopqrstuvwxyz
    printf '# ours\n%s\nanother-key-0123456789\n' "$KEY" >"$BATS_FILE_TMPDIR/keys"
    chmod 600 "$BATS_FILE_TMPDIR/keys"
    export KEY
}
teardown_file() { down; }
teardown() { stop_server || true; }

client() { /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" "$@" 3>&-; }
refuses_start() { # refuses_start WORDS OPTION...
    local words=$1
    shift
    run timeout $((20 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$BATS_TEST_TMPDIR/state" "$@" </dev/null
    echo "$output"
    [ "$status" -eq 2 ]
    [[ "$output" == *"$words"* ]]
}

@test "what is not safe, or is nonsense, is refused at the start" {
    refuses_start 'anybody in the network could ask; give --api-key-file' --http 0.0.0.0:0
    refuses_start 'anybody in the network could ask' --http '[::]:0'
    for a in 127.0.0.1 8080 :8080 127.0.0.1:x 127.0.0.1:65536 localhost '[::1]' ::1:80 example.com:80 '[127.0.0.1]:80'; do
        refuses_start 'must be ADDR:PORT' --http "$a"
    done
    refuses_start 'does not go with' --http 127.0.0.1:0 --raw
    refuses_start 'go with --http only' --cors '*'
    for mode in 640 604 666; do
        cp "$BATS_FILE_TMPDIR/keys" "$BATS_TEST_TMPDIR/k"
        chmod $mode "$BATS_TEST_TMPDIR/k"
        refuses_start 'nobody else can read or write' --http 127.0.0.1:0 --api-key-file "$BATS_TEST_TMPDIR/k"
    done
    refuses_start 'No such file' --http 127.0.0.1:0 --api-key-file "$BATS_TEST_TMPDIR/none"
    install -m 600 /dev/null "$BATS_TEST_TMPDIR/k2"
    refuses_start 'holds no key' --http 127.0.0.1:0 --api-key-file "$BATS_TEST_TMPDIR/k2"
    echo short >"$BATS_TEST_TMPDIR/k2"
    refuses_start 'at least 16' --http 127.0.0.1:0 --api-key-file "$BATS_TEST_TMPDIR/k2"
}

@test "keys: Bearer or X-Api-Key, health is open, nothing else is" {
    serve --api-key-file "$BATS_FILE_TMPDIR/keys"
    refused 401 null /v1/models
    refused 401 null /v1/models "" -H "Authorization: Bearer ${KEY}x"
    refused 401 null /v1/models "" -H "Authorization: Bearer ${KEY%z}"
    refused 401 null /v1/models "" -H "Authorization: Bearer "
    refused 401 null /v1/completions '{"prompt":"x"}' -H "X-Api-Key: no"
    refused 401 null /nope
    ask /v1/models "" -i | grep -q '^WWW-Authenticate: Bearer'
    ask /v1/models "" -H "Authorization: Bearer $KEY" | jq -e .data
    ask /v1/models "" -H "authorization: bearer another-key-0123456789" | jq -e .data
    ask /v1/models "" -H "X-Api-Key: $KEY" | jq -e .data
    ask /health | jq -e '.status == "ok"'
    refute grep -qF "$KEY" "$SERVER_LOG"
    tr '\0' ' ' <"/proc/$SERVER/cmdline" | refute grep -qF "$KEY"
}

@test "Host and Origin: pages of others and rebound names hear 403" {
    serve --cors https://chat.example --allow-host proxy.example
    for h in evil.example 'evil.example:80' '127.0.0.1.evil.example' 'localhost.evil.example' '[::2]' '' 'x@localhost'; do
        refused 403 null /v1/models "" -H "Host: $h"
    done
    for h in localhost 'LOCALHOST:99' '127.0.0.5' '[::1]:80' proxy.example; do ask /v1/models "" -H "Host: $h" | jq -e .data; done
    for o in http://evil.example null https://chat.example.evil.example http://chat.example 'https://chat.example:444'; do
        refused 403 null /v1/completions '{"prompt":"x"}' -H "Origin: $o"
    done
    ask /v1/models "" -H "Origin: $URL" | jq -e .data # a page of our own
    ask /v1/models "" -H "Origin: https://chat.example" -i | tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    grep -qx 'Access-Control-Allow-Origin: https://chat.example' "$BATS_TEST_TMPDIR/o"
    grep -qx 'Vary: Origin' "$BATS_TEST_TMPDIR/o"
    ask /v1/completions "" -X OPTIONS -i -H "Origin: https://chat.example" -H 'Access-Control-Request-Headers: authorization, x-stainless-os' |
        tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    status_is 204
    grep -qx 'Access-Control-Allow-Headers: authorization, x-stainless-os' "$BATS_TEST_TMPDIR/o"
    grep -qx 'Access-Control-Allow-Methods: POST, OPTIONS' "$BATS_TEST_TMPDIR/o"
    refused 403 null /v1/completions "" -X OPTIONS -H "Origin: http://evil.example"
    # errors and streams carry the header, too
    ask /v1/completions '{}' -i -H "Origin: https://chat.example" | grep -q '^Access-Control-Allow-Origin: https://chat.example'
}

@test "limits: body, head, connections" {
    serve --connections 12
    head -c 68000000 /dev/zero >"$BATS_TEST_TMPDIR/big"
    refused 413 null /v1/completions "@$BATS_TEST_TMPDIR/big"
    refused 413 null /v1/completions "@$BATS_TEST_TMPDIR/big" -H 'Transfer-Encoding: chunked'
    [ "$(curl -sS -m 10 -o /dev/null -w '%{http_code}' -H "X: $(head -c 100000 /dev/zero | tr '\0' x)" "$URL/v1/models")" = 431 ]
    mkfifo "$BATS_TEST_TMPDIR/f"
    /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" idle 12 <"$BATS_TEST_TMPDIR/f" >"$BATS_TEST_TMPDIR/o" 3>&- &
    exec 8>"$BATS_TEST_TMPDIR/f"
    for _ in $(seq 100); do grep -q open "$BATS_TEST_TMPDIR/o" && break; sleep 0.05; done
    refute curl -sS -m 5 "$URL/health"
    exec 8>&-
    wait $!
    for _ in $(seq 50); do curl -sS -m 5 "$URL/health" | grep -q ok && break; sleep 0.1; done
    ask /health | jq -e .status
}

@test "large bodies take no more memory than --http-mb says, give it back, and get 413 beyond" {
    hwm() { sed -n "s/^$1:[^0-9]*\([0-9]*\) kB/\1/p" "/proc/$SERVER/status"; }
    serve --http-mb 96
    base=$(hwm VmRSS)
    /usr/bin/python3 -c 'print("{\"prompt\":\"" + "ab cd e " * 800000 + "\"}")' >"$BATS_TEST_TMPDIR/text" # 6.4 MB: 38 MB to understand
    /usr/bin/python3 -c 'print("{\"prompt\":[" + "1," * 500000 + "1]}")' >"$BATS_TEST_TMPDIR/ids"          # 500,000 values: 44 MB
    for f in text ids text; do # one waits for another
        ask /v1/completions "@$BATS_TEST_TMPDIR/$f" -o "$BATS_TEST_TMPDIR/o.$f" 3>&- &
        pids+=($!)
    done
    wait "${pids[@]}"
    for f in text ids; do jq -e '.error.code == "context_length_exceeded"' "$BATS_TEST_TMPDIR/o.$f"; done
    cat "$BATS_TEST_TMPDIR/text" | sed 's/ab cd/ab cd ef gh/g' >"$BATS_TEST_TMPDIR/longer"
    refused 413 null /v1/completions "@$BATS_TEST_TMPDIR/longer"
    echo "RSS at the start $base kB, most $(hwm VmHWM) kB, now $(hwm VmRSS) kB"
    case $K3_BUILD in *san*) return 0 ;; esac # they keep what was freed
    [ "$(hwm VmHWM)" -lt $((base + 96 * 1024)) ]
    [ "$(hwm VmRSS)" -lt $((base + 8 * 1024)) ]
}

@test "one who sends a byte now and then is cut; one who reads a byte now and then disturbs nobody" {
    serve --client-timeout 2 --ping 1
    (client drip head 20 >"$BATS_TEST_TMPDIR/head") &
    pids=($!)
    (client drip body 20 >"$BATS_TEST_TMPDIR/body") &
    pids+=($!)
    (client sip /v1/completions "{${LONG%,*},\"max_tokens\":100,\"stream\":true}" 3 >"$BATS_TEST_TMPDIR/sip" 2>"$BATS_TEST_TMPDIR/sipped") &
    pids+=($!)
    # others are served meanwhile
    ask /v1/completions '{"prompt":"The capital of France is","temperature":0}' | jq -e '.choices[0].text == " Paris."'
    wait "${pids[@]}"
    for f in head body; do
        echo "$f $(cat "$BATS_TEST_TMPDIR/$f")"
        awk -v s="$(cat "$BATS_TEST_TMPDIR/$f")" -v slow="$SLOW" 'BEGIN { exit !(s >= 1.5 && s < 12 * slow) }'
    done
    [ "$(stat_of k3-router connections_cut)" -ge 2 ]
    [ "$(cat "$BATS_TEST_TMPDIR/sipped")" -lt 100 ]
    sed -n 's/^data: \({.*\)\r*$/\1/p' "$BATS_TEST_TMPDIR/sip" | jq -se '.[-1].choices[0].finish_reason == "length"'
}

@test "the queue is bounded: 429 with Retry-After, and who waits hears where he stands" {
    serve --parallel 1 --queue 1 --ping 1
    curl -sS -N -m 60 "$URL/v1/completions" --data-binary "{$LONG,\"stream\":true}" >"$BATS_TEST_TMPDIR/a" 3>&- &
    first=$!
    for _ in $(seq 100); do [ "$(stat_of k3-router answers_running)" = 1 ] && break; sleep 0.05; done
    curl -sS -N -m 60 "$URL/v1/completions" --data-binary '{"prompt":"The capital of France is","temperature":0,"stream":true}' >"$BATS_TEST_TMPDIR/b" 3>&- &
    second=$!
    for _ in $(seq 100); do [ "$(stat_of k3-router answers_queued)" = 1 ] && break; sleep 0.05; done
    ask /v1/completions '{"prompt":"x"}' -i | tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    status_is 429
    grep -qE '^Retry-After: [0-9]+$' "$BATS_TEST_TMPDIR/o"
    sed '1,/^$/d' "$BATS_TEST_TMPDIR/o" | jq -e '.error | .type == "rate_limit_error" and .code == "queue_full"'
    for _ in $(seq $((60 * SLOW))); do grep -q '^: queued, 0 before it, 1 running$' "$BATS_TEST_TMPDIR/b" && break; sleep 0.1; done
    grep -q '^: queued, 0 before it, 1 running$' "$BATS_TEST_TMPDIR/b"
    # the first leaves, and the second has its turn
    kill $first
    wait $second
    events <"$BATS_TEST_TMPDIR/b" | jq -rj '.choices[0].text' | grep -qx ' Paris.'
}
