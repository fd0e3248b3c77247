#!/usr/bin/env bats
# k3ctl: statistics from the pages alone, commands to daemons, waiting, exit codes.
load helpers

k3run() { "$ROOT/run/k3-run" "$@" --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&- 4>&-; }
setup_file() {
    k3run up
    echo "What is the capital of France?" | router --max-tokens 40 >"$BATS_FILE_TMPDIR/answer"
}
teardown_file() { k3run down; }
setup() { OUT=$BATS_TEST_TMPDIR/out; }

fails() { # fails STATUS PATTERN COMMAND...: one line on stderr
    local want=$1 pattern=$2 status=0
    shift 2
    "$@" >"$OUT" 2>"$OUT.err" || status=$?
    cat "$OUT.err"
    [ "$status" -eq "$want" ]
    [ "$(wc -l <"$OUT.err")" -eq 1 ]
    grep -qE -- "$pattern" "$OUT.err"
}
by_hand() { # by_hand NAME: a k3-trunkd of its own instance; sets HAND
    "$K3_BIN/k3-trunkd" --model "$DEMO" --instance "$1" 2>"$BATS_TEST_TMPDIR/log" 3>&- 4>&- &
    HAND=$!
    local i
    for i in {1..200}; do
        "$K3_BIN/k3ctl" --instance "$1" ping trunkd 2>/dev/null | grep -q state=ready && return
        sleep 0.05
    done
    cat "$BATS_TEST_TMPDIR/log"
    return 1
}

@test "the table has the family's summary and every daemon" {
    ctl stats >"$OUT"
    cat "$OUT"
    grep -E '^family "'"$INSTANCE"'", since the start, [0-9.]+ s$' "$OUT"
    grep -E '^  read from disk    [0-9.]+ [GMk]?B \(trunk [0-9.]+ [GMk]?B, experts [0-9.]+ [GMk]?B\), [0-9.]+ [GMk]?B/s$' "$OUT"
    grep -E '^  waits for trunk +[0-9]+$' "$OUT"
    grep -E '^  expert hits +[0-9.]+ % \([0-9]+ of [1-9][0-9]*\)$' "$OUT"
    grep -E '^  time of a pass +[0-9.]+ % waiting for trunk, [0-9.]+ % waiting for experts, [0-9.]+ % arithmetic$' "$OUT"
    [ "$(grep -cE '^k3-(trunkd|expertd|computed)  ready  pid [0-9]+  generation 1  started .* ago' "$OUT")" -eq 3 ]
    [ "$(ctl stats trunkd | grep -c '^k3-')" -eq 1 ]
    ctl stats k3-computed | grep -E '^  tokens_generated +[1-9][0-9]* +[0-9.]+/s'
}

@test "JSON: the summary adds up and agrees with the pages" {
    ctl stats --json >"$OUT"
    jq -e '.summary | .waiting_for_trunk_ns + .waiting_for_experts_ns + .computing_ns == .time_in_passes_ns' "$OUT"
    jq -e '.summary.passes_done > 0 and .summary.tokens > 0' "$OUT"
    jq -e '.summary.experts_demanded == .daemons."k3-computed".stats.expert_demands.value' "$OUT"
    jq -e '.summary.trunk_read_bytes == .daemons."k3-trunkd".stats.read_bytes.value' "$OUT"
    jq -e '[.daemons[] | .alive and .state == "ready" and .pid > 0] | all' "$OUT"
    jq -e '[.daemons[].stats[] | has("value") or has("buckets")] | all' "$OUT"
    ctl stats trunkd --json | jq -e '.daemons | keys == ["k3-trunkd"]'
    [ "$(stat_of k3-computed passes)" -gt 0 ]
}

@test "Prometheus: every line is right, histograms are cumulative" {
    ctl stats --prometheus >"$OUT"
    # (a plain `! grep` would not fail the test)
    [ -z "$(grep -vE '^(# (HELP|TYPE) k3_[a-z0-9_]+ .+|k3_[a-z0-9_]+\{instance="[A-Za-z0-9_-]+"(,(daemon|le)="[^"]+")?\} [0-9]+)$' "$OUT")" ]
    grep -E "^k3_trunkd_read_bytes\{instance=\"$INSTANCE\"\} [1-9]" "$OUT"
    [ "$(grep -c '^k3_up{.*} 1$' "$OUT")" -eq 3 ]
    awk '/_bucket/ { split($1, a, "{"); if (a[1] == name && $2 < last) exit 1; name = a[1]; last = $2 }' "$OUT"
    # No name has two TYPE lines.
    [ -z "$(grep '^# TYPE' "$OUT" | awk '{ print $3 }' | sort | uniq -d)" ]
}

@test "watch: rates over the interval, until interrupted" {
    timeout -s INT 3 "$K3_BIN/k3ctl" --instance "$INSTANCE" stats --watch 0.5 >"$OUT" || true
    [ "$(grep -c 'since the start' "$OUT")" -eq 1 ]
    [ "$(grep -c 'the last 0\.[5-9] s' "$OUT")" -ge 2 ]
    timeout -s INT 3 "$K3_BIN/k3ctl" --instance "$INSTANCE" stats --json --watch >"$OUT" || true
    [ "$(jq -c .instance "$OUT" | wc -l)" -ge 2 ]
}

