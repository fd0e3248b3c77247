#!/usr/bin/env bats
# k3-router --http on the demo model: the shape of every reply, of every chunk, and of every refusal.
load http_helpers

setup_file() {
    up --ctx 2048 --sequences 4
    serve
}
teardown_file() {
    stop_server
    down
}

QUESTION='"messages":[{"role":"user","content":"What is the capital of Italy?"}]'
ITALY="The capital of Italy is Rome."

@test "models, one model, health, props" {
    ask /v1/models | jq -e '.object == "list" and (.data | length) == 1 and (.data[0] | .id == "demo-model" and .object == "model"
        and .owned_by == "k3" and (.created | type) == "number" and .max_model_len == 2048 and .context_length == 2048)'
    [ "$(ask /models)" = "$(ask /v1/models)" ]
    ask '/v1/models/demo-model?x=1' | jq -e '.id == "demo-model"'
    refused 404 model /v1/models/gpt-4
    for p in /health /v1/health; do [ "$(ask $p)" = '{"status":"ok"}' ]; done
    ask /props | jq -e '.default_generation_settings.n_ctx == 2048 and .total_slots == 4'
}

@test "metrics has every daemon's page, the server's own too; stats is the same in JSON" {
    ask /metrics "" -i >"$BATS_TEST_TMPDIR/m"
    grep -qi '^content-type: text/plain; version=0.0.4' "$BATS_TEST_TMPDIR/m"
    for d in k3-trunkd k3-expertd k3-computed k3-router; do
        grep -q "^k3_up{instance=\"$INSTANCE\",daemon=\"$d\"} 1$" "$BATS_TEST_TMPDIR/m"
    done
    grep -qE '^k3_router_requests\{instance="[^"]*"\} [1-9]' "$BATS_TEST_TMPDIR/m"
    grep -q '^# TYPE k3_computed_pass_time_ns histogram$' "$BATS_TEST_TMPDIR/m"
    ask /v1/k3/stats | jq -e '.daemons | keys == ["k3-computed","k3-expertd","k3-router","k3-trunkd"]'
    ctl ping router | grep -q '^k3-router state=ready '
}

@test "methods: OPTIONS, HEAD, 404, 405" {
    ask /v1/models "" -X OPTIONS -i | tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    status_is 204
    grep -qx 'Allow: GET, HEAD, OPTIONS' "$BATS_TEST_TMPDIR/o"
    refute grep -qi access-control "$BATS_TEST_TMPDIR/o"
    [ -z "$(curl -sS -m 10 -I "$URL/v1/models" | tr -d '\r' | sed '1,/^$/d')" ]
    refused 404 null /v1/embeddings '{}'
    refused 404 null /v1/responses '{}'
    refused 404 null /../../etc/passwd "" --path-as-is
    refused 404 null /%2e%2e/%2e%2e/etc/passwd "" --path-as-is
    refused 405 null /v1/models '{}'
    refused 405 null /v1/completions "" -X GET
    ask /v1/completions "" -X DELETE -i | grep -q '^Allow: POST, OPTIONS'
}

@test "tokenize and detokenize, in both forms" {
    [ "$(ask /tokenize '{"content":"The capital of"}')" = '{"tokens":[295,319,268]}' ]
    [ "$(ask /tokenize '{"prompt":"The capital of","model":"x"}')" = '{"count":3,"max_model_len":2048,"tokens":[295,319,268]}' ]
    ask /tokenize '{"content":"a🙂\u0000","with_pieces":true}' | jq -e '.tokens[0].piece == "a" and .tokens[-1].piece == "\u0000"
        and ([.tokens[].piece | arrays] | flatten) == [240,159,153,130]'
    # No text becomes a special id unless it is asked for.
    ask /tokenize '{"content":"[EOS]"}' | jq -e '.tokens | max < 1280'
    ask /tokenize '{"content":"[EOS]","parse_special":true}' | jq -e '.tokens == [1281]'
    [ "$(ask /detokenize '{"tokens":[295,319,268,1281]}')" = '{"content":"The capital of[EOS]","prompt":"The capital of[EOS]"}' ]
    ask /detokenize '{"tokens":[172]}' | jq -e '.content == "\ufffd"'
    ask /tokenize "{$QUESTION}" | jq -e '.count == (.tokens | length) and .tokens[0] >= 1280'
}

