#!/usr/bin/env bats
# k3-expertd alone: its options, what it refuses and in which words, and that it leaves nothing behind.
load helpers

setup() {
    OUT=$BATS_TEST_TMPDIR/out
    ERR=$BATS_TEST_TMPDIR/err
    PID=
}
teardown() {
    if [ -n "$PID" ]; then kill -KILL "$PID" 2>/dev/null || true; fi
    rm -f /dev/shm/k3."$(id -u).$INSTANCE".*
    rm -rf "$(run_dir "$INSTANCE")"
}

# Refused with exit 2, within five seconds, in one error line that has every pattern.
refused() { # refused "PATTERN|..." OPTION...
    local pattern=$1 status=0 start=$SECONDS
    shift
    timeout $((20 * SLOW)) "$K3_BIN/k3-expertd" --instance "$INSTANCE" "$@" >"$OUT" 2>"$ERR" 3>&- 4>&- || status=$?
    cat "$ERR"
    [ "$status" -eq 2 ]
    [ $((SECONDS - start)) -le $((5 * SLOW)) ]
    [ ! -s "$OUT" ]
    [ "$(grep -cv 'level=info' "$ERR")" -eq 1 ]
    grep -qE -- "$pattern" "$ERR"
    [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).$INSTANCE.*")" ]
}
start() { # start OPTION...: and waits until it is ready
    local i
    "$K3_BIN/k3-expertd" --instance "$INSTANCE" "$@" 2>"$ERR" 3>&- 4>&- &
    PID=$!
    for ((i = 0; i < 200 * SLOW; i++)); do
        grep -q event=ready "$ERR" && return 0
        kill -0 "$PID" 2>/dev/null || break
        sleep 0.05
    done
    cat "$ERR"
    return 1
}
stop() { # stop: SIGTERM ends it with 0 within two seconds
    local status=0
    kill -TERM "$PID"
    timeout 5 tail --pid="$PID" -f /dev/null
    wait "$PID" || status=$?
    PID=
    [ "$status" -eq 0 ]
    [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).$INSTANCE.*")" ]
}

@test "help and version" {
    run "$K3_BIN/k3-expertd" --help
    [ "$status" -eq 0 ]
    for o in model device cache-gb policy layers io-depth io-block io direct instance log-level supervised; do
        grep -q -- "--$o" <<<"$output"
    done
    run "$K3_BIN/k3-expertd" --version
    [ "$status" -eq 0 ]
}
@test "no model" { refused '--model DIR'; }
@test "a model directory that is none" { refused '/nowhere' --model /nowhere; }
@test "an unknown option" { refused 'cache' --model "$DEMO" --cache 3; }
@test "a cache that is no number" { refused 'cache-gb.*lots' --model "$DEMO" --cache-gb lots; }
@test "a policy that there is not, and those that there are" {
    refused 'policy belady.*lru' --model "$DEMO" --policy belady
}
@test "a block that is no multiple of a page" { refused 'io-block 5000.*4096' --model "$DEMO" --io-block 5000; }
@test "a block of nothing" { refused 'io-block 0' --model "$DEMO" --io-block 0; }
@test "a block of 2G" { refused 'io-block.*1G' --model "$DEMO" --io-block 2G; }
@test "depth 257" { refused 'io-depth' --model "$DEMO" --io-depth 257; }
@test "an unknown way to read" { refused 'io mmap.*uring.*pread' --model "$DEMO" --io mmap; }
@test "direct neither on nor off" { refused 'direct yes.*auto.*off' --model "$DEMO" --direct yes; }
@test "more layers than there are" { refused '99.*9' --model "$DEMO" --layers 99; }
@test "a bad instance name" {
    INSTANCE='a/b' refused 'a/b' --model "$DEMO"
}
@test "a cache below the minimum names asked, needed and the option" {
    refused 'cache-gb 1e-05: gives 1 slots.*needs 4.*at least --cache-gb 0.000033"' --model "$DEMO" --cache-gb 0.00001
    local least
    least=$(grep -oE 'at least --cache-gb [0-9.e-]+' "$ERR" | awk '{print $4}')
    start --model "$DEMO" --cache-gb "$least"
    grep -q 'slots=4 ' "$ERR"
    stop
}
@test "direct reads demanded where there are none" {
    local m
    m=$(mktemp -d /proc/sys/x 2>/dev/null || mktemp -d /dev/shm/k3-t-expertd-XXXXXX)
    cp -r "$DEMO/." "$m"
    if start --model "$m"; then stop; fi
    if grep -q no_direct_reads "$ERR"; then
        refused 'direct on: .*auto or off' --model "$m" --direct on
    fi
    rm -rf "$m"
}
@test "the arena is capped at the number of experts" {
    start --model "$DEMO" --cache-gb 1
    grep -q 'event=arena slots=256 ' "$ERR"
    stop
}
@test "layers without experts: it runs, with nothing to do" {
    start --model "$DEMO" --layers 1
    grep -q 'event=arena slots=1 .*experts=0 ' "$ERR"
    stop
}
@test "info says how it reads" {
    [ -x "$K3_BIN/k3ctl" ] || skip "no k3ctl"
    start --model "$DEMO" --io pread --direct off
    run ctl info expertd --json
    echo "$output"
    grep -qE '"io":[[:space:]]*"pread"' <<<"$output"
    grep -qE '"files_direct":[[:space:]]*0' <<<"$output"
    grep -qE '"slots":[[:space:]]*256' <<<"$output"
    stop
}
@test "the instance name in use" {
    start --model "$DEMO"
    local first=$PID
    run timeout 10 "$K3_BIN/k3-expertd" --instance "$INSTANCE" --model "$DEMO"
    echo "$output"
    [ "$status" -eq 2 ]
    grep -q "$first" <<<"$output"
    stop
}
@test "an arena larger than /dev/shm is refused with what there is" {
    "$K3_BIN/k3-mkmodel" --released --layers 20 --experts 896 --sparse --out "$BATS_TEST_TMPDIR/m"
    local gb
    gb=$(df --output=size -B 1000000000 /dev/shm | tail -1)
    [ "$gb" -lt 250 ] || skip "/dev/shm has $gb GB"
    refused 'asked for.*/dev/shm has.*--cache-gb' --model "$BATS_TEST_TMPDIR/m" --cache-gb 280
}
@test "a killed one leaves its arena for the next" {
    start --model "$DEMO"
    kill -KILL "$PID"
    wait "$PID" || true
    [ -e "/dev/shm/k3.$(id -u).$INSTANCE.expertdata" ]
    local inode
    inode=$(stat -c %i "/dev/shm/k3.$(id -u).$INSTANCE.expertdata")
    start --model "$DEMO"
    [ "$(stat -c %i "/dev/shm/k3.$(id -u).$INSTANCE.expertdata")" = "$inode" ]
    kill -KILL "$PID"
    wait "$PID" || true
    start --model "$DEMO" --cache-gb 0.0005 # of another size: a new one
    [ "$(stat -c %i "/dev/shm/k3.$(id -u).$INSTANCE.expertdata")" != "$inode" ]
    stop
}
