#!/usr/bin/env bats
# run/k3-run: up, down, status, restart, logs, list; who is restarted, who is given up, what is left behind.
load helpers

run_() { # k3-run on this test's instance and programs; descriptors that bats waits for are closed
    "$ROOT/run/k3-run" "$@" --instance "$INSTANCE" 3>&- 4>&-
}
k3run() { run_ "$@" --bin-dir "$K3_BIN"; }
setup() {
    LOG=$(run_dir "$INSTANCE")/k3-run.log
    ERR=$BATS_TEST_TMPDIR/err
}
teardown() { k3run down >/dev/null 2>&1 || true; }

# Runs a command whose status and one line on stderr must be as said.
refused() { # refused STATUS PATTERN COMMAND...
    local want=$1 pattern=$2 status=0
    shift 2
    "$@" >"$BATS_TEST_TMPDIR/out" 2>"$ERR" || status=$?
    cat "$ERR"
    without_progress "$ERR"
    [ "$status" -eq "$want" ]
    [ "$(wc -l <"$ERR")" -eq 1 ]
    grep -qE -- "$pattern" "$ERR"
}
member() { # member NAME: its line of the status table
    k3run status | awk -v n="k3-$1" '$1 == n'
}
pid_now() { member "$1" | awk '{ print $2 }'; }
within() { # within SECONDS (times SLOW) COMMAND...: repeats until it succeeds
    local until=$((SECONDS + $1 * SLOW))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || { echo "not within time: $*"; return 1; }
        sleep 0.1
    done
}
# A directory of programs in which some may be replaced.
own_programs() {
    PROGRAMS=$BATS_TEST_TMPDIR/bin
    mkdir "$PROGRAMS"
    ln -s "$K3_BIN"/k3* "$PROGRAMS/"
}
replace() { # replace PROGRAM SHELL-TEXT
    rm -f "$PROGRAMS/$1"
    printf '#!/bin/sh\n%s\n' "$2" >"$PROGRAMS/$1.new"
    chmod +x "$PROGRAMS/$1.new"
    mv "$PROGRAMS/$1.new" "$PROGRAMS/$1"
}
give_back() { ln -sfn "$K3_BIN/$1" "$PROGRAMS/$1"; }
no_segments() { [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).$INSTANCE.*")" ]; }
no_processes() { ! pgrep -f -- "--instance $INSTANCE( |\$)"; }

@test "up, status, list, logs, down" {
    k3run up
    k3run status >"$BATS_TEST_TMPDIR/status"
    cat "$BATS_TEST_TMPDIR/status"
    [ "$(grep -cE '^k3-(trunkd|expertd|computed) +[0-9]+ ready +[0-9hms]+ +[0-9]+ +0$' "$BATS_TEST_TMPDIR/status")" -eq 3 ]
    k3run list | grep -E "^$INSTANCE +up +[0-9]+ $DEMO\$"
    k3run logs trunkd | grep -q 'event=ready daemon=k3-trunkd'
    k3run logs | grep -q 'event=family_ready'
    k3run logs k3-run | grep -q 'event=family_ready'
    k3run down | grep -q "$INSTANCE\" is down"
    nothing_left "$INSTANCE"
    k3run down | grep -q 'not running'
    k3run --help | grep -q '^Exit status: 0 done (also `down`'
    refused 3 'not running' k3run status
    refused 3 'not running' k3run restart trunkd
    refused 3 'no log' k3run logs
}

@test "an instance in use is named with its pid, and is not disturbed" {
    k3run up
    local before
    before=$(pid_now trunkd)
    refused 2 "\"$INSTANCE\" is in use by k3-run pid [0-9]+" k3run up
    refused 2 "\"$INSTANCE\" is in use by k3-run pid [0-9]+" k3run up --foreground
    [ "$(pid_now trunkd)" = "$before" ]
    ctl wait --timeout 1
}

