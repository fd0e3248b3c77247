#!/usr/bin/env bats
# Bad checkpoints, options and prompts: exit 2, one line that names the thing, its value and what would be right, within
# five seconds (of a release build), and nothing left behind.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/good"
}
setup() {
    cp -r "$BATS_FILE_TMPDIR/good" "$BATS_TEST_TMPDIR/m"
    M=$BATS_TEST_TMPDIR/m
    S=$(find "$M" -name '*.safetensors' | sort | head -1)
    T=$(find "$M" -name '*.safetensors' | sort | sed -n 2p)
}
teardown() { down; }

# Starting on $M is refused with one line that matches every pattern.
refused() { # refused PATTERN...
    local start=$SECONDS status=0 p
    up --model "$M" "${OPTIONS[@]}" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    without_progress "$BATS_TEST_TMPDIR/err"
    echo "status $status after $((SECONDS - start)) s"
    [ "$status" -eq 2 ]
    [ $((SECONDS - start)) -le $((5 * SLOW)) ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    for p in "$@"; do grep -qiE -- "$p" "$BATS_TEST_TMPDIR/err" || { echo "no $p"; return 1; }; done
    nothing_left "$INSTANCE"
}
edit() { /usr/bin/python3 "$ROOT/tests/proc/edit_header.py" "$S" "$1"; }
config() { # config JQ-FILTER
    jq "$1" "$M/config.json" >"$M/c" && mv "$M/c" "$M/config.json"
}

@test "a missing shard" {
    rm "$T"
    refused "$(basename "$T")|missing"
}
@test "a shard one byte short" {
    truncate -s -1 "$S"
    refused "$(basename "$S")" "[0-9]+"
}
@test "a shard 4 KiB short" {
    truncate -s -4096 "$S"
    refused "$(basename "$S")" "[0-9]+"
}
@test "half a shard" {
    truncate -s $(($(stat -c %s "$S") / 2)) "$S"
    refused "$(basename "$S")" "[0-9]+"
}
@test "an empty shard" {
    : >"$S"
    refused "$(basename "$S")" "0 bytes|empty"
}
@test "two shards exchanged" {
    mv "$S" "$M/x" && mv "$T" "$S" && mv "$M/x" "$T"
    refused "$(basename "$S")|$(basename "$T")" "index"
}
@test "a header length of 2^63" {
    edit length
    refused "$(basename "$S")" "9223372036854775808"
}
@test "a header that is no JSON" {
    edit json
    refused "$(basename "$S")" "header|json"
}
@test "overlapping offsets" {
    edit overlap
    refused "overlap" "$(basename "$S")"
}
@test "offsets beyond the file" {
    edit beyond
    refused "$(basename "$S")" "q_(a_)?proj" "beyond|outside|range|has [0-9]+ bytes"
}
@test "a duplicate name" {
    edit duplicate
    refused "q_(a_)?proj" "twice|duplicate"
}
@test "a wrong dtype" {
    edit dtype
    refused "q_(a_)?proj" "I8" "BF16"
}
@test "a wrong shape" {
    edit shape
    refused "q_(a_)?proj" "64"
}
@test "a config without two fields names both" {
    config 'if .text_config then del(.text_config.hidden_size, .text_config.q_lora_rank) else del(.hidden_size, .q_lora_rank) end'
    refused "hidden_size" "q_lora_rank"
}
@test "a config with 0 experts" {
    config 'if .text_config then .text_config.num_experts = 0 else .num_experts = 0 end'
    refused "num_experts" "0"
}
@test "top-k above the number of experts" {
    config 'if .text_config then .text_config.num_experts_per_token = 9 else .num_experts_per_token = 9 end'
    refused "num_experts_per_token" "9" "8"
}
@test "a layer index of 999" {
    config 'if .text_config then .text_config.linear_attn_config.full_attn_layers = [4,7,999] else .full_attn_layers = [4,7,999] end'
    refused "full_attn_layers" "999"
}
@test "a config that is no JSON" {
    echo '{"hidden_size": ' >"$M/config.json"
    refused "config.json"
}
@test "a directory that is no model" {
    rm -r "$M" && mkdir "$M"
    refused "config.json" "$M"
}
@test "a directory that does not exist" {
    rm -r "$M"
    refused "$M"
}
@test "an instance name in use" {
    up --model "$M"
    status=0
    up --model "$M" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    without_progress "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -q "$INSTANCE" "$BATS_TEST_TMPDIR/err"
    router --ids 1,2,3 --max-tokens 2 --json </dev/null
}
@test "an instance name with a slash" {
    INSTANCE=t-a/b refused_name=1
    status=0
    "$ROOT/run/k3-run" up --instance "t-a/b" --bin-dir "$K3_BIN" --model "$M" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -q "t-a/b" "$BATS_TEST_TMPDIR/err"
}
@test "an arena smaller than one layer of one row" {
    OPTIONS=(--cache-gb 0.00001)
    refused "cache-gb" "[0-9]"
}
@test "a trunk budget smaller than the ring" {
    OPTIONS=(--trunk-gb 0.001 --ring-mb 64)
    refused "trunk-gb" "ring"
}
@test "more threads than cores" {
    OPTIONS=(--threads 500)
    refused "threads" "500" "force-threads"
}
@test "a budget that is not a number" {
    OPTIONS=(--trunk-gb lots)
    refused "trunk-gb" "lots"
}
@test "/dev/shm too small" {
    unshare -m true 2>/dev/null || skip "needs the right to make a mount namespace"
    cat >"$BATS_TEST_TMPDIR/small" <<END
mount -t tmpfs -o size=1M tmpfs /dev/shm || exit 77
"$ROOT/run/k3-run" up --instance "$INSTANCE" --bin-dir "$K3_BIN" --model "$M" --ring-mb 8 --memory-from shm
END
    status=0
    unshare -m sh "$BATS_TEST_TMPDIR/small" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    [ "$status" -ne 77 ] || skip "may not mount a tmpfs"
    cat "$BATS_TEST_TMPDIR/err"
    without_progress "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -q "/dev/shm" "$BATS_TEST_TMPDIR/err"
}

# Requests that are refused while the daemons go on.
asked() { # asked STATUS PATTERN COMMAND...: exit status, one line on stderr, and the daemons still answer
    local want=$1 pattern=$2 status=0
    shift 2
    "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    echo "status $status"
    [ "$status" -eq "$want" ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -qiE -- "$pattern" "$BATS_TEST_TMPDIR/err"
    router --ids 1,2,3 --max-tokens 2 --json </dev/null | jq -e '.generated_ids | length == 2'
}
@test "token ids out of range" {
    up --model "$M"
    asked 2 "96.*(95|vocab)|96" router --ids 1,96 --max-tokens 2 --json </dev/null
    asked 2 "4294967296" router --ids 4294967296 --max-tokens 2 --json </dev/null
    asked 2 "-1" router --ids 1,-1 --max-tokens 2 --json </dev/null
}
@test "an empty prompt" {
    up --model "$DEMO"
    asked 2 "empty" router --raw </dev/null
    asked 2 "empty" router --ids "" --json </dev/null
}
@test "a prompt longer than the context" {
    up --model "$M" --ctx 8
    asked 2 "12.*8|8.*12" router --ids 1,2,3,4,5,6,7,8,9,10,11,12 --max-tokens 1 --json </dev/null
}
@test "invalid UTF-8 on stdin" {
    up --model "$DEMO"
    printf 'abc\xff\xfe' >"$BATS_TEST_TMPDIR/bad"
    asked 2 "utf-8.*3|3.*utf-8" router --raw <"$BATS_TEST_TMPDIR/bad"
}
@test "a shard that is cut while the family runs: the request fails with 4, the daemons live" {
    up --model "$M" --ring-mb 2 --trunk-gb 0.0021
    router --ids 1,2,3 --max-tokens 2 --json </dev/null >"$BATS_TEST_TMPDIR/before"
    cp "$S" "$BATS_TEST_TMPDIR/whole"
    truncate -s 5000 "$S"
    status=0
    router --ids 1,2,3 --max-tokens 40 --json </dev/null 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 4 ]
    grep -q "$(basename "$S")" "$BATS_TEST_TMPDIR/err"
    ctl ping
    # The file is whole again; it changed under the daemons, so they want a restart before they trust it.
    cat "$BATS_TEST_TMPDIR/whole" >"$S"
    for member in k3-trunkd k3-expertd k3-computed; do
        "$ROOT/run/k3-run" restart "$member" --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&-
    done
    router --ids 1,2,3 --max-tokens 2 --json </dev/null >"$BATS_TEST_TMPDIR/after"
    [ "$(jq -c .generated_ids "$BATS_TEST_TMPDIR/before")" = "$(jq -c .generated_ids "$BATS_TEST_TMPDIR/after")" ]
}
