#!/usr/bin/env bats
# k3ctl trace on a running family, and k3-sim on what it wrote.
load helpers

setup() { cd "$BATS_TEST_TMPDIR"; }
teardown() { down; }
questions() { printf 'What is the capital of %s?\n' France Japan Brazil Italy Egypt Kenya India Peru; }
refused() { # refused STATUS PATTERN ARGUMENT OF K3CTL...: one line
    local want=$1 pattern=$2 status=0
    shift 2
    ctl "$@" >out 2>err || status=$?
    cat err
    [ "$status" -eq "$want" ] && [ "$(wc -l <err)" -eq 1 ]
    grep -q -- "$pattern" err
}

@test "k3-sim has the hits of the daemon, to the one, for both policies" {
    for policy in lru lfru; do
        up --cache-gb 0.0012 --policy "$policy"
        ctl trace start "$policy.trace"
        questions | router --lines >/dev/null
        ctl trace stop | tee out
        grep -qE "^$PWD/$policy.trace: [1-9][0-9]* passes, [1-9][0-9]* bytes$" out
        slots=$(stat_of k3-expertd slots) hits=$(stat_of k3-expertd hits) demands=$(stat_of k3-expertd demands)
        down
        [ "$slots" -lt 256 ] && [ "$hits" -gt 1000 ]
        "$K3_BIN/k3-sim" --slots "$slots" "$policy.trace" | tee sim
        grep -q ", $demands demands of " sim
        want=$(awk "BEGIN { printf \"%.2f\", 100 * $hits / $demands }")
        [ "$(awk -v n="$slots" -v p="$policy" '$1 == "slots" && !c { for (i = 1; i <= NF; i++) if ($i == p) c = i } c && $1 == n { print $c; exit }' sim)" = "$want" ]
    done
}

@test "with and without a trace: the same answers" {
    up --trunk-gb 1
    questions | router --lines | jq -c .generated_ids >plain
    ctl trace start --lookahead a.trace
    questions | router --lines | jq -c .generated_ids >traced
    cmp plain traced
    [ "$(wc -l <traced)" -eq 8 ]
    [ "$(ctl info computed | jq -r '.. | .trace? // empty | .state, .lookahead' | xargs)" = "on true" ]
    ctl trace stop a.trace
    [ "$(ctl info computed | jq -r '.. | .trace? // empty | .state')" = off ]
    [ "$(stat -c %a a.trace)" = 600 ]
}

@test "refusals: a file that exists, a second trace, none, another, no gate" {
    up --ring-mb 2 --trunk-gb 0.0021
    echo mine >old
    refused 2 'exists' trace start old
    [ "$(cat old)" = mine ]
    refused 2 'No such file or directory' trace start none/a.trace
    refused 2 'no trace is being written' trace stop
    refused 2 'none is pinned.*--trunk-gb' trace start --lookahead a.trace
    [ ! -e a.trace ]
    refused 2 'must be start FILE or stop' trace begin a.trace
    refused 2 'FILE is missing' trace start
    refused 2 'FILE is empty' trace start ""
    refused 2 'does not take --lookahead' ping --lookahead
    ctl trace start a.trace
    refused 2 "goes to\|written to $PWD/a.trace" trace start b.trace
    [ ! -e b.trace ]
    refused 2 'b.trace is not being written' trace stop b.trace
    ctl trace stop
}

@test "a daemon that leaves completes the file" {
    up
    ctl trace start a.trace
    questions | head -2 | router --lines >/dev/null
    down
    "$K3_BIN/k3-sim" a.trace | tee out
    grep -qE ' [1-9][0-9]* passes' out
    refute grep -q 'ends inside a pass' out
}