@test "unknown, misspelt, later and empty options" {
    refused 2 'a command is missing' run_
    refused 2 'unknown command "upp"' run_ upp
    refused 2 'did you mean --trunk-gb' k3run up --trunk 3
    refused 2 'did you mean --ring-mb' k3run up --ring-mbs 3
    refused 2 'did you mean --sequences' k3run up --seqences 3
    refused 2 'did you mean --foreground' k3run up --forground
    refused 2 'unknown option --zzz; see' k3run up --zzz 3
    refused 2 'api-key-file goes with --http only' k3run up --api-key-file keys
    refused 2 'needs a value' "$ROOT/run/k3-run" up --ctx
    refused 2 'ctx needs a value' k3run up --ctx ''
    refused 2 'takes no value' k3run up --foreground=yes
    refused 2 'unexpected "more"' k3run up more
    refused 2 'instance name "a/b"' "$ROOT/run/k3-run" up --instance a/b
    refused 2 'must be a directory' k3run up --model /nonexistent
    refused 2 'device directory /nonexistent' k3run up --expert-device /nonexistent
    refused 2 '"router2"' k3run restart router2
    nothing_left "$INSTANCE"
}

@test "values that a daemon refuses" {
    refused 2 'ring-mb 3' k3run up --ring-mb 3
    refused 2 'ctx 0' k3run up --ctx 0
    refused 2 'policy' k3run up --policy fifo
    refused 2 'kernels sse: there are auto' k3run up --kernels sse
    [ ! -s "$BATS_TEST_TMPDIR/out" ] # and no plan before
    nothing_left "$INSTANCE"
}

@test "--commands: with the options of the configuration and of the command line; nothing starts" {
    local one=$BATS_TEST_TMPDIR/one two=$BATS_TEST_TMPDIR/two
    mkdir "$one" "$two"
    cp "$DEMO"/*.safetensors "$one"
    cp "$DEMO"/*.safetensors "$two"
    cat >"$BATS_TEST_TMPDIR/conf" <<TEXT
# a comment
  ctx = 128
ring-mb=4
expert-device = $one
expert-device = $two
force-threads = yes
commands = no
TEXT
    k3run up --commands --ring-mb 6 --config "$BATS_TEST_TMPDIR/conf" --layers=5 --io-depth 3 --prefetch 2 >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    [ "$(grep -c '^/.*/k3-' "$BATS_TEST_TMPDIR/out")" -eq 3 ] # one each
    [ "$(wc -l <"$BATS_TEST_TMPDIR/out")" -eq 3 ]
    [ -z "$(grep ' $' "$BATS_TEST_TMPDIR/out")" ]
    grep -E "k3-trunkd .*--ring-mb 6 .*--io-depth 3 .*--layers 5" "$BATS_TEST_TMPDIR/out"
    grep -E "k3-expertd .*--device $one --device $two .*--io-depth 3 .*--layers 5" "$BATS_TEST_TMPDIR/out"
    grep -E "k3-computed .*--ctx 128 .*--prefetch 2 .*--force-threads .*--layers 5" "$BATS_TEST_TMPDIR/out"
    k3run up --commands --config "$BATS_TEST_TMPDIR/conf" --expert-device "$two" | grep k3-expertd >"$BATS_TEST_TMPDIR/out"
    [ "$(grep -o -- '--device' "$BATS_TEST_TMPDIR/out" | wc -l)" -eq 1 ]
    nothing_left "$INSTANCE"
    echo 'trnk-gb = 5' >"$BATS_TEST_TMPDIR/conf"
    refused 2 'line 1: unknown option --trnk-gb; did you mean --trunk-gb' k3run up --config "$BATS_TEST_TMPDIR/conf"
    echo 'ring = 5' >"$BATS_TEST_TMPDIR/conf"
    refused 2 'line 1: unknown option --ring' k3run up --config "$BATS_TEST_TMPDIR/conf"
    printf 'ctx = 5\nwhat is this\n' >"$BATS_TEST_TMPDIR/conf"
    refused 2 'line 2: "what is this"' k3run up --config "$BATS_TEST_TMPDIR/conf"
    echo 'force-threads = maybe' >"$BATS_TEST_TMPDIR/conf"
    refused 2 'must be yes or no' k3run up --config "$BATS_TEST_TMPDIR/conf"
    refused 2 'cannot be read' k3run up --config /nonexistent
}

