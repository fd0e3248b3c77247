#!/usr/bin/env bats
# Conversations go on without being computed again: over HTTP, at the terminal, after a client that left; and what it costs.
load http_helpers

setup_file() {
    up --ctx 2048 --snapshots 4 --batch-rows 16
    serve
}
teardown_file() {
    stop_server
    down
}
teardown() {
    [ -z "${TMUX_SOCKET:-}" ] || tmux -L "$TMUX_SOCKET" kill-server 3>&- 4>&- 2>/dev/null || true
}

ITALY='{"role":"user","content":"What is the capital of Italy?"}'
SPAIN='{"role":"user","content":"Spain?"}'
FRANCE='{"role":"user","content":"What is the capital of France?"}'
O() { echo "$BATS_TEST_TMPDIR/$1"; }
of_computed() { stat_of k3-computed "$1"; }
# One turn of a chat: the messages and what else the body says; FILE gets the reply.  Sets PROMPT and CACHED, as the reply says,
# and COMPUTED, what k3-computed has computed of the prompt.
turn() { # turn FILE MESSAGES MORE
    local before
    idle 20
    before=$(of_computed prompt_tokens)
    ask /v1/chat/completions "{\"temperature\":0,\"max_tokens\":60,\"messages\":$2${3:+,$3}}" >"$(O "$1")"
    cat "$(O "$1")"
    status_is 200
    idle 20
    COMPUTED=$(($(of_computed prompt_tokens) - before))
    PROMPT=$(jq .usage.prompt_tokens "$(O "$1")")
    CACHED=$(jq .usage.prompt_tokens_details.cached_tokens "$(O "$1")")
    jq -e '.usage.cached_tokens == .usage.prompt_tokens_details.cached_tokens and .timings.cache_n == .usage.cached_tokens
        and .timings.prompt_n == .usage.prompt_tokens - .usage.cached_tokens' "$(O "$1")"
    [ $COMPUTED -eq $((PROMPT - CACHED)) ]
}
# The ids of a body's prompt, one a line.
ids() { ask /tokenize "{\"messages\":$1${2:+,$2}}" | jq -c '.tokens[]'; }
shows() { # shows REGEX: waits until a line of the terminal matches
    for _ in $(seq $((400 * SLOW))); do
        tmux -L "$INSTANCE" capture-pane -p 3>&- 4>&- | grep -qE -- "$1" && return 0
        sleep 0.1
    done
    tmux -L "$INSTANCE" capture-pane -p
    return 1
}
answer() { jq -c '.choices[0].message' "$(O "$1")"; }
nothing_kept() { # k3-computed anew
    "$ROOT/run/k3-run" restart computed --instance "$INSTANCE" >/dev/null 3>&- 4>&-
    for _ in $(seq $((200 * SLOW))); do ask /health | grep -q '"ok"' && return 0; sleep 0.05; done
    return 1
}

@test "the second turn computes what is new: without thinking, with it, and with tools" {
    for more in '' '"thinking":{"type":"enabled"}' '"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]'; do
        turn one "[$ITALY]" "$more"
        local first=$PROMPT computed_first=$COMPUTED generated
        [ -z "$more" ] && [ "$CACHED" -eq 0 ] || [ -n "$more" ]
        generated=$(jq .usage.completion_tokens "$(O one)")
        two="[$ITALY,$(answer one),$FRANCE]"
        turn two "$two" "$more"
        # Its ids come back as they were: all of the first turn is there but the last id, which never went through the model.
        [ "$CACHED" -eq $((first + generated - 1)) ]
        answer two >"$(O with)"
        [ -z "$more" ] || continue
        turn three "$two" # again: the whole history is found once more
        [ "$CACHED" -ge $((first + generated - 1)) ]
        [ "$(answer three)" = "$(cat "$(O with)")" ]
        cat "$(O with)" >>"$(O answers)"
    done
    # Nothing is kept by a new k3-computed, and the answers are the same.
    nothing_kept
    turn again "[$ITALY,$(jq -c . <<<'{"role":"assistant","content":"The capital of Italy is Rome."}'),$FRANCE]"
    [ "$CACHED" -eq 0 ] && [ "$COMPUTED" -eq "$PROMPT" ]
    [ "$(answer again)" = "$(head -1 "$(O answers)")" ]
}

@test "what is said for one request alone is not in the way of the next turn" {
    local json='"response_format":{"type":"json_object"}' history at
    turn one "[$SPAIN]" "$json"
    [ "$CACHED" -eq 0 ]
    ids "[$SPAIN]" "$json" >"$(O a)"
    turn two "[$SPAIN,{\"role\":\"assistant\",\"content\":\"{}\"},$FRANCE]" "$json"
    # up to the end of the user's message: before the words on the format, and the three words that open the answer
    ids "[$SPAIN,{\"role\":\"assistant\",\"content\":\"{}\"},$FRANCE]" "$json" >"$(O b)"
    history=$(diff "$(O a)" "$(O b)" | head -1 | sed 's/[^0-9].*//')
    [ "$CACHED" -gt 5 ] && [ "$CACHED" -lt "$history" ]
    at=$CACHED
    [ "$(sed -n "${CACHED}p" "$(O a)")" = 1282 ] # the end of a message
    # An answer that comes back as other text parts at the same place.
    turn three "[$SPAIN,{\"role\":\"assistant\",\"content\":\"Rome!\"},$FRANCE]"
    [ "$CACHED" -eq "$at" ]
}

