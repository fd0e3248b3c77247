#!/usr/bin/env bats
# Starts after a crash or in odd surroundings: what a dead family left, descriptors that are closed, files that are none.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/good"
    "$K3_BIN/k3-mkmodel" --formula --scatter --seed 2 --out "$BATS_FILE_TMPDIR/other"
}
teardown() { down; }

refused() { # refused PATTERN COMMAND...: exit 2 within five seconds, one line
    local pattern=$1 start=$SECONDS status=0
    shift
    "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" </dev/null || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    without_progress "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 2 ]
    [ $((SECONDS - start)) -le $((5 * SLOW)) ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -qE -- "$pattern" "$BATS_TEST_TMPDIR/err"
}

@test "a family that was killed whole comes up again with another model" {
    local d i model
    for i in 1 2 3; do
        for model in good other; do
            up --model "$BATS_FILE_TMPDIR/$model"
            router --ids 1,2,3 --max-tokens 2 --json </dev/null | jq -e '.generated_ids | length == 2'
            kill -KILL $(for d in k3-run k3-trunkd k3-expertd k3-computed; do
                awk '{ print $2 }' "$(run_dir "$INSTANCE")/$d.lock"
            done)
        done
    done
}
@test "a FIFO for config.json, the index or the tokenizer is refused and not waited for" {
    local f
    for f in config.json model.safetensors.index.json; do
        cp -r "$BATS_FILE_TMPDIR/good" "$BATS_TEST_TMPDIR/$f"
        rm -f "$BATS_TEST_TMPDIR/$f/$f"
        mkfifo "$BATS_TEST_TMPDIR/$f/$f"
        refused "$f is not a regular file" up --model "$BATS_TEST_TMPDIR/$f" --wait 20
    done
    cp -r "$DEMO" "$BATS_TEST_TMPDIR/demo"
    up --model "$BATS_TEST_TMPDIR/demo"
    rm "$BATS_TEST_TMPDIR/demo/tiktoken.model"
    mkfifo "$BATS_TEST_TMPDIR/demo/tiktoken.model"
    refused "tiktoken.model" router --raw
}
@test "closed descriptors: no log line and no answer lands in a file of ours" {
    local pid status=0 fd
    up --model "$BATS_FILE_TMPDIR/good"
    "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$BATS_TEST_TMPDIR/state" --ids 1,2,3 --max-tokens 2 \
        --json <&- >&- 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 1 ]
    grep -q "stdout: Bad file descriptor" "$BATS_TEST_TMPDIR/err"
    down
    mkdir -p -m 700 "$(dirname "$(run_dir x)")"
    "$K3_BIN/k3-expertd" --model "$BATS_FILE_TMPDIR/good" --instance "$INSTANCE" <&- >&- 2>&- 3>&- 4>&- &
    pid=$!
    ctl wait --timeout 10 || true # the others are not there
    for fd in 0 1 2; do [ "$(readlink "/proc/$pid/fd/$fd")" = /dev/null ]; done
    kill "$pid"
    wait "$pid"
}
@test "locks that are no files do not stop k3-run" {
    mkdir -p -m 700 "$(dirname "$(run_dir x)")" # -p alone would make the parent with the mode of the umask
    mkdir -p -m 700 "$(run_dir "$INSTANCE")"
    chmod 700 "$(dirname "$(run_dir "$INSTANCE")")"
    mkfifo "$(run_dir "$INSTANCE")/k3-trunkd.lock"
    timeout 20 "$ROOT/run/k3-run" down --instance "$INSTANCE" 3>&- 4>&-
    nothing_left "$INSTANCE"
}
