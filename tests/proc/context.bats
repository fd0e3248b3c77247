#!/usr/bin/env bats
# Long prompts and long contexts through real daemons: passes, weights and latent KV are counted, nothing is timed.
load computed_helpers

SMALL=$BATS_FILE_TMPDIR/small # of its four layers one is latent attention

setup_file() {
    "$K3_BIN/k3-mkmodel" --out "$BATS_FILE_TMPDIR/small" --layers 4 --experts 16 --hidden 128 --vocab 1024 --kda-heads 2 --kda-dim 32 \
        --mla-heads 2 --q-lora 32 --kv-lora 32 --qk-nope 16 --qk-rope 8 --v-dim 16 --dense-inter 128 --moe-inter 32 --latent 64 \
        --top-k 2 --shared-experts 1 --first-dense 1 --full-attn 4 --res-block 2 --eos 2 --bos 1 --pad 0 >&2
}
teardown() { stop_all; }

submit_long() { # submit_long PROMPT_TOKENS MAX_TOKENS
    PROMPT=$(awk -v n="$1" -v from="${FROM:-5}" 'BEGIN { for (i = 0; i < n; i++) printf "%s%d", i ? "," : "", (i * 7919 + from) % 1000 }') submit $ID "$2"
}
ask_long() { # ask_long PROMPT_TOKENS MAX_TOKENS: the answer as one object
    { submit_long "$1" "$2"; request collect; request forget; } | timeout $((400 * SLOW)) \
        "$K3_BUILD/probe/submit_probe" "$RUN" computed.sock | sed -n 2p
}

@test "a prompt of --batch-rows tokens is one pass: the trunk once, each expert of a layer once" {
    all_three --ctx 1024 --batch-rows 512
    [ "$(ask_long 512 1 | jq '.tokens | length')" -eq 1 ]
    [ "$(stat_of k3-computed passes)" -eq 1 ]
    [ "$(stat_of k3-computed prompt_tokens)" -eq 512 ]
    [ $(($(stat_of k3-computed ring_row_bytes) + $(stat_of k3-computed pinned_row_bytes))) -eq \
      "$(ctl info computed | jq '."k3-computed".layout.trunk_bytes')" ]
    # 8 MoE layers of 32 experts, and 512 rows choose all of them
    [ "$(stat_of k3-computed expert_demands)" -eq 256 ]
    [ "$(stat_of k3-computed distinct_experts)" -eq 256 ]
    # one more token is one more pass; another prompt, for of this one the beginning is kept
    FROM=6 ask_long 513 1 >/dev/null
    [ "$(stat_of k3-computed passes)" -eq 3 ]
}

@test "by hand a pass has 512 rows, or --ctx where that is less" {
    all_three --ctx 1024
    [ "$(ctl info computed | jq '."k3-computed".batch_rows')" -eq 512 ]
    stop_all
    all_three --ctx 100
    [ "$(ctl info computed | jq '."k3-computed".batch_rows')" -eq 100 ]
}

@test "a context of 32,768 positions, to the last one" {
    all_three --ctx 32768 --batch-rows 512
    ask_long 32700 68 >"$BATS_TEST_TMPDIR/answer"
    [ "$(jq '.tokens | length' "$BATS_TEST_TMPDIR/answer")" -eq 68 ]
    [ "$(jq -r '.events[-1].reason' "$BATS_TEST_TMPDIR/answer")" = length ]
    [ "$(stat_of k3-computed passes)" -eq $((64 + 67)) ] # 32,700 of 512 a pass, then a token each
    [ "$(stat_of k3-computed pass_rows)" -eq 32767 ]
    [ "$(stat_of k3-computed kv_bytes)" -eq $((32767 * 32768 / 2 * 480)) ]
    submit_long 32700 69 | ask | jq -e '(.ok | not) and (.error | contains("32768"))' # one position more than there is
}

@test "a long prompt in other slices, with one thread and beside another: the same answer" {
    local tokens
    MODEL=$SMALL all_three --ctx 8192 --batch-rows 512
    tokens=$(ask_long 8000 40 | jq -c .tokens)
    [ "$(jq length <<<"$tokens")" -eq 40 ]
    stop_all
    MODEL=$SMALL all_three --ctx 8192 --batch-rows 300 --threads 1 --sequences 2
    PROMPT=1,2,3 submit 00000000000000000000000000000002 500 | ask >/dev/null
    [ "$(ask_long 8000 40 | jq -c .tokens)" = "$tokens" ]
}

@test "k3-bench context: sixteen lengths, bytes exactly linear, a line through the times" {
    timeout $((120 * SLOW)) "$K3_BIN/k3-bench" context --model "$DEMO" --ctx 2048 --tokens 2 --tsv --threads 3 --force-threads >"$BATS_TEST_TMPDIR/out" 3>&-
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE '^bytes touched +exactly 480 bytes a position$' "$BATS_TEST_TMPDIR/out"
    grep -qE '^R\^2 of the line +[01]\.[0-9]{4}$' "$BATS_TEST_TMPDIR/out"
    # what is not straight is said to be
    awk '/^R\^2 of the line/ { r = $NF } /^below 0\.98, not straight/ { said = 1 } END { exit !(said + 0 == (r < 0.98)) }' "$BATS_TEST_TMPDIR/out"
    # positions, 128 apart, and 480 bytes each
    [ "$(awk -F'\t' 'NF == 5 && $1 ~ /^[0-9]+$/ { if (n++ && ($1 - x != 128 || $2 - y != 128 * 480)) bad++; x = $1; y = $2 }
        END { print n, bad + 0 }' "$BATS_TEST_TMPDIR/out")" = "16 0" ]
    run "$K3_BIN/k3-bench" context --model "$DEMO" --ctx 5
    [ "$status" -eq 2 ] && [ "${#lines[@]}" -eq 1 ]
    run "$K3_BIN/k3-bench" context --model "$DEMO" --layers 3
    echo "$output"
    [ "$status" -eq 2 ] && [[ $output == *"no latent attention"* ]]
    run "$K3_BIN/k3-bench" context --model "$DEMO" --ctx 1048576 --kernels mmx
    [ "$status" -eq 2 ] && [[ $output == *"--kernels mmx"* ]]
    run "$K3_BIN/k3-bench" context
    [ "$status" -eq 2 ] && [[ $output == *--model* ]]
    [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).bench-*")" ]
}