@test "the example configuration is read" {
    sed "s#^model = .*#model = $DEMO#" "$ROOT/run/k3.conf.example" >"$BATS_TEST_TMPDIR/conf"
    k3run up --commands --config "$BATS_TEST_TMPDIR/conf" | grep -- '--trunk-gb 16'
    # What is commented out is known, too.
    sed -Ei 's/^#([a-z-]+ = )/\1/; /^(memory|preset|instance|[a-z]+-device) = /d' "$BATS_TEST_TMPDIR/conf"
    k3run up --commands --config "$BATS_TEST_TMPDIR/conf" --threads 1 | grep -- '--prefetch 0 --numa-node 0'
}

@test "a member that is killed is restarted at once, and one line says so" {
    k3run up
    local d old
    for d in trunkd expertd computed; do
        old=$(pid_now $d)
        kill -KILL "$old"
        within 10 grep -q "event=member_died name=k3-$d pid=$old signal=KILL restarts=1 " "$LOG"
        within 20 ctl wait --timeout 1
        [ "$(grep -c "event=member_died name=k3-$d " "$LOG")" -eq 1 ]
        [ "$(grep -c "event=member_died name=k3-$d " "$(run_dir "$INSTANCE")/k3-$d.log")" -eq 1 ]
        member $d | grep -E ' ready .* 2 +1$'
        [ "$(pid_now $d)" != "$old" ]
    done
}

@test "restart: a new process, the others stay" {
    k3run up
    local trunk computed
    trunk=$(pid_now trunkd) computed=$(pid_now computed)
    k3run restart trunkd | grep -q 'k3-trunkd is ready'
    [ "$(pid_now trunkd)" != "$trunk" ]
    [ "$(pid_now computed)" = "$computed" ]
    member trunkd | grep -E ' ready .* 2 +1$'
    grep 'event=member_ended name=k3-trunkd' "$LOG" | grep -q exit=0
    kill -STOP "$(pid_now computed)" # one that cannot answer is restarted, too
    k3run restart computed --wait 30
    [ "$(pid_now computed)" != "$computed" ]
}

@test "k3-run killed: the daemons leave within seconds and leave no segments" {
    k3run up
    kill -KILL "$(sed 's/.* //' "$(run_dir "$INSTANCE")/k3-run.lock")"
    k3run up # waits until the orphans have left
    kill -KILL "$(sed 's/.* //' "$(run_dir "$INSTANCE")/k3-run.lock")"
    within 10 no_processes
    within 1 no_segments
    [ -z "$(find "$(run_dir "$INSTANCE")" -type s)" ]
    k3run up # what is left of the directory is no obstacle
    k3run down
    nothing_left "$INSTANCE"
}

@test "a terminal that closes does not end the family" {
    command -v script >/dev/null || skip "no script(1)"
    script -qec "'$ROOT/run/k3-run' up --instance $INSTANCE --bin-dir '$K3_BIN'" /dev/null >/dev/null </dev/null 3>&- 4>&-
    sleep 0.5 # the hang-up has been sent when script has ended; give it time to do harm
    ctl wait --timeout 1
    [ "$(k3run status | awk '{ s += $6 } END { print s }')" = 0 ]
    grep -q 'event=family_ready' "$LOG"
}

@test "up does not keep its caller's descriptors open" {
    # The pipe's reader ends only when every writer has ended.
    timeout $((30 * SLOW)) bash -c "'$ROOT/run/k3-run' up --instance $INSTANCE --bin-dir '$K3_BIN' 5>&1 6>&1 2>&1 3>&- 4>&- | cat" >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -q 'is ready' "$BATS_TEST_TMPDIR/out"
}

