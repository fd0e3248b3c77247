#!/usr/bin/env bats
# k3-router --http: logprobs, n, logit_bias and penalties.
load http_helpers

serve_on() { # as serve; for the tests that follow, too
    serve "$@"
    printf 'SERVER=%s URL=%s\n' "$SERVER" "$URL" >"$BATS_FILE_TMPDIR/server.env"
}
setup_file() {
    up --ctx 2048 --sequences 4
    serve_on
}
setup() { . "$BATS_FILE_TMPDIR/server.env"; }
teardown_file() {
    . "$BATS_FILE_TMPDIR/server.env"
    stop_server
    down
}

CHAT=/v1/chat/completions TEXT=/v1/completions
QUESTION='"messages":[{"role":"user","content":"What is the capital of Italy?"}]'
# Noise: broken characters, control ids among the best.  400 tokens.
NOISE='"prompt":"Tell me","temperature":100,"top_p":1,"seed":8,"max_tokens":400'
# 1,500 tokens, whatever the seed.
ENDLESS='"prompt":"Tell me","temperature":5,"top_p":1,"seed":8,"max_tokens":1500,"logit_bias":{"1281":-100,"1282":-100}'
jqe() { jq -e "$@" || { echo "jq $*"; return 1; }; }

@test "logprobs of a chat: of the content and of the reasoning, whole and in chunks the same" {
    body="$QUESTION,\"temperature\":0,\"logprobs\":true,\"top_logprobs\":4,\"thinking\":{\"type\":\"enabled\"}"
    ask $CHAT "{$body}" >"$BATS_TEST_TMPDIR/o"
    jqe '.choices[0] as $c | $c.logprobs | keys == ["content","reasoning_content","refusal"] and .refusal == null
        and (.content | map(.token) | join("")) == $c.message.content
        and (.content | map(.bytes) | flatten | implode) == $c.message.content
        and (.reasoning_content | map(.token) | join("")) == $c.message.reasoning_content
        and (.content + .reasoning_content | all(keys == ["bytes","logprob","token","top_logprobs"] and (.top_logprobs | length) == 4
            and (.top_logprobs | map(.logprob) | . == (sort | reverse)) and (.top_logprobs | map(.logprob | exp) | add) < 1.000001
            and .logprob == .top_logprobs[0].logprob and .token == .top_logprobs[0].token and .logprob <= 0))' "$BATS_TEST_TMPDIR/o"
    ask $CHAT "{$body,\"stream\":true}" -N >"$BATS_TEST_TMPDIR/s"
    events <"$BATS_TEST_TMPDIR/s" | jq -sc '[.[].choices[0].logprobs // empty] | {content: map(.content[]), reasoning_content: map(.reasoning_content // [] | .[]),
        refusal: null}' >"$BATS_TEST_TMPDIR/joined"
    [ "$(cat "$BATS_TEST_TMPDIR/joined")" = "$(jq -c .choices[0].logprobs "$BATS_TEST_TMPDIR/o")" ]
    # each chunk has those of its text
    events <"$BATS_TEST_TMPDIR/s" | jqe -s 'all(.[].choices[0]; (.delta.content // "") == "" or (.logprobs.content | map(.token) | join("")) == .delta.content)'
    # without top_logprobs, without logprobs, without thinking
    ask $CHAT "{$QUESTION,\"temperature\":0,\"logprobs\":true}" | jqe '.choices[0].logprobs | has("reasoning_content") == false and
        (.content | length) == 8 and all(.content[]; .top_logprobs == [])'
    ask $CHAT "{$QUESTION,\"temperature\":0,\"logprobs\":false}" | jqe '.choices[0] | has("logprobs") and .logprobs == null'
}

