#!/usr/bin/env bats
# Answers that are held to a JSON Schema, to a JSON object, or to a call, while they are sampled.
load http_helpers

setup_file() {
    up --ctx 2048 --sequences 8
    serve
}
teardown_file() {
    stop_server || true # the last test has killed it
    down
}

CHAT=/v1/chat/completions
QUESTION='"messages":[{"role":"user","content":"What is the capital of Italy?"}],"max_tokens":400'
SCHEMA='{"type":"object","properties":{"capital":{"type":"string","maxLength":12},"people":{"type":["integer","null"]},
    "tags":{"type":"array","items":{"$ref":"#/$defs/tag"},"minItems":1,"maxItems":3}},"required":["capital","tags"],"additionalProperties":false,
    "$defs":{"tag":{"anyOf":[{"enum":["city","old town"]},{"type":"object","properties":{"k":{"type":"boolean"}},"required":["k"],"additionalProperties":false}]}}}'
# a schema whose values are whole in few tokens, however they are drawn
SHORT='"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"array","items":{"type":"string","minLength":2,"maxLength":2},"minItems":8,"maxItems":8}}}'
TOOLS='"tools":[{"type":"function","function":{"name":"get_weather"}},{"type":"function","function":{"name":"get_time"}}]'

format() { # format SCHEMA STRICT: the member of a body
    jq -nc --argjson s "$1" --argjson strict "$2" '{response_format:{type:"json_schema",json_schema:{name:"n",strict:$strict,schema:$s}}}' | sed 's/^{//;s/}$//'
}
contents() { # contents N < replies: the content of N replies, all of which have ended by themselves
    jq -se --argjson n "$1" 'length == $n and all(.choices[0].finish_reason == "stop" and .choices[0].message.content != "")' >/dev/null <"$BATS_TEST_TMPDIR/o" ||
        { cat "$BATS_TEST_TMPDIR/o"; return 1; }
    jq -c '.choices[0].message.content | fromjson' "$BATS_TEST_TMPDIR/o"
}
many() { # many BODY SEED...: one reply a seed, at the same time
    local body=$1 s waits=()
    shift
    for s; do
        curl -sS -m $((60 * SLOW)) -d "{$body,\"temperature\":1,\"seed\":$s}" "$URL$CHAT" >"$BATS_TEST_TMPDIR/o$s" &
        waits+=($!)
    done
    wait "${waits[@]}"
    for s; do cat "$BATS_TEST_TMPDIR/o$s"; echo; done >"$BATS_TEST_TMPDIR/o"
}

@test "json_schema: what is sampled parses and validates, strict or not, with thinking and without" {
    many "$QUESTION,$(format "$SCHEMA" true)" 1 2 3 4
    contents 4 >"$BATS_TEST_TMPDIR/c"
    many "$QUESTION,$(format "$SCHEMA" false),\"thinking\":{\"type\":\"enabled\"},\"top_p\":0.9" 5 6 7 8
    contents 4 >>"$BATS_TEST_TMPDIR/c"
    cat "$BATS_TEST_TMPDIR/c"
    [ "$(sort -u "$BATS_TEST_TMPDIR/c" | wc -l)" -gt 4 ]
    jq -se 'all((.capital | type == "string" and length <= 12) and (.people | type == "null" or (type == "number" and . == floor))
        and (.tags | type == "array" and length >= 1 and length <= 3 and all(. == "city" or . == "old town" or (keys == ["k"] and (.k | type) == "boolean")))
        and (keys - ["capital", "people", "tags"] == []) and (keys | length >= 2))' "$BATS_TEST_TMPDIR/c"
}

@test "json_object: an object, whatever is in it" {
    many "${QUESTION/400/120},\"response_format\":{\"type\":\"json_object\"},\"top_p\":0.9" 11 12 13
    jq -se 'length == 3 and all(.choices[0].finish_reason == "stop" or .choices[0].finish_reason == "length")' "$BATS_TEST_TMPDIR/o"
    jq -se 'map(.choices[0] | select(.finish_reason == "stop") | .message.content | fromjson | type) | length >= 1 and unique == ["object"]' "$BATS_TEST_TMPDIR/o"
    # max_tokens cuts it
    ask $CHAT "{${QUESTION/400/3},$SHORT,\"temperature\":0}" | jq -e '.choices[0].finish_reason == "length" and (.choices[0].message.content | startswith("["))'
}