@test "a line of the supervisor that comes while up's second ends is not lost" {
    eval "$(sed -n '/^next_line() {/,/^}/p' "$ROOT/run/k3-run")"
    local line='' part='' code channel
    exec {channel}< <(printf 'failed 2 th'; sleep 1.5; printf 'e reason\nready\n')
    for code in 1 1 1 1 1; do
        code=0
        next_line "$channel" || code=$?
        [ $code -gt 128 ] || break
    done
    [ "$line" = "failed 2 the reason" ]
    next_line "$channel"
    [ "$line" = ready ]
    code=0
    next_line "$channel" || code=$?
    [ $code -eq 1 ]
}

@test "foreground: stays, and stops everything at SIGTERM" {
    "$ROOT/run/k3-run" up --foreground --instance "$INSTANCE" --bin-dir "$K3_BIN" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- 4>&- &
    local pid=$!
    within 20 grep -q event=family_ready "$BATS_TEST_TMPDIR/out"
    kill -TERM $pid
    wait $pid
    nothing_left "$INSTANCE"
}

@test "a member that cannot start is named with its reason, and nothing is left" {
    own_programs
    replace k3-expertd 'echo "level=error event=expertd_stopped exit=1 text=\"the drive is on fire\" at=now" >&2; exit 1'
    local status=0 start=$SECONDS
    run_ up --bin-dir "$PROGRAMS" >"$BATS_TEST_TMPDIR/out" 2>"$ERR" || status=$?
    cat "$ERR"
    [ $status -eq 1 ]
    [ $((SECONDS - start)) -le $((5 * SLOW)) ]
    grep -q 'k3-expertd failed (exit=1): the drive is on fire' "$ERR"
    nothing_left "$INSTANCE"
    replace k3-expertd 'kill -SEGV $$'
    status=0
    run_ up --bin-dir "$PROGRAMS" 2>"$ERR" || status=$?
    cat "$ERR"
    [ $status -eq 1 ]
    grep -q 'k3-expertd failed (signal=SEGV)' "$ERR"
    nothing_left "$INSTANCE"
}

ready_after() { # ready_after NAME PID: another process is ready under that name
    [ "$(pid_now "$1")" != "$2" ] && "$K3_BIN/k3ctl" --instance "$INSTANCE" wait --timeout 1
}
@test "a member that dies by itself again and again is started later each time; one that was killed at once" {
    k3run up
    local before
    for wait in '' ' next_try_ms=500' ' next_try_ms=1000'; do
        before=$(pid_now expertd)
        kill -SEGV "$before"
        within 5 grep -q "event=member_died name=k3-expertd pid=$before signal=SEGV restarts=[0-9]*$wait at=" "$LOG"
        within 10 ready_after expertd "$before"
    done
    before=$(pid_now expertd)
    kill -KILL "$before"
    within 5 grep -q "name=k3-expertd pid=$before signal=KILL restarts=4 at=" "$LOG"
}

@test "a member that never becomes ready is named" {
    own_programs
    replace k3-computed 'sleep 60'
    refused 1 'k3-computed is not running after 2 s' run_ up --bin-dir "$PROGRAMS" --wait 2
    nothing_left "$INSTANCE"
    within 5 no_processes
}

@test "a start that takes long says what it waits for" {
    own_programs
    replace k3-computed "sleep 6.5; exec '$K3_BIN/k3-computed' \"\$@\""
    run_ up --bin-dir "$PROGRAMS" 2>"$ERR"
    cat "$ERR"
    [ "$(grep -cE '^k3-run: [5-9] s: ready: k3-trunkd, k3-expertd; waiting for k3-computed \(not there yet\)$' "$ERR")" -eq 1 ]
    [ "$(grep -c . "$ERR")" -le 2 ]
    run_ down
    command -v script >/dev/null || skip "no script(1)"
    replace k3-computed "sleep 3.5; exec '$K3_BIN/k3-computed' \"\$@\""
    script -qec "'$ROOT/run/k3-run' up --instance $INSTANCE --bin-dir '$PROGRAMS'" /dev/null >"$ERR" </dev/null 3>&- 4>&-
    cat -v "$ERR"
    grep -q 'k3-run: [2-9] s: .*waiting for k3-computed' "$ERR"
    # The last line of progress is taken back before the answer.
    tr '\r' '\n' <"$ERR" | grep -E 'is ready' | grep -qv 'waiting for'
}

