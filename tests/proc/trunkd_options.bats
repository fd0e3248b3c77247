#!/usr/bin/env bats
# k3-trunkd on its own: what it refuses (exit 2, one line, nothing left in /dev/shm), how it falls back, how it stops.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/m"
}
setup() {
    M=$BATS_FILE_TMPDIR/m
    LOG=$BATS_TEST_TMPDIR/log
    PID=
}
teardown() {
    [ -z "$PID" ] || { kill "$PID" 2>/dev/null && wait "$PID" || true; }
    rm -rf "$(run_dir "$INSTANCE")"
    rm -f "/dev/shm/k3.$(id -u).$INSTANCE."*
}
no_segments() { [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).$INSTANCE.*")" ]; }

# Ends with 2 and one line that matches every pattern.
refused() { # refused OPTION... -- PATTERN...
    local options=() status=0 p
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    timeout $((20 * SLOW)) "$K3_BIN/k3-trunkd" --instance "$INSTANCE" --log-level error "${options[@]}" >"$LOG.out" 2>"$LOG" 3>&- || status=$?
    cat "$LOG"
    [ "$status" -eq 2 ] || { echo "status $status"; return 1; }
    [ "$(wc -l <"$LOG")" -eq 1 ]
    [ ! -s "$LOG.out" ]
    for p in "$@"; do grep -qF -- "$p" "$LOG" || { echo "no $p"; return 1; }; done
    no_segments
}
start() { # start OPTION...: in the background, until it is ready
    local i
    "$K3_BIN/k3-trunkd" --instance "$INSTANCE" "$@" 2>>"$LOG" 3>&- &
    PID=$!
    for ((i = 0; i < 200 * SLOW; i++)); do
        grep -q "event=ready.* pid=$PID " "$LOG" && return 0
        kill -0 "$PID" 2>/dev/null || break
        sleep 0.05
    done
    cat "$LOG"
    return 1
}
field() { # field NAME: of the answer to info
    ctl info k3-trunkd --json | jq -r --arg n "$1" '.. | objects | select(has($n)) | .[$n]' | head -1
}
stop() { # SIGTERM: gone within a second (and a little, the machine may be busy), status 0, no segments
    local begin status=0
    begin=$(date +%s%N)
    kill "$PID"
    wait "$PID" || status=$?
    [ $((($(date +%s%N) - begin) / 1000000)) -lt $((1500 * SLOW)) ]
    PID=
    [ "$status" -eq 0 ]
}

@test "no model" { refused -- "--model DIR is needed"; }
@test "a model that is not there" { refused --model "$M/nowhere" -- "$M/nowhere/config.json"; }
@test "an unknown option" { refused --model "$M" --trunk 3 -- "--trunk"; }
@test "an operand" { refused --model "$M" extra -- "extra"; }
@test "a ring that is not whole 2 MiB pages" { refused --model "$M" --ring-mb 3 -- "--ring-mb 3" "even"; }
@test "a ring of nothing" { refused --model "$M" --ring-mb 0 -- "--ring-mb" "2"; }
@test "a ring that is no number" { refused --model "$M" --ring-mb many -- "--ring-mb" "many"; }
@test "a budget that is no number" { refused --model "$M" --trunk-gb much -- "--trunk-gb" "much"; }
@test "a negative budget" { refused --model "$M" --trunk-gb -1 -- "--trunk-gb" "-1"; }
@test "a block too small" { refused --model "$M" --io-block 4K -- "--io-block 4096" "64K"; }
@test "a block too large" { refused --model "$M" --io-block 2G -- "--io-block" "1G"; }
@test "reads in flight below none" { refused --model "$M" --io-depth -1 -- "--io-depth"; }
@test "too many reads in flight" { refused --model "$M" --io-depth 1000 -- "--io-depth" "256"; }
@test "no layers" { refused --model "$M" --layers 0 -- "--layers"; }
@test "more layers than there are" { refused --model "$M" --layers 500 -- "500"; }
@test "an unknown backend" { refused --model "$M" --io magic -- "--io" "magic" "pread"; }
@test "an unknown direct" { refused --model "$M" --direct maybe -- "--direct" "maybe"; }
@test "an instance name with a slash" { INSTANCE=a/b refused --model "$M" -- "a/b"; }

