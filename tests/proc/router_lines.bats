#!/usr/bin/env bats
# k3-router --lines: what a line may be, JSON lines, and --out: resumed after any death with the answers of an undisturbed run.
load helpers

setup_file() {
    up --ctx 512 --sequences 3 --ring-mb 2 --trunk-gb 0.003 --cache-gb 0.0005 # so small that every pass waits for its weights
    export WHOLE=$BATS_FILE_TMPDIR/whole
    prompts >"$BATS_FILE_TMPDIR/prompts"
    many --out "$WHOLE"
    [ "$(wc -l <"$WHOLE")" -eq 8 ]
    [ "$(jq -s 'map(.usage.completion_tokens) | add' "$WHOLE")" -gt 600 ]
}
teardown_file() { down; }
setup() {
    STATE=$BATS_TEST_TMPDIR/state
    OUT=$BATS_TEST_TMPDIR/out
}
teardown() { [ -z "${PID:-}" ] || kill -KILL "$PID" 2>/dev/null || true; }

ask() { router --state-dir "$STATE" "$@"; }
prompts() { for i in 1 2 3 4 5 6 7 8; do echo "Tell me more, $i"; done; }
# Noise of up to 120 tokens a line, of seeds 0, 1, 2 ..
NOISE=(--lines --raw --temperature 100 --top-p 1 --max-tokens 120 --parallel 3)
many() { router --state-dir "${STATE:-$BATS_FILE_TMPDIR/state}" "${NOISE[@]}" "$@" <"$BATS_FILE_TMPDIR/prompts"; }
begin() { # begin TOKENS: the same in the background, until so many tokens are in its journals.  Sets PID.
    "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$STATE" "${NOISE[@]}" --out "$OUT" <"$BATS_FILE_TMPDIR/prompts" \
        2>"$BATS_TEST_TMPDIR/err" 3>&- &
    PID=$!
    for _ in $(seq $((1500 * SLOW))); do
        # Journals of lines that are written are gone.
        [ "$(($(cat "$STATE"/*.journal 2>/dev/null | grep -c '^t ') + 100 * $(cat "$OUT" 2>/dev/null | wc -l)))" -ge "$1" ] && return 0
        sleep 0.02
    done
    return 1
}
ends() { # ends STATUS
    local status=0
    wait $PID || status=$?
    PID=
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq "$1" ]
}
answers() { jq -Sc 'del(.timing, .id)' "$1" | sort; }
same() { # the file has each answer once, and they are those of the undisturbed run
    [ "$(wc -l <"$OUT")" -eq 8 ]
    diff <(answers "$OUT") <(answers "$WHOLE")
    [ -z "$(ls "$STATE"/*.journal 2>/dev/null)" ] # and no journal is left
}

@test "--out has each answer once; a second run has nothing to do; the seeds are those of the lines" {
    before=$(stat_of k3-computed requests)
    cp "$WHOLE" "$OUT"
    many --out "$OUT"
    cmp "$OUT" "$WHOLE"
    [ "$(stat_of k3-computed requests)" = "$before" ]
    [ "$(jq -c '[.index, .seed]' "$WHOLE" | sort | tr -d '\n')" = \
        '[0,"0"][1,"1"][2,"2"][3,"3"][4,"4"][5,"5"][6,"6"][7,"7"]' ]
    # A line alone, with its seed, gives the same.
    ask --raw --temperature 100 --top-p 1 --max-tokens 120 --seed 5 --json <<<"Tell me more, 6" | jq -c .generated_ids >"$OUT.one"
    jq -c 'select(.index == 5).generated_ids' "$WHOLE" | cmp - "$OUT.one"
}

@test "the router is killed in the middle; the next run does the rest" {
    for tokens in 60 350; do
        rm -rf "$OUT" "$STATE"
        begin $tokens
        kill -KILL $PID
        ends 137
        [ "$(cat "$OUT" | wc -l)" -lt 8 ]
        printf '{"index":7,"cr' >>"$OUT" # as if it had died in a write
        many --out "$OUT"
        same
    done
}

