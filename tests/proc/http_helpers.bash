# For the tests of k3-router --http: a server beside the family, and what asks it.
load helpers

# A directory with tests/node/NAME and the npm packages that it names, and a server with a key; for teardown_file: serve_for_node_end.
serve_for_node() { # serve_for_node NAME [COMMAND that must be there]: sets work, KEY and what serve sets
    work=$(mktemp -d "/tmp/k3-$1-XXXXXX")
    export work
    cp "$ROOT"/tests/node/check.mjs "$ROOT/tests/node/$1"/* "$work/"
    if command -v npm >/dev/null && command -v "${2:-npm}" >/dev/null; then
        (cd "$work" && timeout 120 npm ci --no-audit --no-fund >"$work/npm.log" 2>&1 3>&-) || true
    fi
    up --ctx 2048 --sequences 2
    echo abcdefghijklmnopqrstuvwxyz >"$work/key"
    chmod 600 "$work/key"
    export KEY=abcdefghijklmnopqrstuvwxyz
    serve --api-key-file "$work/key"
}
serve_for_node_end() {
    stop_server
    down
    rm -rf "$work"
}
serve() { # serve OPTION...: sets SERVER and URL; the log is $BATS_FILE_TMPDIR/server.log
    SERVER_LOG=$BATS_FILE_TMPDIR/server.log
    : >"$SERVER_LOG"
    "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$BATS_FILE_TMPDIR/state" --http 127.0.0.1:0 "$@" \
        2>>"$SERVER_LOG" </dev/null 3>&- 4>&- &
    SERVER=$!
    server_says 'event=ready' 20
    URL=http://$(sed -n 's/.*event=listening address=\([^ ]*\).*/\1/p' "$SERVER_LOG")
    for _ in $(seq $((100 * SLOW))); do # k3-computed has said what it is
        curl -sS -m 5 "$URL/props" -H "Authorization: Bearer ${KEY:-}" | grep -q '"n_ctx":0,' || break
        sleep 0.05
    done
    export SERVER URL SERVER_LOG
}
server_says() { # server_says PATTERN SECONDS
    for _ in $(seq $(($2 * 20 * SLOW))); do
        grep -q -- "$1" "$SERVER_LOG" && return 0
        sleep 0.05
    done
    echo "the server did not say $1:"
    cat "$SERVER_LOG"
    return 1
}
stop_server() { # SIGTERM, and it leaves by itself
    local status=0
    [ -n "${SERVER:-}" ] || return 0
    kill -TERM "$SERVER" 2>/dev/null || true
    for _ in $(seq $((200 * SLOW))); do kill -0 "$SERVER" 2>/dev/null || break; sleep 0.05; done
    ! kill -KILL "$SERVER" 2>/dev/null || status=1
    SERVER=''
    grep -q 'event=stopped daemon=k3-router' "$SERVER_LOG" && return $status
}
ask() { # ask PATH [BODY] [CURL OPTION...]: the body of the reply; its status is in $BATS_TEST_TMPDIR/status
    local path=$1 body=${2:-}
    shift $(($# < 2 ? $# : 2))
    curl -sS -m $((60 * SLOW)) -w '%{stderr}%{http_code}\n' "$@" ${body:+--data-binary "$body"} "$URL$path" 2>"$BATS_TEST_TMPDIR/status"
}
status_is() { [ "$(tail -1 "$BATS_TEST_TMPDIR/status")" = "$1" ] || { cat "$BATS_TEST_TMPDIR/status"; return 1; }; }
refused() { # refused STATUS PARAM PATH BODY [CURL OPTION...]: an error object that names PARAM ("null": none)
    local want=$1 param=$2 got
    shift 2
    got=$(ask "$@")
    echo "$* -> $(tail -1 "$BATS_TEST_TMPDIR/status") $got"
    status_is "$want"
    jq -e --arg p "$param" '.error | (.param // "null") == $p and (.message | length) > 0 and (.type | type) == "string"
        and has("code") and (keys | length) == 4' <<<"$got" >/dev/null
}
events() { # events < stream: the JSON of each event, one a line
    sed -n 's/^data: \({.*\)/\1/p'
}
# 1,429 tokens of noise, a few seconds: see long_answer.bash.
LONG='"prompt":"Tell me","temperature":100,"top_p":1,"seed":8,"max_tokens":1500'
idle() { # idle SECONDS: k3-computed has nothing more to do
    for _ in $(seq $(($1 * 20 * SLOW))); do
        [ "$(stat_of k3-computed sequences_running)" = 0 ] && [ "$(stat_of k3-computed sequences_queued)" = 0 ] && return 0
        sleep 0.05
    done
    ctl stats computed
    return 1
}