@test "a completion again: all of it is there but one" {
    idle 20
    for cached in 0 11; do
        ask /v1/completions '{"prompt":[5,6,7,8,9,10,11,12,13,14,15,16],"temperature":0,"max_tokens":4}' >"$(O $cached)"
        jq -e --argjson n $cached '.usage.prompt_tokens_details.cached_tokens == $n' "$(O $cached)"
    done
    [ "$(jq -c .choices "$(O 0)")" = "$(jq -c .choices "$(O 11)")" ]
    ask /v1/completions '{"prompt":[5,6,7,8,9,10,11,12,13,14,15,16,17],"max_tokens":1,"stream":true,"stream_options":{"include_usage":true}}' |
        events | jq -se '.[-1].usage.cached_tokens == 11'
}

@test "a client that leaves in the middle of its prompt and asks again goes on where it was" {
    local body n client=1 i before
    idle 20
    body="{\"temperature\":0,\"max_tokens\":8,\"prompt\":$(seq -s, 1 1200 | sed 's/.*/[&]/')}"
    before=$(of_computed prompt_tokens)
    curl -sS -m 60 -N --data-binary "${body%\}},\"stream\":true}" "$URL/v1/completions" >/dev/null 2>&1 3>&- 4>&- &
    client=$!
    for i in $(seq $((1000 * SLOW))); do # a few of its 75 passes
        [ $(($(of_computed prompt_tokens) - before)) -lt 48 ] || break
        sleep 0.03
    done
    kill -KILL $client
    wait $client 2>/dev/null || true
    idle 20
    n=$(($(of_computed prompt_tokens) - before))
    [ "$n" -ge 48 ] && [ "$n" -lt 1200 ]
    ask /v1/completions "$body" >"$(O again)"
    [ "$(jq .usage.cached_tokens "$(O again)")" -eq "$n" ] # all its whole passes
    idle 20
    [ $(($(of_computed prompt_tokens) - before)) -eq 1200 ]
    nothing_kept
    ask /v1/completions "$body" >"$(O fresh)"
    jq -e '.usage.cached_tokens == 0' "$(O fresh)"
    [ "$(jq -c .choices "$(O again)")" = "$(jq -c .choices "$(O fresh)")" ]
}

@test "a conversation at the terminal goes on, too" {
    command -v tmux >/dev/null || skip "tmux is not installed"
    local hits cached
    idle 20
    hits=$(of_computed prefix_hits) cached=$(of_computed cached_tokens)
    TMUX_SOCKET=$INSTANCE
    tmux -L "$INSTANCE" -f /dev/null new-session -d -x 80 -y 24 \
        "$K3_BIN/k3-router --instance $INSTANCE --state-dir $BATS_TEST_TMPDIR/state --system 'Be brief.' --temperature 0" 3>&- 4>&-
    shows '^> *$'
    tmux -L "$INSTANCE" send-keys "What is the capital of France?" Enter
    shows '^The capital of France is Paris\.$'
    tmux -L "$INSTANCE" send-keys "What is the capital of Italy?" Enter
    shows '^The capital of [^F].*\.$'
    idle 20
    [ $(($(of_computed prefix_hits) - hits)) -eq 1 ]
    [ $(($(of_computed cached_tokens) - cached)) -gt 35 ] # the first turn, its answer too
    # What it says is what a k3-computed says that computes all of it.
    second=$(tmux -L "$INSTANCE" capture-pane -p | grep '^The capital of' | tail -1)
    nothing_kept
    turn fresh "[{\"role\":\"system\",\"content\":\"Be brief.\"},$FRANCE,{\"role\":\"assistant\",\"content\":\"The capital of France is Paris.\"},$ITALY]"
    [ "$CACHED" -eq 0 ]
    [ "$(answer fresh | jq -r .content)" = "$second" ]
}

@test "what is kept can be seen" {
    ctl stats computed | grep -E 'snapshots|cached|prefix'
    [ "$(of_computed snapshots)" -ge 1 ] && [ "$(of_computed snapshots)" -le 4 ]
    [ "$(of_computed snapshot_bytes)" -gt 100000 ]
    ask /metrics | grep -q '^k3_computed_cached_tokens{'
    ctl info computed --json | jq -e '.. | objects | select(has("snapshots")) | .snapshots == 4'
    printf 'The capital of France is' | router --raw --temperature 0 --max-tokens 2 --json | jq -e '.usage.cached_tokens >= 0'
}

@test "snapshots are in the plan, and where memory is tight there are none" {
    "$K3_BIN/k3-plan" --memory 8G --root "$BATS_TEST_TMPDIR" --threads 1 >"$(O plan)" 2>&1 || true
    grep -qE '^  snapshots +691\.2 MB  1 beginning of conversations$' "$(O plan)"
    "$K3_BIN/k3-plan" --memory 2G --root "$BATS_TEST_TMPDIR" --threads 1 | grep -qE '^  snapshots +0\.0 MB  0 beginnings'
    "$K3_BIN/k3-plan" --memory 4G --snapshots 2 --root "$BATS_TEST_TMPDIR" --threads 1 | grep -qE '^  snapshots +1382\.3 MB  2 '
    "$ROOT/run/k3-run" up --instance "$INSTANCE-x" --bin-dir "$K3_BIN" --dry-run | grep -qE '^  snapshots +[0-9.]+ MB  3 beginnings'
    run "$K3_BIN/k3-computed" --model "$DEMO" --instance "$INSTANCE-x" --ctx 16000000 --snapshots 1000
    [ "$status" -eq 2 ] && [[ $output == *"1 sequence and 1000 snapshots of --ctx 16000000"*"--snapshots"* ]]
}