@test "list and status bear instances that vanish while they look, and say nothing about it" {
    local root dir=$BATS_TEST_TMPDIR/path
    root=$(dirname "$(run_dir "$INSTANCE")")
    k3run up
    mkdir "$dir"
    gone() { # the instance -v goes when its lock is probed
        mkdir -p "$root/$INSTANCE-v"
        echo "1 1" >"$root/$INSTANCE-v/k3-run.lock"
        cp "$root/$INSTANCE-v/k3-run.lock" "$root/$INSTANCE-v/k3-trunkd.lock"
        printf '#!/bin/sh\nrm -rf "%s"\n%s\n' "$root/$INSTANCE-v" "$1" >"$dir/flock"
        chmod +x "$dir/flock"
    }
    # shellcheck disable=SC2016
    for end in 'exec /usr/bin/flock "$@"' 'kill -KILL $$'; do
        gone "$end"
        PATH=$dir:$PATH k3run list >"$BATS_TEST_TMPDIR/out" 2>"$ERR"
        cat "$ERR"
        [ ! -s "$ERR" ]
        [ ! -e "$root/$INSTANCE-v" ]
        [ -z "$(grep -e "$INSTANCE-v" "$BATS_TEST_TMPDIR/out")" ]
    done
    rm "$(run_dir "$INSTANCE")/k3-run.members"
    refused 3 'being started or taken down' k3run status
}

@test "a member that refuses its configuration later is given up until it is restarted" {
    own_programs
    run_ up --bin-dir "$PROGRAMS"
    local old
    old=$(pid_now expertd)
    replace k3-expertd 'echo "level=error event=expertd_stopped exit=2 text=\"no such policy\" at=now" >&2; exit 2'
    kill -KILL "$old"
    within 10 grep -q 'event=member_refused name=k3-expertd .*exit=2 text="no such policy"' "$LOG"
    sleep 1
    [ "$(grep -c event=member_refused "$LOG")" -eq 1 ]
    k3run status | grep -E '^k3-expertd .*failed\(2\)'
    refused 2 'k3-expertd failed: no such policy' ctl wait --timeout 30
    give_back k3-expertd
    run_ restart expertd --bin-dir "$PROGRAMS" | grep -q 'k3-expertd is ready'
    k3run status
}

@test "a member that fails while starting waits longer each time, and comes back" {
    own_programs
    run_ up --bin-dir "$PROGRAMS"
    replace k3-trunkd 'exit 1'
    kill -KILL "$(pid_now trunkd)"
    within 20 grep -q 'event=member_failed name=k3-trunkd .*next_try_ms=2000' "$LOG"
    grep -o 'next_try_ms=[0-9]*' "$LOG" | head -3 | tr '\n' ' ' | grep -q '^next_try_ms=500 next_try_ms=1000 next_try_ms=2000 $'
    give_back k3-trunkd
    ctl wait --timeout $((20 * SLOW))
    k3run status
}

@test "down ends daemons that were started by hand, and stopped ones" {
    "$K3_BIN/k3-trunkd" --model "$DEMO" --instance "$INSTANCE" 2>/dev/null 3>&- 4>&- &
    within 20 ctl ping trunkd
    k3run list | grep -E "^$INSTANCE +by hand"
    refused 2 "is in use by k3-trunkd pid [0-9]+, which no k3-run has started" k3run up
    ctl ping trunkd # unharmed
    k3run down
    nothing_left "$INSTANCE"
    k3run up
    kill -STOP "$(pid_now trunkd)" "$(pid_now computed)"
    k3run down
    nothing_left "$INSTANCE"
}