@test "a completion: text or ids, the whole object" {
    ask /v1/completions '{"prompt":"The capital of France is","temperature":0}' >"$BATS_TEST_TMPDIR/o"
    status_is 200
    jq -e 'keys == ["choices","created","id","model","object","system_fingerprint","timings","usage"] and (.id | test("^cmpl-[0-9a-f]{32}$"))
        and .object == "text_completion" and .model == "demo-model"
        and .choices == [{"index":0,"text":" Paris.","logprobs":null,"finish_reason":"stop"}]
        and .usage == {"prompt_tokens":5,"completion_tokens":5,"total_tokens":10,"cached_tokens":0,"prompt_tokens_details":{"cached_tokens":0},
            "completion_tokens_details":{"reasoning_tokens":0}}' "$BATS_TEST_TMPDIR/o"
    [ "$(ask /v1/completions '{"prompt":[295,319,268,1055,262],"temperature":0,"model":"a \"b\""}' | jq -r '.choices[0].text + .model')" = \
        ' Paris.a "b"' ]
    [ "$(ask /v1/completions '{"prompt":["The capital of France is"],"temperature":0,"max_tokens":1}' |
        jq -c '[.choices[0].finish_reason, .usage.completion_tokens]')" = '["length",1]' ]
    # 16 tokens unless it is said; the smaller name loses; null is absent; -1 is no limit.
    ask /v1/completions "{${LONG%,*}}" | jq -e '.usage.completion_tokens == 16'
    ask /v1/completions "{${LONG%,*},\"max_tokens\":3,\"max_completion_tokens\":5}" | jq -e '.usage.completion_tokens == 5'
    ask /v1/completions "{${LONG%,*},\"max_tokens\":3,\"max_completion_tokens\":null}" | jq -e '.usage.completion_tokens == 3'
    # what was answered can be asked for again by its id
    id=$(jq -r .id "$BATS_TEST_TMPDIR/o")
    [ "$(router --resume "${id#cmpl-}")" = " Paris." ]
}

@test "a completion in chunks: the same text, and the tail" {
    ask /v1/completions '{"prompt":"The capital of France is","temperature":0,"stream":true,"stream_options":{"include_usage":true}}' -N -i |
        tr -d '\r' >"$BATS_TEST_TMPDIR/o"
    grep -qx 'Content-Type: text/event-stream' "$BATS_TEST_TMPDIR/o"
    grep -qx 'Cache-Control: no-cache' "$BATS_TEST_TMPDIR/o"
    grep -qx 'X-Accel-Buffering: no' "$BATS_TEST_TMPDIR/o"
    [ "$(tail -2 "$BATS_TEST_TMPDIR/o")" = 'data: [DONE]' ]
    events <"$BATS_TEST_TMPDIR/o" | jq -se '(map([.id, .created, .model]) | unique | length) == 1
        and (map(.object) | unique) == ["text_completion"]
        and (map(.choices[0].text // "") | join("")) == " Paris."
        and (.[:-1] | all(.usage == null and has("usage") and (.choices | length) == 1))
        and .[-2].choices[0].finish_reason == "stop" and (.[:-2] | all(.choices[0].finish_reason == null))
        and .[-1].choices == [] and .[-1].usage.completion_tokens == 5'
}

@test "a chat: the whole object, with thinking and without" {
    ask /v1/chat/completions "{$QUESTION}" >"$BATS_TEST_TMPDIR/o"
    jq -e --arg t "$ITALY" '(.id | test("^chatcmpl-")) and .object == "chat.completion"
        and .choices == [{"index":0,"message":{"role":"assistant","content":$t},"logprobs":null,"finish_reason":"stop"}]
        and .usage.prompt_tokens == 28 and .usage.completion_tokens == 15' "$BATS_TEST_TMPDIR/o"
    ask /chat/completions "{$QUESTION,\"thinking\":{\"type\":\"enabled\"}}" | jq -e --arg t "$ITALY" \
        '.choices[0].message == {"role":"assistant","content":$t,"reasoning_content":"Italy: Rome."} and .usage.completion_tokens_details.reasoning_tokens > 0'
}

@test "a chat in chunks: role first, one kind of delta each, the tail" {
    for usage in false true; do
        ask /v1/chat/completions "{$QUESTION,\"thinking\":{\"type\":\"enabled\"},\"stream\":true,\"stream_options\":{\"include_usage\":$usage}}" -N \
            >"$BATS_TEST_TMPDIR/o"
        [ "$(tail -2 "$BATS_TEST_TMPDIR/o")" = 'data: [DONE]' ]
        # lines are events, comments and blanks, nothing else
        refute grep -vE '^(data: .*|: .*|)$' "$BATS_TEST_TMPDIR/o"
        events <"$BATS_TEST_TMPDIR/o" | jq -se --arg t "$ITALY" --argjson usage $usage '
            (map([.id, .created, .model, .object]) | unique | length) == 1 and .[0].object == "chat.completion.chunk"
            and .[0].choices[0].delta == {"role":"assistant","content":""}
            and (map(select(.choices != [])) | all(.choices | length == 1 and .[0].index == 0))
            and (map(.choices[0].delta.content // "") | join("")) == $t
            and (map(.choices[0].delta.reasoning_content // "") | join("")) == "Italy: Rome."
            and ([.[1:][].choices[0].delta // {} | keys | length] | max) == 1
            and (map(select(.choices != [])) | .[-1].choices[0] | .delta == {} and .finish_reason == "stop")
            and (if $usage then .[-1].choices == [] and .[-1].usage.total_tokens > 28 else all(has("usage") | not) end)'
    done
}

@test "stop texts, seed and sampling are honoured" {
    ask /v1/chat/completions "{$QUESTION,\"stop\":\" of\"}" | jq -e '.choices[0] | .message.content == "The capital" and .finish_reason == "stop"'
    ask /v1/chat/completions "{$QUESTION,\"stop\":[\"zz\",\" is\"],\"stream\":true}" -N | events |
        jq -se '(map(.choices[0].delta.content // "") | join("")) == "The capital of Italy"'
    noise='"prompt":"Tell me","temperature":100,"top_p":1,"max_tokens":30'
    a=$(ask /v1/completions "{$noise,\"seed\":8}" | jq .choices[0].text)
    [ "$a" = "$(ask /v1/completions "{$noise,\"seed\":8}" | jq .choices[0].text)" ]
    [ "$a" != "$(ask /v1/completions "{$noise,\"seed\":9}" | jq .choices[0].text)" ]
    [ "$(ask /v1/completions "{$noise}" | jq .choices[0].text)" != "$(ask /v1/completions "{$noise}" | jq .choices[0].text)" ]
    # one candidate is greedy, by each of the three
    greedy=$(ask /v1/completions '{"prompt":"The capital of","temperature":0}' | jq .choices[0].text)
    for f in '"top_k":1' '"top_p":1e-6' '"min_p":1'; do
        [ "$(ask /v1/completions "{\"prompt\":\"The capital of\",\"temperature\":1,$f}" | jq .choices[0].text)" = "$greedy" ]
    done
}

@test "each field that is not honoured is refused by name, and so are bodies that are no request" {
    c=/v1/completions x='"prompt":"x"' h=/v1/chat/completions
    row() { printf '%s\t%s\t%s\t%s\n' "$@"; }
    {
        for f in 'n:0' 'n:9' 'n:1.5' 'n:"2"' 'presence_penalty:2.1' 'presence_penalty:"x"' 'frequency_penalty:-2.1' 'repeat_penalty:0' \
            'repeat_penalty:11' 'repetition_penalty:-1' 'logit_bias:5' 'logit_bias:[5]' 'logit_bias:{"5":101}' 'logit_bias:{"5":"1"}' 'logit_bias:{"5":null}' \
            'logit_bias:{"1536":1}' 'logit_bias:{"-1":1}' 'logit_bias:{"05":1}' 'logit_bias:{"a":1}' 'logit_bias:{"":1}' \
            'logit_bias:{"5":1e999}' 'logprobs:21' 'logprobs:"x"' 'top_logprobs:5' 'top_logprobs:-1' 'best_of:2' 'echo:true' \
            'suffix:"x"' 'temperature:-1' 'temperature:"hot"' 'temperature:1e9' 'top_p:0' 'top_p:1.5' 'min_p:2' 'top_k:-2' 'top_k:1.5' 'max_tokens:0' \
            'max_tokens:-5' 'max_tokens:1.5' 'max_completion_tokens:"x"' 'seed:"x"' 'seed:1.5' 'seed:99999999999999999999' 'stop:[""]' 'stop:5' \
            'stop:["a",5]' 'stream:1' 'stream_options:{"include_usage":true}' 'model:5' 'temprature:1'; do
            row 400 "${f%%:*}" $c "{$x,\"${f%%:*}\":${f#*:}}"
            row 400 "${f%%:*}" $h "{$QUESTION,\"${f%%:*}\":${f#*:}}"
        done
        row 400 logprobs $c "{$x,\"logprobs\":6}"
        row 400 logprobs $c "{$x,\"logprobs\":true}"
        row 400 logprobs $h "{$QUESTION,\"logprobs\":1}"
        row 400 top_logprobs $h "{$QUESTION,\"logprobs\":true,\"top_logprobs\":21}"
        row 400 top_logprobs $h "{$QUESTION,\"logprobs\":false,\"top_logprobs\":1}"
        row 400 best_of $c "{$x,\"n\":2,\"best_of\":3}"
        row 400 logit_bias $c "{$x,\"logit_bias\":$(jq -nc '[range(1025) | {(tostring): 1}] | add')}"
        row 400 include_usages $c "{$x,\"stream\":true,\"stream_options\":{\"include_usages\":true}}"
        row 400 include_usage $c "{$x,\"stream\":true,\"stream_options\":{\"include_usage\":5}}"
        for p in '' '"prompt":null' '"prompt":""' '"prompt":[]' '"prompt":["a","b"]' '"prompt":[1,"a"]' '"prompt":[1536]' '"prompt":[-1]' \
            '"prompt":[[1],[2]]' '"prompt":{}'; do
            row 400 prompt $c "{$p}"
        done
        row 400 messages $h '{}'
        row 400 messages $h '{"messages":[]}'
        row 400 functions $h "{$QUESTION,\"functions\":[]}"
        row 400 tool_choice $h "{$QUESTION,\"tool_choice\":\"required\"}"
        for b in '{"prompt":"x"' '[]' 'null' '' '{"prompt":"x",}' "$(printf '[%.0s' {1..3000})"; do row 400 null $c "$b"; done
        row 400 tokens /detokenize '{"tokens":[1,1536]}'
        row 400 tokens /detokenize '{"tokens":"x"}'
        row 400 content /tokenize '{}'
        row 400 content /tokenize '{"content":5}'
        row 400 contents /tokenize '{"content":"x","contents":"y"}'
    } >"$BATS_TEST_TMPDIR/rows"
    /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" refused <"$BATS_TEST_TMPDIR/rows"
    ask $c '{"prompt":["a","b"]}' | jq -r .error.message | grep -q 'one prompt a request'
    refused 400 null $c "$(printf '{"prompt":"\xff"}')"
    ask $c '{"prompt":"x",}' | jq -e '.error.message | test("byte 14")'
    # two million commas would be more nodes than a prompt can need
    { printf '{"prompt":['; head -c 5000000 /dev/zero | tr '\0' ','; printf ']}'; } >"$BATS_TEST_TMPDIR/b"
    refused 413 null $c "@$BATS_TEST_TMPDIR/b"
    # what changes nothing is taken
    ask $c "{$x,\"max_tokens\":1,\"n\":1,\"presence_penalty\":0,\"frequency_penalty\":0.0,\"logit_bias\":{},\"logprobs\":null,\"echo\":false,\"best_of\":1,\"suffix\":null,
        \"user\":\"u\",\"metadata\":{\"a\":[1]},\"store\":true,\"service_tier\":\"auto\",\"seed\":-1,\"top_k\":-1,\"repeat_penalty\":1}" | jq -e .choices
}

@test "prompt and answer must fit into the context; both numbers are said" {
    refused 400 max_tokens /v1/completions '{"prompt":"The capital of","max_tokens":2046}'
    ask /v1/completions '{"prompt":"The capital of","max_tokens":2046}' | jq -e '.error | .code == "context_length_exceeded" and
        (.message | test("3 tokens.*2046.*2048"))'
    printf '{"prompt":[%s295],"max_tokens":-1}' "$(printf '295,%.0s' {1..2047})" >"$BATS_TEST_TMPDIR/b"
    refused 400 prompt /v1/completions "@$BATS_TEST_TMPDIR/b"
    text=$(printf 'a1 %.0s' {1..3000})
    refused 400 messages /v1/chat/completions "{\"messages\":[{\"role\":\"user\",\"content\":\"$text\"}]}"
}

@test "text of a client never becomes a control id" {
    for t in '<|end_of_msg|>' '<|open|>' '[EOS]' '<|close|>message<|sep|>'; do
        body=$(jq -nc --arg t "$t" '{messages:[{role:"user",content:$t}]}')
        plain=$(ask /tokenize '{"messages":[{"role":"user","content":"x"}]}' | jq -c '[.tokens[] | select(. >= 1280)]')
        [ "$(ask /tokenize "$body" | jq -c '[.tokens[] | select(. >= 1280)]')" = "$plain" ]
        ask /tokenize "$(jq -nc --arg t "$t" '{prompt:$t}')" | jq -e '.tokens | max < 1280'
    done
}

@test "fifty clients at once, plain and streaming, each get their own answer" {
    /usr/bin/python3 "$ROOT/tests/proc/http_client.py" "$URL" many 50 /v1/chat/completions >"$BATS_TEST_TMPDIR/o" 3>&- <<BODIES &
{$QUESTION}
{"messages":[{"role":"user","content":"What is the capital of France?"}],"stream":true}
BODIES
    pid=$!
    ask /v1/models "" -m 5 | jq -e .data # all the while
    wait $pid
    # four run and 32 wait; the others hear 429, and which that are is chance
    jq -se 'length == 50 and (map(select(.status == 429)) | length <= 14) and all(.status == 200 or .status == 429)
        and all(select(.status == 200 and .i % 2 == 0) | .body | fromjson | .choices[0].message.content == "The capital of Italy is Rome.")
        and all(select(.status == 200 and .i % 2 == 1) | [.body | scan("data: ({.*})") | .[0] | fromjson | .choices[0].delta.content // ""] | join("") ==
            "The capital of France is Paris.")' "$BATS_TEST_TMPDIR/o"
    idle 20
}

@test "the log has one line a request, and no text" {
    ask /v1/completions '{"prompt":"geheimnis","max_tokens":2}' >/dev/null
    ask /geheim/a?b=geheimnis >/dev/null
    server_says 'event=request method=POST path=/v1/completions status=200 prompt=[0-9]* generated=2 seconds=[0-9.]* end=' 5
    server_says 'event=request method=GET path=/geheim/a status=404' 5
    refute grep -q geheimnis "$SERVER_LOG"
}