@test "logprobs of a completion: four arrays, broken characters, stop texts, whole and in chunks the same" {
    ask $TEXT "{$NOISE,\"logprobs\":5}" >"$BATS_TEST_TMPDIR/o"
    jqe '.choices[0] as $c | $c.logprobs | keys == ["text_offset","token_logprobs","tokens","top_logprobs"]
        and ([.tokens, .token_logprobs, .top_logprobs, .text_offset] | map(length) | unique | length) == 1
        and (.tokens | length) > 250 and .text_offset[0] == 0 and .text_offset == (.text_offset | sort)
        and ([range(.tokens | length) as $i | .tokens[$i] as $t | select($t | contains("\ufffd") | not) |
            $c.text[.text_offset[$i]:] | startswith($t)] | length > 200 and (map(select(. == false)) | length) < 40)
        and all(.top_logprobs[]; length >= 1 and length <= 6) and all(.token_logprobs[]; . < 0)' "$BATS_TEST_TMPDIR/o"
    for more in '' ',"stop":["'"$(jq -r '.choices[0].text[300:303]' "$BATS_TEST_TMPDIR/o" | jq -Rr @json | sed 's/^"//;s/"$//')"'"]'; do
        ask $TEXT "{$NOISE,\"logprobs\":5$more}" | jq -c .choices[0] >"$BATS_TEST_TMPDIR/whole"
        ask $TEXT "{$NOISE,\"logprobs\":5$more,\"stream\":true}" -N >"$BATS_TEST_TMPDIR/s"
        events <"$BATS_TEST_TMPDIR/s" | jq -sc '[.[].choices[0].logprobs // empty] | {tokens: map(.tokens[]), token_logprobs: map(.token_logprobs[]),
            top_logprobs: map(.top_logprobs[]), text_offset: map(.text_offset[])}' >"$BATS_TEST_TMPDIR/joined"
        [ "$(cat "$BATS_TEST_TMPDIR/joined")" = "$(jq -c .logprobs "$BATS_TEST_TMPDIR/whole")" ]
        jqe '.logprobs.text_offset[-1] < (.text | length)' "$BATS_TEST_TMPDIR/whole" # nothing of what the stop text cut off
    done
    ask $TEXT "{\"prompt\":\"The capital of France is\",\"temperature\":0,\"logprobs\":0}" | jqe '.choices[0].logprobs |
        (.tokens | join("")) == " Paris." and .top_logprobs == null'
}

@test "n answers: the seeds follow each other, chunks have the right index, usage adds up" {
    body="$QUESTION,\"temperature\":2.5,\"top_p\":1,\"max_tokens\":24"
    for seed in 41 42 43; do ask $CHAT "{$body,\"seed\":$seed}" | jq -c '[.choices[0].message.content, .choices[0].finish_reason]'; done >"$BATS_TEST_TMPDIR/single"
    [ "$(sort -u "$BATS_TEST_TMPDIR/single" | wc -l)" -gt 1 ]
    ask $CHAT "{$body,\"seed\":41,\"n\":3,\"logprobs\":true}" >"$BATS_TEST_TMPDIR/o"
    jq -c '.choices[] | [.message.content, .finish_reason]' "$BATS_TEST_TMPDIR/o" | cmp - "$BATS_TEST_TMPDIR/single"
    jqe '(.choices | map(.index)) == [0,1,2] and .usage.prompt_tokens == 28 and .usage.total_tokens == 28 + .usage.completion_tokens
        and .usage.completion_tokens == .timings.predicted_n and .usage.completion_tokens > 30
        and all(.choices[]; .message.content == (.logprobs.content | map(.bytes) | flatten | implode)
            or (.message.content | contains("\ufffd")))' "$BATS_TEST_TMPDIR/o"
    ask $CHAT "{$body,\"seed\":41,\"n\":3,\"stream\":true,\"stream_options\":{\"include_usage\":true}}" -N >"$BATS_TEST_TMPDIR/s"
    [ "$(grep -c DONE "$BATS_TEST_TMPDIR/s")" = 1 ]
    [ "$(tail -2 "$BATS_TEST_TMPDIR/s")" = 'data: [DONE]' ]
    events <"$BATS_TEST_TMPDIR/s" | jq -sc 'map(.choices[]) | group_by(.index)[] | [(map(.delta.content // "") | add), .[-1].finish_reason]' >"$BATS_TEST_TMPDIR/joined"
    cmp "$BATS_TEST_TMPDIR/joined" "$BATS_TEST_TMPDIR/single"
    events <"$BATS_TEST_TMPDIR/s" | jqe -s --argjson u "$(jq -c .usage "$BATS_TEST_TMPDIR/o")" '.[-1].usage == $u and .[-1].choices == []
        and (map(.id) | unique | length) == 1 and (.[:3] | map(.choices[0] | [.index, .delta.role])) == [[0,"assistant"],[1,"assistant"],[2,"assistant"]]
        and (map(.choices[0] | select(.finish_reason)) | map(.index) | sort) == [0,1,2]'
    ask $TEXT '{"prompt":"The capital of France is","temperature":0,"n":8,"best_of":8}' | jqe '(.choices | map(.text) | unique) == [" Paris."] and (.choices | length) == 8'
}