@test "the common directory may go at any moment while an instance begins" {
    export XDG_RUNTIME_DIR=$BATS_TEST_TMPDIR/run
    mkdir -m 700 "$XDG_RUNTIME_DIR"
    # shellcheck disable=SC2016
    timeout $((60 * SLOW)) bash -c 'while [ -d "$XDG_RUNTIME_DIR" ]; do rmdir "$XDG_RUNTIME_DIR/k3"; done' >/dev/null 2>&1 3>&- &
    for _ in 1 2 3; do
        k3run up
        k3run down
    done
    rm -r "$XDG_RUNTIME_DIR"
    wait
}
@test "down removes what a crash has left" {
    mkdir -p -m 700 "$(dirname "$(run_dir "$INSTANCE")")"
    mkdir -m 700 "$(run_dir "$INSTANCE")"
    : >"/dev/shm/k3.$(id -u).$INSTANCE.trunkdata"
    k3run down | grep -q 'removed what was left'
    nothing_left "$INSTANCE" # and with the last instance the directory of all of them may go
    mkdir -p -m 700 "$(dirname "$(run_dir "$INSTANCE")")"
    mkdir -m 755 "$(run_dir "$INSTANCE")"
    refused 2 'mode 0700' k3run up
    rmdir "$(run_dir "$INSTANCE")"
}

@test "two instances live side by side" {
    k3run up
    "$ROOT/run/k3-run" up --instance "$INSTANCE-2" --bin-dir "$K3_BIN" 3>&- 4>&-
    k3run down
    "$K3_BIN/k3ctl" --instance "$INSTANCE-2" wait --timeout 1
    nothing_left "$INSTANCE"
    "$ROOT/run/k3-run" down --instance "$INSTANCE-2"
    nothing_left "$INSTANCE-2"
}

@test "an installed k3-run finds its programs and the demo model" {
    local prefix=$BATS_TEST_TMPDIR/usr
    mkdir -p "$prefix/bin"
    install -m 755 "$K3_BIN"/k3* "$prefix/bin"
    "$ROOT/run/install-files" "$prefix" '/opt/k3&co'
    for unit in k3@.service k3-user@.service; do
        [ "$(grep -cE '^Exec(Start|Stop)=/opt/k3&co/bin/k3-run (up|down) ' "$prefix/share/k3/run/$unit")" -eq 2 ]
        [ -z "$(grep /usr/local "$prefix/share/k3/run/$unit")" ]
    done
    "$prefix/bin/k3-run" up --instance "$INSTANCE" --commands | grep -q "^$prefix/bin/k3-trunkd --model $prefix/share/k3/run/demo-model "
    "$prefix/bin/k3-run" up --instance "$INSTANCE" 3>&- 4>&-
    "$prefix/bin/k3-run" down --instance "$INSTANCE"
    nothing_left "$INSTANCE"
}

@test "run/demo and run/check: help, and nothing else" {
    local f
    for f in demo check; do
        "$ROOT/run/$f" --help >"$BATS_TEST_TMPDIR/out"
        grep -q "^run/$f: " "$BATS_TEST_TMPDIR/out"
        refused 2 "^run/$f: unexpected \"--hlep\"" "$ROOT/run/$f" --hlep
        refused 2 "^run/$f: unexpected \"x\"" "$ROOT/run/$f" --help x
    done
}

@test "a weight daemon that k3-run has given up: said within seconds, and the answer goes on after it is mended" {
    dev=$BATS_TEST_TMPDIR/dev
    mkdir "$dev"
    cp "$DEMO"/*.safetensors "$dev"
    k3run up --expert-device "$dev" --cache-gb 0.0003
    want=$(router --ids 1,2,3,4,5 --max-tokens 4 --json </dev/null | jq -c .generated_ids)
    mv "$dev" "$dev.away"
    kill -KILL "$(pid_now expertd)"
    within 30 grep -q '^k3-expertd *failed' "$(run_dir "$INSTANCE")/k3-run.members"
    status=0
    timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$BATS_FILE_TMPDIR/state" --ids 1,2,3,4,5 \
        --max-tokens 4 --json </dev/null >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 3 ]
    grep -q "k3-expertd has failed: device directory $dev: .*k3-run restart k3-expertd" "$BATS_TEST_TMPDIR/err"
    mv "$dev.away" "$dev"
    k3run restart k3-expertd
    [ "$(router --ids 1,2,3,4,5 --max-tokens 4 --json </dev/null | jq -c .generated_ids)" = "$want" ]
}