@test "a budget below the ring" {
    # asked, needed, the option
    refused --model "$M" --trunk-gb 0.05 --ring-mb 64 -- "--trunk-gb 0.05" "67108864" "--trunk-gb 0.0672" "--ring-mb"
    refused --model "$M" --trunk-gb 0.001 -- "1000000 bytes" "2097152"
}
@test "/dev/shm too small" {
    size=$(df --output=size -B1M /dev/shm | tail -1)
    ring=$(((size + 1024) / 2 * 2))
    refused --model "$M" --ring-mb $ring --trunk-gb "$(awk -v r=$ring 'BEGIN { printf "%.9f", r * 1048576 / 1e9 }')" -- \
        /dev/shm --ring-mb
}
@test "an instance in use" {
    start --model "$M"
    LOG=$LOG.2
    status=0
    timeout $((20 * SLOW)) "$K3_BIN/k3-trunkd" --instance "$INSTANCE" --log-level error --model "$M" 2>"$LOG" 3>&- || status=$?
    cat "$LOG"
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$LOG")" -eq 1 ]
    grep -q "$PID" "$LOG"
    [ "$(field pid)" = "$PID" ] # unharmed
    stop
    no_segments
}
@test "O_DIRECT where the file system takes it, and the page cache where it does not" {
    T=$BATS_TEST_TMPDIR
    cp "$M"/* "$T"
    if python3 -c 'import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)' "$T/config.json" 2>/dev/null; then
        start --model "$T" --direct on
        [ "$(field direct)" = true ]
        refute grep -q event=io_fallback "$LOG"
    else
        refused --model "$T" --direct on -- "--direct on" "$T"
        start --model "$T"
        [ "$(field direct)" = false ]
        [ "$(grep -c event=io_fallback "$LOG")" -eq 1 ]
    fi
    stop
    no_segments
}
@test "how it reads is in the log and in info" {
    start --model "$M" --io pread --direct off --ring-mb 2 --trunk-gb 0.0021
    [ "$(grep -c "event=io_fallback.*io=pread" "$LOG")" -eq 1 ]
    [ "$(field io)" = pread ]
    [ "$(field direct)" = false ]
    [ "$(field ring_bytes)" = 2097152 ]
    [ "$(field huge_bytes)" -ge 0 ]
    stop
    no_segments
}
@test "killed, it leaves its segment to a successor; stopped, nothing" {
    start --model "$M"
    kill -KILL "$PID" && wait "$PID" || true
    [ -e "/dev/shm/k3.$(id -u).$INSTANCE.trunkdata" ]
    start --model "$M"
    [ "$(field taken_over)" = true ]
    stop
    no_segments
    start --model "$M"
    [ "$(field taken_over)" = false ]
    ctl shutdown k3-trunkd --keep
    wait "$PID"
    [ -e "/dev/shm/k3.$(id -u).$INSTANCE.trunkdata" ]
    start --model "$M"
    [ "$(field taken_over)" = true ]
    stop
    no_segments
}
@test "a shard is read from the device when it lies there" {
    mkdir "$BATS_TEST_TMPDIR/part" "$BATS_TEST_TMPDIR/dev"
    cp "$M"/* "$BATS_TEST_TMPDIR/part"
    mv "$BATS_TEST_TMPDIR"/part/*.safetensors "$BATS_TEST_TMPDIR/dev"
    refused --model "$BATS_TEST_TMPDIR/part" -- "$BATS_TEST_TMPDIR/part"
    start --model "$BATS_TEST_TMPDIR/part" --device "$BATS_TEST_TMPDIR/dev"
    stop
    # in both: the device's copy
    start --model "$M" --device "$BATS_TEST_TMPDIR/dev"
    find "/proc/$PID/fd" -lname "$BATS_TEST_TMPDIR/dev/*.safetensors" | grep -q .
    find "/proc/$PID/fd" -lname "$M/*.safetensors" | refute grep -q .
    stop
    no_segments
}
@test "a supervised one leaves with its parent" {
    (
        "$K3_BIN/k3-trunkd" --instance "$INSTANCE" --model "$M" --supervised 2>>"$LOG" 3>&- &
        for ((i = 0; i < 200 * SLOW; i++)); do grep -q event=ready "$LOG" && break; sleep 0.05; done
    )
    for ((i = 0; i < 100; i++)); do no_segments && break; sleep 0.05; done
    no_segments
}
