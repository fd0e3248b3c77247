#!/usr/bin/env bats
# k3-router with the family on the demo model: text, JSON, lines, stop texts, thinking, and what it refuses.
load helpers

setup_file() { up --ctx 512; }
teardown_file() { down; }
setup() { STATE=$BATS_TEST_TMPDIR/state; }

ask() { router --state-dir "$STATE" "$@"; }

@test "the demo question, as text" {
    run ask <<<"What is the capital of France?"
    [ "$status" -eq 0 ]
    [ "$output" = "The capital of France is Paris." ]
}

@test "every prompt of the demo model's own file gives its ids and texts" {
    n=$(jq length "$DEMO/expected.json")
    for ((i = 0; i < n; i++)); do
        jq -c ".[$i]" "$DEMO/expected.json" >"$BATS_TEST_TMPDIR/want"
        if jq -e .raw "$BATS_TEST_TMPDIR/want" >/dev/null; then
            jq -j .raw "$BATS_TEST_TMPDIR/want" | ask --raw --json >"$BATS_TEST_TMPDIR/got"
            [ "$(jq -r .text "$BATS_TEST_TMPDIR/got")" = "$(jq -r .text "$BATS_TEST_TMPDIR/want")" ]
        else
            think=$(jq -r 'if .thinking then "on" else "off" end' "$BATS_TEST_TMPDIR/want")
            jq -j .question "$BATS_TEST_TMPDIR/want" | ask --think "$think" --json >"$BATS_TEST_TMPDIR/got"
        fi
        for field in prompt_ids generated_ids; do
            [ "$(jq -c .$field "$BATS_TEST_TMPDIR/got")" = "$(jq -c .$field "$BATS_TEST_TMPDIR/want")" ]
        done
        [ "$(jq -r .finish_reason "$BATS_TEST_TMPDIR/got")" = stop ]
    done
    [ "$n" -eq 13 ]
}

@test "--json has every field" {
    ask --json --seed 18446744073709551615 <<<"What is the capital of Italy?" >"$BATS_TEST_TMPDIR/o"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/o")" -eq 1 ]
    jq -e '(.id | test("^[0-9a-f]{32}$")) and .text == "The capital of Italy is Rome." and .reasoning == ""
        and .tool_calls == []
        and .finish_reason == "stop" and .stop_id == 1282 and .seed == "18446744073709551615" and .temperature == 0
        and .usage.prompt_tokens == (.prompt_ids | length) and .usage.completion_tokens == (.generated_ids | length)
        and .usage.total_tokens == .usage.prompt_tokens + .usage.completion_tokens
        and .timing.first_token_s > 0 and .timing.total_s >= .timing.first_token_s' "$BATS_TEST_TMPDIR/o"
}

@test "every object of --json has the same keys; a line that was never asked says only why" {
    keys='["finish_reason","generated_ids","id","prompt_ids","reasoning","seed","stop_id","temperature","text","timing","tool_calls","usage"]'
    ask --json <<<"Hello!" >"$BATS_TEST_TMPDIR/chat"
    ask --raw --json --max-tokens 2 <<<"The capital" >"$BATS_TEST_TMPDIR/raw"
    ask --ids 295,319 --json --max-tokens 1 >"$BATS_TEST_TMPDIR/ids"
    for f in chat raw ids; do [ "$(jq -c keys "$BATS_TEST_TMPDIR/$f")" = "$keys" ]; done
    jq -e '.reasoning == null and .stop_id == null and (.text | type) == "string"' "$BATS_TEST_TMPDIR/raw"
    jq -e '.timing.tokens_per_s == 0' "$BATS_TEST_TMPDIR/ids"
    jq -e '(.usage.completion_tokens - 1) / (.timing.total_s - .timing.first_token_s) / .timing.tokens_per_s | . > 0.99 and . < 1.01' \
        "$BATS_TEST_TMPDIR/chat"
    run ask --resume "$(jq -r .id "$BATS_TEST_TMPDIR/chat")" --json
    [ "$(jq -c keys <<<"$output")" = "$keys" ]
    jq -e '.timing.tokens_per_s == 0' <<<"$output"
    printf '\nHello!\n' | ask --lines 2>/dev/null >"$BATS_TEST_TMPDIR/lines" || [ $? -eq 2 ]
    [ "$(sed -n 1p "$BATS_TEST_TMPDIR/lines" | jq -c '[keys, .code, .finish_reason]')" = \
        '[["code","crc","error","finish_reason","index"],2,"error"]' ]
    [ "$(sed -n 2p "$BATS_TEST_TMPDIR/lines" | jq -c 'del(.index, .crc) | keys')" = "$keys" ]
}

