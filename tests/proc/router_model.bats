#!/usr/bin/env bats
# An answer is finished by the model that began it, on whatever instance; what is said when it cannot be.
load helpers
load long_answer

setup_file() {
    export OTHER=$BATS_FILE_TMPDIR/other-model STATE=$BATS_FILE_TMPDIR/state
    "$K3_BIN/k3-mkmodel" --out "$OTHER" --layers 4 --experts 8 --hidden 64 --vocab 1536 --kda-heads 2 --kda-dim 32 \
        --mla-heads 2 --q-lora 32 --kv-lora 32 --qk-nope 16 --qk-rope 16 --v-dim 16 --dense-inter 64 --moe-inter 32 \
        --latent 32 --top-k 2 --shared-experts 1 --first-dense 1 --full-attn 4 --res-block 2 --eos 2 --bos 1 --pad 0 >&2
    up --ctx 2048
    whole_answer
}
teardown_file() { down; }
setup() { STATE=$BATS_TEST_TMPDIR/state; }
teardown() {
    kill_answer
    INSTANCE=$INSTANCE-b down
}

begin() { # the long answer, held up in its middle; sets PID, GATE, ID, JOURNAL
    start 500
    wait_tokens 30
    JOURNAL=$(journal)
    ID=$(basename "$JOURNAL" .journal)
    refute grep -q '^end' "$JOURNAL"
}
says_both() { # says_both FILE: one line with both models, and how to go on
    grep -qE "$ID was begun by the model $DEMO \(digest [0-9a-f]{8}\).* runs $OTHER \(digest [0-9a-f]{8}\)" "$1"
    grep -qF "run/k3-run up --instance $2 --model $DEMO, then go on with: k3-router --instance $2 --state-dir $STATE --resume $ID" "$1"
}

@test "another model comes up in mid-answer: exit 4, nothing is added; the first one finishes it" {
    begin
    down
    up --ctx 2048 --model "$OTHER"
    finished 4
    cp "$JOURNAL" "$BATS_TEST_TMPDIR/before"
    says_both "$BATS_TEST_TMPDIR/err" "$INSTANCE"
    # The same when it is resumed there: exit 2, in one line.
    run router --state-dir "$STATE" --resume "$ID" --json
    [ "$status" -eq 2 ]
    router --state-dir "$STATE" --resume "$ID" >/dev/null 2>"$BATS_TEST_TMPDIR/err2" || true
    cat "$BATS_TEST_TMPDIR/err2"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err2")" -eq 1 ]
    says_both "$BATS_TEST_TMPDIR/err2" "$INSTANCE"
    cmp "$JOURNAL" "$BATS_TEST_TMPDIR/before"
    down
    up --ctx 2048
    router --state-dir "$STATE" --resume "$ID" | cmp - "$BATS_FILE_TMPDIR/whole"
}

@test "the model is never guessed: exit 3 while nobody says which it is, and another one by now is refused" {
    mkdir -p -m 700 "$(run_dir "$INSTANCE-n")" # as while it starts
    run router --instance "$INSTANCE-n" --state-dir "$STATE" --lines <<<"Hello!"
    rmdir "$(run_dir "$INSTANCE-n")"
    [ "$status" -eq 3 ]
    [[ "$output" == *"is not there to say which model it runs"* ]]
    mkfifo "$BATS_TEST_TMPDIR/in"
    router --state-dir "$STATE" --lines --raw --max-tokens 1 <"$BATS_TEST_TMPDIR/in" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" &
    PID=$!
    exec 5>"$BATS_TEST_TMPDIR/in"
    echo "Hello!" >&5
    for _ in $(seq $((400 * SLOW))); do [ -s "$BATS_TEST_TMPDIR/out" ] && break; sleep 0.05; done
    [ -s "$BATS_TEST_TMPDIR/out" ]
    down
    up --ctx 2048 --model "$OTHER" 5>&-
    echo "Hello!" >&5
    exec 5>&-
    status=0
    wait $PID || status=$?
    PID=
    cat "$BATS_TEST_TMPDIR/out"
    down
    up --ctx 2048
    [ "$status" -eq 2 ]
    [ "$(jq -c '[.finish_reason, .code]' "$BATS_TEST_TMPDIR/out" | tr -d '\n')" = '["length",null]["error",2]' ]
    [[ "$(tail -1 "$BATS_TEST_TMPDIR/out" | jq -r .error)" == *"runs another model by now, $OTHER"* ]]
}

@test "--resume goes to the journal's instance; on another one only the same model goes on" {
    begin
    kill -KILL $PID
    finished 137
    timeout $((60 * SLOW)) "$K3_BIN/k3-router" --state-dir "$STATE" --resume "$ID" | cmp - "$BATS_FILE_TMPDIR/whole"
    rm "$STATE"/*.journal
    begin
    kill -KILL $PID
    finished 137
    (INSTANCE=$INSTANCE-b up --ctx 2048 --model "$OTHER")
    cp "$JOURNAL" "$BATS_TEST_TMPDIR/before"
    run timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE-b" --state-dir "$STATE" --resume "$ID"
    [ "$status" -eq 2 ]
    echo "$output" >"$BATS_TEST_TMPDIR/says"
    says_both "$BATS_TEST_TMPDIR/says" "$INSTANCE-b"
    cmp "$JOURNAL" "$BATS_TEST_TMPDIR/before"
    (INSTANCE=$INSTANCE-b down; INSTANCE=$INSTANCE-b up --ctx 2048)
    timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE-b" --state-dir "$STATE" --resume "$ID" | cmp - "$BATS_FILE_TMPDIR/whole"
}

@test "k3-run restart k3-computed in mid-answer: it goes on to the byte" {
    begin
    computed=$(pid_of k3-computed)
    "$ROOT/run/k3-run" restart k3-computed --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&- 4>&- &
    restart=$!
    for _ in $(seq $((1500 * SLOW))); do kill -0 "$computed" 2>/dev/null || break; sleep 0.02; done
    finished 0
    wait $restart
    cmp "$BATS_TEST_TMPDIR/out" "$BATS_FILE_TMPDIR/whole"
    grep -qE 'k3-computed (went away; waiting for it|was restarted); [0-9]+ tokens are safe' "$BATS_TEST_TMPDIR/err"
}

@test "a model without a tokenizer: text is refused, ids work" {
    (INSTANCE=$INSTANCE-b up --model "$OTHER")
    run timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE-b" --state-dir "$STATE" <<<hi
    echo "$output"
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"$OTHER has no tokenizer"*"--ids"* ]]
    run timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE-b" --state-dir "$STATE" --ids 5,6 --max-tokens 2 --json
    [ "$status" -eq 0 ]
    jq -e '.text == null and .reasoning == null and (.generated_ids | length) > 0' <<<"$output"
}