@test "logit_bias bans and forces, penalties count what was answered" {
    ask $TEXT '{"prompt":"The capital of France is","temperature":0,"max_tokens":4,"logprobs":1}' >"$BATS_TEST_TMPDIR/o"
    first=$(jq -r '.choices[0].logprobs.tokens[0]' "$BATS_TEST_TMPDIR/o")
    id=$(ask /tokenize "$(jq -nc --arg t "$first" '{content:$t}')" | jq .tokens[0])
    ask $TEXT "{\"prompt\":\"The capital of France is\",\"temperature\":0,\"max_tokens\":4,\"logprobs\":1,\"logit_bias\":{\"$id\":-100}}" >"$BATS_TEST_TMPDIR/b"
    jqe --arg t "$first" --slurpfile o "$BATS_TEST_TMPDIR/o" '.choices[0].logprobs | (.tokens | index($t)) == null
        and .top_logprobs[0][$t] == $o[0].choices[0].logprobs.token_logprobs[0]' "$BATS_TEST_TMPDIR/b" # the model still thinks so
    force='"prompt":"The capital of France is","max_tokens":4,"seed":3,"logit_bias":{"295":100,"319":60}'
    ask $TEXT "{$force}" | jqe '.choices[0].text == "TheTheTheThe"'
    # The prompt holds "The capital", which does not count.
    ask $TEXT "{$force,\"repeat_penalty\":10,\"logprobs\":0}" | jqe '.choices[0].logprobs.tokens | .[:2] == ["The"," capital"] and .[2] != "The" and .[2] != " capital"'
    [ "$(ask $TEXT "{$force,\"repeat_penalty\":10}" | jq .choices[0].text)" = "$(ask $TEXT "{$force,\"repetition_penalty\":10}" | jq .choices[0].text)" ]
    # Every id but one is as far down as it can be; of two that are equal a penalty takes the other.
    loop='"prompt":"x","temperature":0,"max_tokens":40'
    plain=$(ask $TEXT "{$loop,\"logit_bias\":{\"1282\":-100,\"1281\":-100}}" | jq .choices[0].text)
    for p in presence_penalty frequency_penalty; do
        ask $TEXT "{$loop,\"logit_bias\":{\"1282\":-100,\"1281\":-100},\"$p\":2}" | jqe --argjson t "$plain" '.choices[0].text != $t'
    done
}

@test "k3-computed is killed, the server is killed: text and logprobs are whole" {
    ask $TEXT "{$NOISE,\"logprobs\":3}" >"$BATS_TEST_TMPDIR/o"
    id=$(jq -r '.id | ltrimstr("cmpl-")' "$BATS_TEST_TMPDIR/o")
    router --state-dir "$BATS_FILE_TMPDIR/state" --resume "$id" --json | jq -c .logprobs >"$BATS_TEST_TMPDIR/l"
    jqe 'length == 400 and all(.top | length == 3)' "$BATS_TEST_TMPDIR/l"
    trunkd=$(pid_of k3-trunkd)
    part() { # part FILE: a stream of which 20 chunks have come, and then nothing more; sets CURL
        ask $TEXT "{$NOISE,\"logprobs\":3,\"stream\":true}" -N >"$1" 3>&- &
        CURL=$!
        for _ in $(seq $((1000 * SLOW))); do [ "$(grep -c '^data' "$1")" -lt 20 ] || break; sleep 0.01; done
        kill -STOP "$trunkd"
    }
    part "$BATS_TEST_TMPDIR/s"
    kill -KILL "$(pid_of k3-computed)"
    kill -CONT "$trunkd"
    wait $CURL
    grep -q '^: k3-computed' "$BATS_TEST_TMPDIR/s" # it was in the middle
    events <"$BATS_TEST_TMPDIR/s" | jq -sc '[.[].choices[0] | select(.logprobs)] | {text: map(.text) | add, t: map(.logprobs.tokens[]),
        l: map(.logprobs.token_logprobs[]), b: map(.logprobs.top_logprobs[])}' >"$BATS_TEST_TMPDIR/joined"
    jq -c '.choices[0] | {text, t: .logprobs.tokens, l: .logprobs.token_logprobs, b: .logprobs.top_logprobs}' "$BATS_TEST_TMPDIR/o" |
        cmp - "$BATS_TEST_TMPDIR/joined"
    # the server dies; --resume has what came before, and what comes after
    part "$BATS_TEST_TMPDIR/s"
    kill -KILL "$SERVER"
    kill -CONT "$trunkd"
    wait $CURL || true
    id=$(events <"$BATS_TEST_TMPDIR/s" | head -1 | jq -r '.id | ltrimstr("cmpl-")')
    journal=$BATS_FILE_TMPDIR/state/$id.journal
    ! grep -q '^end' "$journal"
    kill -KILL "$(pid_of k3-computed)" # so that nobody else has them
    sleep 0.3
    ctl wait --timeout $((20 * SLOW))
    router --state-dir "$BATS_FILE_TMPDIR/state" --resume "$id" --json | jq -c .logprobs | cmp - "$BATS_TEST_TMPDIR/l"
    serve_on
}

