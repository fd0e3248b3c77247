#!/usr/bin/env bats
# SIGKILL of a member in the middle of an answer: the answer is the undisturbed one to the byte, and one line says what died.
load helpers

PROMPT=11,7,503,90,41,8,399,64,3,77,200,5,5,5,300,31
TOKENS=60

setup_file() {
    "$K3_BIN/k3-mkmodel" --hidden 384 --layers 9 --vocab 512 --kda-heads 4 --kda-dim 64 --mla-heads 4 --q-lora 96 \
        --kv-lora 64 --qk-nope 32 --qk-rope 16 --v-dim 32 --experts 32 --top-k 4 --latent 192 --moe-inter 192 --dense-inter 512 \
        --res-block 4 --full-attn 4,8,9 --seed 5 --out "$BATS_FILE_TMPDIR/model"
    up --model "$BATS_FILE_TMPDIR/model" --ctx 256 --ring-mb 2 --trunk-gb 0.012 --cache-gb 0.002
    local start=$EPOCHREALTIME
    router --ids "$PROMPT" --max-tokens $TOKENS --json </dev/null | jq -c .generated_ids >"$BATS_FILE_TMPDIR/base.ids"
    local end=$EPOCHREALTIME
    echo $(((${end/./} - ${start/./}) / 1000)) >"$BATS_FILE_TMPDIR/ms"
}
teardown_file() { down; }

kill_ten_times() { # kill_ten_times DAEMON
    local i ms pid before after
    ms=$(cat "$BATS_FILE_TMPDIR/ms")
    for i in 0 1 2 3 4 5 6 7 8 9; do
        ctl wait --timeout $((20 * SLOW))
        before=$(grep -c "event=member_died.*name=$1 " "$(run_dir "$INSTANCE")/k3-run.log" || true)
        router --ids "$PROMPT" --max-tokens $TOKENS --json </dev/null >"$BATS_TEST_TMPDIR/o.json" 2>"$BATS_TEST_TMPDIR/err" &
        pid=$!
        sleep "$(awk -v m="$ms" -v r="$RANDOM" 'BEGIN { printf "%.3f", m * (0.05 + 0.85 * r / 32768) / 1000 }')"
        kill -KILL "$(pid_of "$1")"
        wait $pid || { cat "$BATS_TEST_TMPDIR/err"; return 1; }
        [ "$(jq -c .generated_ids "$BATS_TEST_TMPDIR/o.json")" = "$(cat "$BATS_FILE_TMPDIR/base.ids")" ] || {
            cat "$BATS_TEST_TMPDIR/err"
            diff "$BATS_FILE_TMPDIR/base.ids" <(jq -c .generated_ids "$BATS_TEST_TMPDIR/o.json")
            return 1
        }
        for _ in $(seq $((200 * SLOW))); do # the answer may have been over before the kill: then the line comes after it
            after=$(grep -c "event=member_died.*name=$1 " "$(run_dir "$INSTANCE")/k3-run.log" || true)
            [ "$after" -eq "$before" ] || break
            sleep 0.05
        done
        [ "$after" -eq $((before + 1)) ]
    done
}
@test "k3-trunkd killed at ten random moments" { kill_ten_times k3-trunkd; }
@test "k3-expertd killed at ten random moments" { kill_ten_times k3-expertd; }
@test "k3-computed killed at ten random moments" { kill_ten_times k3-computed; }