@test "k3-computed is killed in the middle; the run goes on" {
    begin 60
    kill -KILL "$(pid_of k3-computed)"
    ends 0
    same
    [ "$(grep -c 'k3-computed' "$BATS_TEST_TMPDIR/err")" -le 2 ] # not a line of each worker
}

@test "the whole family and the router die; all is started again" {
    begin 200
    kill -KILL $PID
    ends 137
    for d in k3-trunkd k3-expertd k3-computed; do kill -KILL "$(pid_of $d)"; done
    down
    [ "$(cat "$OUT" | wc -l)" -lt 8 ]
    up --ctx 512 --sequences 3 --ring-mb 2 --trunk-gb 0.003 --cache-gb 0.0005 # so small that every pass waits for its weights
    many --out "$OUT"
    same
}

@test "an interrupt leaves a file that is gone on with; two runs on one file are refused" {
    begin 60
    run many --out "$OUT"
    [ "$status" -eq 2 ]
    [[ "$output" == *"in use by another k3-router"* ]]
    kill -INT $PID
    ends 1
    grep -qE '[0-7] lines are answered in .*; the same command again does the rest' "$BATS_TEST_TMPDIR/err"
    [ "$(stat_of k3-computed sequences_running)" = 0 ]
    many --out "$OUT"
    same
}

@test "nobody there: exit 3, and nothing is written that a later run would not write" {
    run "$K3_BIN/k3-router" --instance t-nobody --state-dir "$STATE" --model "$DEMO" --lines --out "$OUT" <<<x
    [ "$status" -eq 3 ]
    [ ! -s "$OUT" ]
}

@test "lines that fail have their object, are not asked again, and the exit code is the same each time" {
    for i in $(seq 300); do printf 'capital currency '; done >"$OUT.in"
    printf '\nHello!\n\n' >>"$OUT.in"
    for _ in 1 2; do
        run ask --lines --out "$OUT" <"$OUT.in"
        [ "$status" -eq 2 ]
        [ "$(jq -c '[.index, .code, .finish_reason]' "$OUT" | sort | tr -d '\n')" = '[0,2,"error"][1,null,"stop"][2,2,"error"]' ]
        [[ "$(jq -r 'select(.index == 0).error' "$OUT")" == *"--ctx is 512"* ]]
    done
    [ -z "$(ls "$STATE"/*.journal 2>/dev/null)" ]
}

@test "a file of another input, or of something else, is refused and stays as it is" {
    ask --lines --out "$OUT" <<<"Hello!"
    cp "$OUT" "$OUT.was"
    run ask --lines --out "$OUT" <<<"Where is Kenya?"
    [ "$status" -eq 2 ]
    [[ "$output" == *"its answer to line 1 is of another text"* ]]
    [ "${#lines[@]}" -eq 1 ]
    cmp "$OUT" "$OUT.was"
    echo "my notes" >"$OUT"
    run ask --lines --out "$OUT" <<<"Hello!"
    [ "$status" -eq 2 ]
    [[ "$output" == *"line 1 is no answer of --lines"* ]]
    [ "$(cat "$OUT")" = "my notes" ]
    run ask --out "$OUT" <<<"Hello!"
    [ "$status" -eq 2 ]
}

@test "a file of another input is known before anything is asked" {
    { seq 500; echo last; } | sed '1,500s/.*//' >"$OUT.in" # empty lines are answered at once
    ask --lines --out "$OUT" --max-tokens 1 <"$OUT.in" || true
    grep '"index":500,' "$OUT" >"$OUT.one"
    cp "$OUT.one" "$OUT"
    sed -i 's/last/another/' "$OUT.in"
    run ask --lines --out "$OUT" <"$OUT.in"
    [ "$status" -eq 2 ]
    [[ "$output" == *"its answer to line 501 is of another text"* ]]
    cmp "$OUT" "$OUT.one"
}