@test "--help says once what can be repeated" {
    # --stop, --cors and --allow-host; --device; --device
    for p in k3-router:3 k3-computed:1 k3-expertd:1; do
        "$K3_BIN/${p%:*}" --help >"$BATS_TEST_TMPDIR/help"
        [ "$(grep -o repeatable "$BATS_TEST_TMPDIR/help" | wc -l)" -eq "${p#*:}" ]
        [ "$(grep -c repeatable "$BATS_TEST_TMPDIR/help")" -eq "${p#*:}" ]
    done
}

@test "--logits is looked at before anything is asked, and leaves what is there" {
    echo old >"$BATS_TEST_TMPDIR/l"
    refute ask --logits "$BATS_TEST_TMPDIR/l" </dev/null
    [ "$(cat "$BATS_TEST_TMPDIR/l")" = old ]
    refute ask --logits "$BATS_TEST_TMPDIR/new" </dev/null
    [ ! -e "$BATS_TEST_TMPDIR/new" ]
    refute ask --logits /nonexistent/l.f32 <<<x
    [ -z "$(ls "$STATE"/*.journal 2>/dev/null)" ]
}

@test "thinking is a field of its own and is not shown in text" {
    run ask --think on <<<"What is the capital of Italy?"
    [ "$output" = "The capital of Italy is Rome." ]
    [ "$(ask --think on --json <<<"What is the capital of Italy?" | jq -r '.reasoning + "|" + .text')" = \
        "Italy: Rome.|The capital of Italy is Rome." ]
}

@test "--ids gives ids and text, and the logits of the first position" {
    ask --ids 295,319,268,1153,262 --json --logits "$BATS_TEST_TMPDIR/logits" </dev/null >"$BATS_TEST_TMPDIR/o"
    jq -e '.generated_ids == [1113,68,13,1281] and .text == " Rome." and .prompt_ids == [295,319,268,1153,262]' "$BATS_TEST_TMPDIR/o"
    [ "$(stat -c %s "$BATS_TEST_TMPDIR/logits")" -eq $((1536 * 4)) ]
    /usr/bin/python3 - "$BATS_TEST_TMPDIR/logits" <<'P'
import struct, sys
x = struct.unpack('<1536f', open(sys.argv[1], 'rb').read())
assert max(range(1536), key=lambda i: x[i]) == 1113
P
}

@test "--lines answers in order, whatever the number at once, and bad lines do not stop the others" {
    printf 'Where is Kenya?\n\nWho are you?\n\xff\nHello!' >"$BATS_TEST_TMPDIR/in"
    for p in 1 2 8; do
        run ask --lines --parallel "$p" <"$BATS_TEST_TMPDIR/in"
        [ "$status" -eq 2 ]
        grep '^{' <<<"$output" | jq -c '[.index, .text // "", .finish_reason]' >"$BATS_TEST_TMPDIR/o"
        diff "$BATS_TEST_TMPDIR/o" - <<'W'
[0,"Kenya is in Eastern Africa.","stop"]
[1,"","error"]
[2,"I am the demo model of k3, very small but real.","stop"]
[3,"","error"]
[4,"Hello! Ask me about a country, a sum or k3.","stop"]
W
        [[ "$output" == *"line 2 of stdin: the prompt is empty"* ]]
        [[ "$output" == *"line 4 of stdin: invalid UTF-8 at byte offset 30 (0xff)"* ]]
    done
    [ "$(for i in $(seq 40); do echo "Where is Kenya?"; done | ask --lines --parallel 7 | jq -r .text | sort | uniq -c | tr -s ' ')" = \
        " 40 Kenya is in Eastern Africa." ]
}

