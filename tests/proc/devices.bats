# Shards on several drives: read from all of them, the answer the same to the bit, also when one fails.
bats_require_minimum_version 1.5.0
load helpers

setup_file() {
    export MODEL=$ROOT/run/demo-model A=$BATS_FILE_TMPDIR/a B=/dev/shm/t-devices-$$
    export XDG_CACHE_HOME=$BATS_FILE_TMPDIR/cache

    mkdir "$A" "$B"
    cp "$MODEL"/*.safetensors "$A"
    cp "$MODEL"/*.safetensors "$B"
}
teardown_file() { rm -rf "/dev/shm/t-devices-$$" "$B"; }
setup() { INSTANCE=t-$$-devices; PIDS=() LOG=$BATS_TEST_TMPDIR/log; }
teardown() {
    local pid
    for pid in "${PIDS[@]}"; do kill "$pid" 2>/dev/null; done
    wait
    rm -rf "$(run_dir "$INSTANCE")" # that is k3-run's
    nothing_left "$INSTANCE"
}

# Starts the three daemons with the given --device options of the weight daemons.
family() { # family OPTION...
    local d i
    for d in k3-trunkd k3-expertd k3-computed; do
        local more=("$@")
        case $d in
            k3-trunkd) more+=(--trunk-gb 0.003 --ring-mb 2 ${DEPTH:+--io-depth "$DEPTH"}) ;;
            k3-expertd) more+=(--cache-gb "$CACHE" ${DEPTH:+--io-depth "$DEPTH"}) ;;
            k3-computed) more+=(--threads 2 --ctx 64) ;;
        esac
        "$K3_BIN/$d" --instance "$INSTANCE" --model "$MODEL" "${more[@]}" >>"$LOG" 2>&1 3>&- &
        PIDS+=($!)
    done
    for ((i = 0; i < 600 * SLOW; i++)); do
        [ "$(grep -c 'event=ready' "$LOG")" -ge 3 ] && return 0
        sleep 0.1
    done
    cat "$LOG"
    return 1
}
answer() { # answer FILE: the logits go there
    router --ids 1,2,3,4,5 --max-tokens 6 --logits "$1" --json | jq -c .generated_ids
}
drives_read() { # bytes from each drive of a daemon, one a line
    ctl info "$1" --json | jq -r '.. | objects | select(has("drives")) | .drives[].read_bytes'
}
CACHE=0.02

@test "two drives with all shards: both are read, the bits stay" {
    family
    plain=$(answer "$BATS_TEST_TMPDIR/plain")
    [ "$(drives_read k3-trunkd | wc -l)" -eq 1 ]
    teardown
    PIDS=() LOG=$BATS_TEST_TMPDIR/log2
    family --device "$A" --device "$B"
    [ "$(answer "$BATS_TEST_TMPDIR/both")" = "$plain" ]
    cmp "$BATS_TEST_TMPDIR/plain" "$BATS_TEST_TMPDIR/both"
    for d in k3-trunkd k3-expertd; do
        drives_read $d >"$BATS_TEST_TMPDIR/read"
        cat "$BATS_TEST_TMPDIR/read"
        [ "$(wc -l <"$BATS_TEST_TMPDIR/read")" -eq 2 ]
        [ "$(sort -n "$BATS_TEST_TMPDIR/read" | head -1)" -gt 0 ]
    done
}

@test "one of two copies is cut short while it is read: the other is used, the bits stay" {
    family
    plain=$(answer "$BATS_TEST_TMPDIR/plain")
    teardown
    PIDS=() LOG=$BATS_TEST_TMPDIR/log2
    mkdir "$B/cut"
    cp "$MODEL"/*.safetensors "$B/cut"
    family --device "$A" --device "$B/cut"
    truncate -s 4096 "$B"/cut/*.safetensors
    [ "$(answer "$BATS_TEST_TMPDIR/both")" = "$plain" ]
    cmp "$BATS_TEST_TMPDIR/plain" "$BATS_TEST_TMPDIR/both"
    rm -r "$B/cut"
}

@test "the model's own directory may be a device, too" {
    family --device "$MODEL" --device "$B"
    [ -n "$(answer "$BATS_TEST_TMPDIR/x")" ]
    [ "$(drives_read k3-trunkd | sort -n | head -1)" -gt 0 ]
}

@test "a device with some of the shards; the rest comes from the model" {
    mkdir "$B/some"
    cp "$(ls "$MODEL"/*.safetensors | head -1)" "$B/some"
    family --device "$B/some"
    [ -n "$(answer "$BATS_TEST_TMPDIR/x")" ]
    rm -r "$B/some"
}

refused_by() { # refused_by DAEMON WORDS OPTION...
    local d=$1 words=$2
    shift 2
    run -2 timeout $((20 * SLOW)) "$K3_BIN/$d" --instance "$INSTANCE" --model "$MODEL" "$@"
    echo "$output"
    grep -q -- "$words" <<<"$output"
}
@test "devices that cannot be are refused by name" {
    mkdir -p "$B/empty" "$B/old" "$B/other"
    first=$(basename "$(ls "$MODEL"/*.safetensors | head -1)")
    cp "$MODEL/$first" "$B/old" && truncate -s -4096 "$B/old/$first"
    cp "$MODEL/$first" "$B/other" && printf ' ' | dd of="$B/other/$first" bs=1 seek=8 conv=notrunc 2>/dev/null
    ln -s "$A" "$BATS_TEST_TMPDIR/again"
    for d in k3-trunkd k3-expertd; do
        refused_by $d "$B/empty holds no" --device "$B/empty"
        refused_by $d "/nonexistent" --device /nonexistent
        refused_by $d "$A and $BATS_TEST_TMPDIR/again are the same" --device "$A" --device "$BATS_TEST_TMPDIR/again"
        refused_by $d "$B/old/$first.*must be the same" --device "$A" --device "$B/old"
        refused_by $d "$B/old/$first.*must be the same" --device "$B/old"
        refused_by $d "$B/other/$first.*different headers" --device "$A" --device "$B/other"
    done
    rm -r "$B/empty" "$B/old" "$B/other"
}

@test "what was measured, and what is registered, is shown" {
    DEPTH=3 family
    for d in k3-trunkd k3-expertd; do
        ctl info $d --json >"$BATS_TEST_TMPDIR/info"
        [ "$(jq '.. | objects | select(has("drives")) | .drives[0].depth' "$BATS_TEST_TMPDIR/info")" -eq 3 ]
        [ "$(jq -r '.. | objects | select(has("io_rate_from")) | .io_rate_from' "$BATS_TEST_TMPDIR/info")" = default ]
        bytes=$(jq '.. | objects | select(has("registered_bytes")) | .registered_bytes' "$BATS_TEST_TMPDIR/info")
        if [ "$(id -u)" -eq 0 ] && grep -q '"io_uring"' "$BATS_TEST_TMPDIR/info"; then [ "$bytes" -gt 0 ]; else [ "$bytes" -ge 0 ]; fi
    done
    answer "$BATS_TEST_TMPDIR/x"
    [ "$(stat_of k3-trunkd room_ns)" -gt 0 ]
    [ "$(stat_of k3-trunkd room_at_depth_ns)" -le "$(stat_of k3-trunkd room_ns)" ]
}