@test "a client that leaves ends all its answers, those that wait too; a server that stops ends them with one error" {
    ask $TEXT "{$ENDLESS,\"n\":8,\"stream\":true}" -N -m 2 >"$BATS_TEST_TMPDIR/s" || true
    events <"$BATS_TEST_TMPDIR/s" | jqe -s 'map(.choices[0].index) | unique | length == 8 and (length > 0)'
    idle 10
    server_says 'event=request method=POST path=/v1/completions status=200 .* end=client_gone' 10
    [ "$(grep -lx 'end cancelled' "$BATS_FILE_TMPDIR"/state/*.journal | wc -l)" -eq 8 ]
    ask $TEXT "{$ENDLESS,\"n\":8,\"stream\":true}" -N >"$BATS_TEST_TMPDIR/s" 3>&- &
    pid=$!
    for _ in $(seq $((1000 * SLOW))); do [ "$(grep -c '^data' "$BATS_TEST_TMPDIR/s")" -lt 30 ] || break; sleep 0.01; done
    stop_server
    wait $pid
    [ "$(tail -2 "$BATS_TEST_TMPDIR/s")" = 'data: [DONE]' ]
    [ "$(grep -c DONE "$BATS_TEST_TMPDIR/s")" = 1 ]
    [ "$(events <"$BATS_TEST_TMPDIR/s" | jq -c 'select(.error) | .error.type')" = '"unavailable_error"' ]
    SERVER=
    serve_on --parallel 1 --queue 2 # of the next test
    # none of them was over: each can be resumed
    [ "$(grep -Lx 'end .*' "$BATS_FILE_TMPDIR"/state/*.journal | wc -l)" -eq 8 ]
}

@test "one answer at a time: n of them come one after the other, and no more than there are places" {
    x='"prompt":"The capital of France is","temperature":0,"max_tokens":5'
    ask $TEXT "{$x,\"n\":3}" | jqe '(.choices | map(.text) | unique) == [" Paris."] and (.choices | length) == 3'
    refused 400 n $TEXT "{$x,\"n\":4}"
    # four requests of two at once: one or the other hears 429, and nobody waits for ever
    /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" many 4 $TEXT <<<"{$x,\"n\":2}" >"$BATS_TEST_TMPDIR/m"
    jqe -s 'length == 4 and any(.status == 200) and all((.status == 200 and (.body | fromjson | .choices | map(.text)) == [" Paris."," Paris."]) or .status == 429)' \
        "$BATS_TEST_TMPDIR/m"
    # an answer that fails ends the reply, and all of it
    ctl drain computed
    ask $TEXT "{$x,\"n\":3}" | jqe '.error.type == "unavailable_error"'
    status_is 503
    idle 10
}
