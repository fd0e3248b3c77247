#!/usr/bin/env bats
# k3-doctor: what it finds, its advice, its report, its exit status.
load helpers

doctor() { "$K3_BIN/k3-doctor" "$@"; }
OUT() { cat "$BATS_TEST_TMPDIR/out"; }

@test "without a model the released shape is assumed; each thing is named, and there is advice" {
    doctor --rate 3 >"$BATS_TEST_TMPDIR/out"
    OUT
    for name in toolchain kernel io_uring memlock /dev/shm 'huge pages' 'control group' memory CPU model arithmetic plan; do
        grep -qE "^(ok|slow) +$name +" "$BATS_TEST_TMPDIR/out"
    done
    grep -q 'the released shape is assumed.*93 layers' "$BATS_TEST_TMPDIR/out"
    grep -qE '^expected +at least [0-9.]+ s/token; (the drive|arithmetic) binds' "$BATS_TEST_TMPDIR/out"
    grep -qE '^command +run/k3-run up --model DIR --(preset auto|memory [0-9]+M)$' "$BATS_TEST_TMPDIR/out"
}

@test "the command that it prints starts the model; the report is JSON with the same in it" {
    doctor --model "$DEMO" --report "$BATS_TEST_TMPDIR/r.json" >"$BATS_TEST_TMPDIR/out"
    OUT
    grep -qE "^(ok|slow) +drive of $DEMO .*; direct reads: (yes|no)$" "$BATS_TEST_TMPDIR/out"
    grep -qE '^(ok|slow) +its rate ' "$BATS_TEST_TMPDIR/out"
    [ "$(jq -r .can_run "$BATS_TEST_TMPDIR/r.json")" = true ]
    [ "$(jq -r '.checks | map(.name) | index("io_uring") != null' "$BATS_TEST_TMPDIR/r.json")" = true ]
    local command
    command=$(jq -r .advice.command "$BATS_TEST_TMPDIR/r.json")
    grep -qF "$command" "$BATS_TEST_TMPDIR/out"
    (cd "$ROOT" && $command --instance "$INSTANCE" --bin-dir "$K3_BIN" --dry-run) | grep -q '^plan of '
    grep -qE '^expected .* arithmetic binds' "$BATS_TEST_TMPDIR/out" # nothing of the demo model is read twice
}

@test "the command is quoted where the shell needs it" {
    local dir="$BATS_TEST_TMPDIR/a model; it's" command
    ln -s "$DEMO" "$dir"
    doctor --model "$dir" --trunk-device "$DEMO" >"$BATS_TEST_TMPDIR/out"
    OUT
    command=$(sed -n 's/^command  *//p' "$BATS_TEST_TMPDIR/out")
    [[ $command == *" --trunk-device $DEMO" ]]
    eval "set -- $command"
    [ "$4" = "$dir" ]
}

@test "each line is there when it is known" {
    doctor --rate 3 --report /nonexistent/r.json >"$BATS_TEST_TMPDIR/out" 2>&1 || [ $? -eq 1 ]
    tail -n 2 "$BATS_TEST_TMPDIR/out" | head -n 1 | grep -q '^command'
    tail -n 1 "$BATS_TEST_TMPDIR/out" | grep -q '^k3-doctor: --report' # what stdout kept would come after it
}

@test "without a rate the advice names --rate" {
    doctor | grep -qE '^expected +at least .*--rate X gives it, in GB/s'
}

@test "the drive binds or arithmetic does" {
    doctor --rate 0.5 | grep -qE '^expected .* the drive binds'
    doctor --rate 100000 | grep -qE '^expected .* arithmetic binds'
}

@test "a machine that cannot run the model: exit 1 and the reason" {
    local status=0
    doctor --rate 3 --sequences 256 --ctx 1000000 --report "$BATS_TEST_TMPDIR/r.json" >"$BATS_TEST_TMPDIR/out" || status=$?
    OUT
    [ $status -eq 1 ]
    grep -qE '^BAD +plan +.*less than the' "$BATS_TEST_TMPDIR/out"
    grep -q '^this machine cannot run the model' "$BATS_TEST_TMPDIR/out"
    [ "$(jq -r .can_run "$BATS_TEST_TMPDIR/r.json")" = false ]
    status=0
    doctor --rate 3 --shm-dir "$BATS_TEST_TMPDIR/none" >"$BATS_TEST_TMPDIR/out" || status=$?
    [ $status -eq 1 ]
    grep -qE '^BAD +/dev/shm .*cannot be written' "$BATS_TEST_TMPDIR/out"
}

@test "bad usage" {
    local status=0
    doctor --expert-device /tmp 2>"$BATS_TEST_TMPDIR/out" >/dev/null || status=$?
    [ $status -eq 2 ] && grep -q 'need --model DIR' "$BATS_TEST_TMPDIR/out"
    status=0
    doctor --model /nonexistent 2>"$BATS_TEST_TMPDIR/out" >/dev/null || status=$?
    [ $status -eq 2 ] && [ "$(wc -l <"$BATS_TEST_TMPDIR/out")" -eq 1 ]
    status=0
    doctor --rate 3 --report /nonexistent/r.json 2>"$BATS_TEST_TMPDIR/out" >/dev/null || status=$?
    [ $status -eq 1 ] && grep -q -- '--report /nonexistent/r.json: No such file or directory: make its directory first' "$BATS_TEST_TMPDIR/out"
    doctor --help | grep -q '^ *--report FILE'
}