@test "streamed, it is the same answer; and greedy is held to the schema, too" {
    plain=$(ask $CHAT "{$QUESTION,$SHORT,\"temperature\":1,\"seed\":3}" | jq -r '.choices[0].message.content')
    jq -e 'length == 8 and all(length == 2)' <<<"$plain"
    [ "$(ask $CHAT "{$QUESTION,$SHORT,\"temperature\":1,\"seed\":3,\"stream\":true}" -N | events | jq -sr 'map(.choices[0].delta.content // "") | add')" = "$plain" ]
    ask $CHAT "{$QUESTION,$(format '{"enum":["Paris","Rome, of course"]}' true),\"temperature\":0}" |
        jq -e '.choices[0].message.content == "\"Paris\"" or .choices[0].message.content == "\"Rome, of course\""'
}

@test "tool_choice required and named: a call of a declared tool, always" {
    many "${QUESTION/400/150},$TOOLS,\"tool_choice\":\"required\",\"top_p\":0.5" 1 2 3
    jq -se 'length == 3 and all(.choices[0] | .finish_reason == "tool_calls" or .finish_reason == "length")' "$BATS_TEST_TMPDIR/o"
    jq -se 'map(.choices[0].message.tool_calls // [] | .[]) | length > 0 and all((.function.name == "get_weather" or .function.name == "get_time")
        and (.function.arguments | fromjson | type == "object"))' "$BATS_TEST_TMPDIR/o"
    jq -se 'map(.choices[0] | select(.finish_reason == "tool_calls") | .message.tool_calls | length >= 1) | length >= 1 and all' "$BATS_TEST_TMPDIR/o"
    many "${QUESTION/400/150},$TOOLS,\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"get_time\"}},\"parallel_tool_calls\":false,\"top_p\":0.5" 4 5
    jq -se 'map(.choices[0] | select(.finish_reason != "length") | .message.tool_calls | length == 1 and .[0].function.name == "get_time") | length >= 1 and all' \
        "$BATS_TEST_TMPDIR/o"
}

@test "what cannot be held to is refused before anything is computed" {
    before=$(stat_of k3-computed requests)
    bad="{$QUESTION,$(format '{"properties":{"x":{"type":"string","pattern":"a"}}}' true)}"
    refused 400 response_format.json_schema.schema $CHAT "$bad"
    ask $CHAT "$bad" | jq -e '.error.message | startswith("response_format.json_schema.schema: \"pattern\" at /properties/x is not supported; supported: type, ")'
    refused 400 response_format.json_schema.schema $CHAT "{$QUESTION,$(format '{"$ref":"#/$defs/a"}' true),\"stream\":true}"
    refused 400 tool_choice.function.name $CHAT "{$QUESTION,$TOOLS,\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"x\"}}}"
    [ "$(stat_of k3-computed requests)" = "$before" ]
    # k3-computed refuses by itself
    submit='{"cmd":"submit","id":"00000000000000000000000000000001","prompt_ids":[1],"max_tokens":4,"temperature":0,"top_p":1,"min_p":0,"top_k":0,"seed":"1"'
    control='"control":{"eos":1281,"end_of_msg":1282,"open":1283,"close":1284,"sep":1285}'
    {
        echo "$submit,\"constraint\":{\"start\":\"response\",\"format\":\"xml\",$control}}"
        echo "$submit,\"generated_ids\":[66],\"constraint\":{\"start\":\"response\",\"format\":\"json_object\",$control}}"
    } | "$K3_BUILD/probe/submit_probe" "$(run_dir "$INSTANCE")" computed.sock | jq -se 'all(.ok == false and .code == 2)
        and (.[0].error | contains("format must be")) and (.[1].error | contains("generated_ids[0] is 66"))'
}

killed() { # killed PID: streams into $BATS_TEST_TMPDIR/s, and kills in the middle
    curl -sS -N -m $((60 * SLOW)) -d "$BODY,\"stream\":true}" "$URL$CHAT" >"$BATS_TEST_TMPDIR/s" 2>/dev/null &
    local client=$!
    for _ in $(seq $((400 * SLOW))); do [ "$(grep -c '"content":"..*"' "$BATS_TEST_TMPDIR/s")" -ge 3 ] && break; sleep 0.02; done
    kill -KILL "$1"
    wait $client
}

@test "k3-computed killed in the middle: the same bytes; then the server killed: --resume is held to the schema, too" {
    BODY="{$QUESTION,$SHORT,\"temperature\":1,\"seed\":4"
    plain=$(ask $CHAT "$BODY}" | jq -r '.choices[0].message.content')
    killed "$(pid_of k3-computed)"
    [ "$(events <"$BATS_TEST_TMPDIR/s" | jq -sr 'map(.choices[0].delta.content // "") | add')" = "$plain" ]
    grep -q ': k3-computed \(went away\|was restarted\)' "$BATS_TEST_TMPDIR/s"
    ctl wait --timeout $((20 * SLOW))
    killed "$SERVER" || true
    ! grep -q DONE "$BATS_TEST_TMPDIR/s"
    id=$(events <"$BATS_TEST_TMPDIR/s" | head -1 | jq -r .id)
    [ "$(router --resume "${id#chatcmpl-}")" = "$plain" ]
}