@test "stopped and dead daemons are shown, too" {
    by_hand "$INSTANCE-h"
    kill -STOP $HAND
    "$K3_BIN/k3ctl" --instance "$INSTANCE-h" stats trunkd | grep -E 'read_bytes +[0-9.]+ [kMG]?B'
    fails 3 'no answer within' "$K3_BIN/k3ctl" --instance "$INSTANCE-h" info trunkd
    sleep 3 # a heartbeat is older than five seconds by now
    "$K3_BIN/k3ctl" --instance "$INSTANCE-h" stats trunkd | grep 'k3-trunkd  not responding  pid'
    kill -CONT $HAND
    # The client that gave up in the middle of a handshake has not made the daemon deaf.
    for i in {1..100}; do "$K3_BIN/k3ctl" --instance "$INSTANCE-h" info trunkd >"$OUT" 2>&1 && break; sleep 0.05; done
    jq -e '."k3-trunkd".state == "ready"' "$OUT"
    kill -KILL $HAND
    wait $HAND || true
    "$K3_BIN/k3ctl" --instance "$INSTANCE-h" stats >"$OUT"
    grep -E "^k3-trunkd  dead  pid $HAND " "$OUT"
    "$K3_BIN/k3ctl" --instance "$INSTANCE-h" stats --json | jq -e '.daemons."k3-trunkd".alive == false'
    fails 3 'k3-trunkd has ended|nobody serves' "$K3_BIN/k3ctl" --instance "$INSTANCE-h" info trunkd
    rm -rf "$(run_dir "$INSTANCE-h")" # even the run directory is not needed
    "$K3_BIN/k3ctl" --instance "$INSTANCE-h" stats | grep 'k3-trunkd  dead'
    "$ROOT/run/k3-run" down --instance "$INSTANCE-h"
}

@test "ping, info, log, drain" {
    ctl ping >"$OUT"
    [ "$(grep -cE '^k3-[a-z]+ state=ready pid=[0-9]+ generation=1 ms=[0-9.]+$' "$OUT")" -eq 3 ]
    ctl info | jq -e 'keys == ["k3-computed", "k3-expertd", "k3-trunkd"]'
    ctl info expertd --json | jq -e '."k3-expertd" | .version and .pid > 0 and .uptime_s > 0 and .generation == 1 and (.options | index("--supervised"))'
    ctl log debug trunkd | grep -q 'k3-trunkd: debug'
    ctl log info | grep -c info | grep -qx 3
    fails 2 'log level loud' ctl log loud
    by_hand "$INSTANCE-d"
    "$K3_BIN/k3ctl" --instance "$INSTANCE-d" drain trunkd
    "$K3_BIN/k3ctl" --instance "$INSTANCE-d" ping trunkd | grep state=draining
    "$K3_BIN/k3ctl" --instance "$INSTANCE-d" shutdown trunkd
    wait $HAND
    "$ROOT/run/k3-run" down --instance "$INSTANCE-d"
}

@test "wait names the member that is missing" {
    ctl wait --timeout 1
    fails 3 'k3-(trunkd|expertd|computed) is not running after 0.2 s' "$K3_BIN/k3ctl" --instance "$INSTANCE-none" wait --timeout 0.2
    by_hand "$INSTANCE-w"
    fails 3 'k3-expertd is not running after 0.2 s' "$K3_BIN/k3ctl" --instance "$INSTANCE-w" wait --timeout 0.2
    kill -TERM $HAND
    wait $HAND
    "$ROOT/run/k3-run" down --instance "$INSTANCE-w"
}

@test "usage and absence" {
    fails 2 'command is missing' ctl
    fails 2 'unknown command "stat"' ctl stat
    fails 2 'daemon "trunk"' ctl stats trunk
    fails 2 'unexpected "x"' ctl stats trunkd x
    fails 2 'needs an argument' ctl log
    fails 2 'did you mean --json' ctl stats --jsn
    fails 2 'exclude' ctl stats --json --prometheus
    fails 2 'watch' ctl stats --watch=-1
    fails 2 '32 hexadecimal' ctl cancel 12
    fails 2 'instance name' "$K3_BIN/k3ctl" --instance a/b stats
    fails 3 'no statistics pages.*; start it with: run/k3-run up --instance' "$K3_BIN/k3ctl" --instance "$INSTANCE-none" stats
    fails 3 'is not running.*; start it with: run/k3-run up --instance' "$K3_BIN/k3ctl" --instance "$INSTANCE-none" info
    # What no daemon of the instance is, and an option that a command would pass over, are refused.
    fails 2 'daemon "rooter": must be trunkd, expertd, computed, router or keeper$' ctl ping rooter
    fails 2 'ping does not take --watch' ctl ping --watch 1
    fails 2 'ping does not take --prometheus' ctl ping --prometheus
    fails 2 'stats does not take --timeout' ctl stats --timeout 3
    fails 2 'drain does not take --keep' ctl drain --keep
    "$K3_BIN/k3ctl" --help | grep -q 'cancel ID'
    "$K3_BIN/k3ctl" --version | grep -qE '^k3ctl [0-9.]+$'
}

@test "shutdown: k3-run starts the member anew" {
    local old
    old=$(pid_of k3-trunkd)
    ctl shutdown trunkd --keep
    for i in {1..100}; do
        [ "$(pid_of k3-trunkd)" != "$old" ] && [ -n "$(pid_of k3-trunkd)" ] && break
        sleep 0.1
    done
    ctl wait --timeout $((20 * SLOW))
    [ "$(pid_of k3-trunkd)" != "$old" ]
}

@test "cancelling an unknown request" {
    local status=0
    ctl cancel 0123456789abcdef0123456789abcdef >"$OUT" 2>&1 || status=$?
    cat "$OUT"
    [ $status -ne 0 ]
    [ "$(wc -l <"$OUT")" -eq 1 ]
}