@test "a full disk: only what is written is counted, and the same command goes on" {
    need_root
    mkdir "$OUT.dir"
    seq 60 >"$OUT.in"
    mounted tmpfs size=8k "$OUT.dir" bash -c "
        router() { '$K3_BIN/k3-router' --instance '$INSTANCE' --state-dir '$STATE' --lines --raw --max-tokens 1 --out '$OUT.dir/o' <'$OUT.in'; }
        router 2>'$OUT.err'
        echo \$? >'$OUT.status'
        cp '$OUT.dir/o' '$OUT.first'
        mount -o remount,size=1m '$OUT.dir'
        router
        cp '$OUT.dir/o' '$OUT'" 3>&-
    cat "$OUT.err"
    [ "$(cat "$OUT.status")" -eq 1 ]
    grep -q "^k3-router: $(wc -l <"$OUT.first") lines are answered" "$OUT.err"
    [ "$(jq -s 'map(.index) | unique | length' "$OUT")" -eq 60 ]
    [ "$(wc -l <"$OUT")" -eq 60 ]
}

@test "what a line may be: CRLF, NUL, too long, none, no end at the last" {
    printf 'Hello!\r\nHello!\0\n' >"$OUT.in"
    head -c 67108865 /dev/zero >>"$OUT.in"
    printf '\nHello!' >>"$OUT.in"
    run ask --lines --out "$OUT" --max-tokens 1 <"$OUT.in"
    [ "$status" -eq 2 ]
    [ "$(jq -c '[.index, .finish_reason, (.prompt_ids | length)]' "$OUT" | sort | tr -d '\n')" = \
        '[0,"length",23][1,"length",24][2,"error",0][3,"length",23]' ]
    [[ "$(jq -r 'select(.index == 2).error' "$OUT")" == "line 3 of stdin: 67108865 bytes; at most 67108864" ]]
    run ask --lines </dev/null
    [ "$status" -eq 2 ]
    [[ "$output" == *"stdin: no line, so no prompt"* ]]
}

@test "JSON lines: own ids and parameters; a bad one has an object, the others go on" {
    cat >"$OUT.in" <<'J'
{"id":"a","messages":[{"role":"user","content":"What is the capital of France?"}]}
{"id":7,"prompt":"What is the capital of Italy?","max_tokens":3,"seed":18446744073709551615}
{"id":"think","messages":[{"role":"user","content":"What is the capital of Italy?"}],"chat_template_kwargs":{"thinking":true}}
{"id":"bad","prompt":"x","temperature":-1}
{"id":"x","prompt":

{"prompt":"What is the capital of France?","stop":" is P"}
J
    run ask --json-lines --seed 40 <"$OUT.in"
    [ "$status" -eq 2 ]
    grep '^{' <<<"$output" >"$OUT"
    jq -c '[.index, .id, .text, .reasoning, .finish_reason, .seed, .code]' "$OUT" | sed -E 's/"[0-9a-f]{32}"/"ID"/' >"$OUT.got"
    diff "$OUT.got" - <<'W'
[0,"a","The capital of France is Paris.","","stop","40",null]
[1,7,"The capital of","","length","18446744073709551615",null]
[2,"think","The capital of Italy is Rome.","Italy: Rome.","stop","42",null]
[3,"bad",null,null,"error",null,2]
[4,null,null,null,"error",null,2]
[5,null,null,null,"error",null,2]
[6,"ID","The capital of France","","stop","46",null]
W
    jq -r '.error // empty' "$OUT" | diff - <(printf '%s\n' "line 4 of stdin: temperature: must be a number from 0 to 100" \
        "line 5 of stdin: JSON: byte 19: a value is missing" "line 6 of stdin: the prompt is empty")
    run ask --json-lines --system x <"$OUT.in"
    [ "$status" -eq 2 ]
}

@test "progress is for a terminal only" {
    command -v script >/dev/null || skip "script is not installed"
    many >"$OUT" 2>"$OUT.err"
    [ ! -s "$OUT.err" ]
    # It is shown after half a second.
    script -qec "$K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE ${NOISE[*]} --out $OUT.tty <$BATS_FILE_TMPDIR/prompts" \
        "$OUT.screen" </dev/null >/dev/null
    grep -qE '[0-8]/8 lines  [0-9]+ running  [0-9]+ tokens' "$OUT.screen"
    diff <(answers "$OUT.tty") <(answers "$WHOLE")
}