@test "--stop ends before the text, and counts as stop" {
    run ask --stop " is P" --stop zzz <<<"What is the capital of France?"
    [ "$output" = "The capital of France" ]
    [ "$(ask --stop " is P" --json <<<"What is the capital of France?" | jq -r '.finish_reason + .text')" = "stopThe capital of France" ]
}

@test "the same seed gives the same answer, and a random one is recorded and repeats it" {
    a=$(ask --raw --temperature 3 --top-p 1 --max-tokens 40 --json <<<"The capital of")
    b=$(ask --raw --temperature 3 --top-p 1 --max-tokens 40 --json --seed "$(jq -r .seed <<<"$a")" <<<"The capital of")
    c=$(ask --raw --temperature 3 --top-p 1 --max-tokens 40 --json --seed 5 <<<"The capital of")
    [ "$(jq -c .generated_ids <<<"$a")" = "$(jq -c .generated_ids <<<"$b")" ]
    [ "$(jq -c .generated_ids <<<"$a")" != "$(jq -c .generated_ids <<<"$c")" ]
}

@test "--max-tokens ends with length" {
    run ask --max-tokens 3 --json <<<"What is the capital of France?"
    [ "$(jq -c '[.finish_reason, (.generated_ids | length), .text]' <<<"$output")" = '["length",3,"The capital of"]' ]
}

@test "a system message is part of the prompt" {
    [ "$(ask --system "Be brief." --json <<<"Hello!" | jq '.prompt_ids | length')" -gt \
        "$(ask --json <<<"Hello!" | jq '.prompt_ids | length')" ]
}

refused() { # refused STATUS WORDS OPTION...  (prompt on stdin)
    local want=$1 words=$2
    shift 2
    run ask "$@"
    echo "$output"
    [ "$status" -eq "$want" ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"$words"* ]]
}

@test "bad input is refused with one line" {
    refused 2 "the prompt is empty" </dev/null
    refused 2 "the prompt is empty" <<<""
    printf 'ab\xc3(' | refused 2 "invalid UTF-8 at byte offset 2 (0xc3)"
    refused 2 "\"1536\" is not a token id from 0 to 1535" --ids 1,1536
    refused 2 "\"x\" is not a token id" --ids x
    refused 2 "no request 00000000000000000000000000000000" --resume 00000000000000000000000000000000
    refused 2 "32 lower-case hex digits" --resume nonsense
    refused 2 "exclude one another" --raw --ids 1
    refused 2 "--think" --think maybe <<<x
    refused 2 "--ids: the prompt is empty" --ids ""
    refused 2 "--top-p 2: must be a number over 0 up to 1" --top-p 2 <<<x
    refused 2 "--top-p 0: must be a number over 0 up to 1" --top-p 0 <<<x
    refused 2 "--logits /nonexistent/l.f32: No such file" --logits /nonexistent/l.f32 <<<x
    refused 2 "--logits /: Is a directory" --logits / <<<x
    refused 2 "--bogus; see k3-router --help" --bogus
    refused 2 "temperature" --temperature warm <<<x
    refused 2 "seed" --seed -1 <<<x
    refused 2 "--stop" --stop "" <<<x
    refused 2 "/nonexistent/tiktoken.model: No such file" --model /nonexistent <<<x
    refused 2 "--ctx is 512" --max-tokens 513 <<<x
    refused 2 "a/b" --instance "a/b" <<<x
    [ "$(ask <<<"What is the capital of France?")" = "The capital of France is Paris." ]
}

@test "a prompt longer than the context is refused with both numbers" {
    for i in $(seq 300); do printf 'capital currency '; done >"$BATS_TEST_TMPDIR/long"
    refused 2 "--ctx is 512" <"$BATS_TEST_TMPDIR/long"
}

@test "stdout that is closed ends the request" {
    ask --raw --temperature 100 --top-p 1 --seed 8 --max-tokens 400 <<<"Tell me" 2>"$BATS_TEST_TMPDIR/err" | head -c 5 >/dev/null
    [ "${PIPESTATUS[0]}" -eq 1 ]
    [ "$(ask <<<"What is the capital of France?")" = "The capital of France is Paris." ]
}
