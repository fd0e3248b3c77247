#!/usr/bin/env bats
# k3ctl stats --watch: a full screen at a terminal (tmux), which is put back however the program ends; plain blocks elsewhere;
# daemons that are gone are shown as gone.
load helpers

setup_file() { up --ctx 2048 --ring-mb 2 --trunk-gb 0.0022; }
teardown_file() { down; }
setup() { OUT=$BATS_TEST_TMPDIR/out; }
teardown() {
    [ -z "${SUPERVISOR:-}" ] || kill -CONT "$SUPERVISOR" 2>/dev/null || true
    t kill-server 2>/dev/null || true
}

need_tmux() { command -v tmux >/dev/null || skip "tmux is not installed"; }
t() { tmux -L "$INSTANCE" -f /dev/null "$@" 3>&- 4>&-; }
watch() { # watch OPTION...: in an 80 x 24 terminal, whose settings are noted before and after
    local run="stty -g >$OUT.before; ${ENVIRONMENT:-} $K3_BIN/k3ctl --instance $INSTANCE stats $* --watch 0.2; echo left with \$?; stty -g >$OUT.after; sleep 60"
    t new-session -d -x 80 -y 24 "$run" || { sleep 1; t new-session -d -x 80 -y 24 "$run"; }
}
screen() { t capture-pane -p; }
until_ok() { # until_ok COMMAND...
    local end=$((SECONDS + 60 * SLOW))
    while [ $SECONDS -lt $end ]; do
        "$@" && return 0
        sleep 0.05
    done
    screen || true
    return 1
}
shows_now() { screen | grep -qE -- "$1"; }
shows() { until_ok shows_now "$1"; }
# alternate screen, visible cursor
is_full() { [ "$(t display -p '#{alternate_on} #{cursor_flag}')" = "1 0" ]; }
is_back() { [ "$(t display -p '#{alternate_on} #{cursor_flag}')" = "0 1" ] && shows_now '^left with 0$' && [ -s "$OUT.after" ]; }
is_stopped() { ps -o stat= -p "$(pgrep -f "^$K3_BIN/k3ctl --instance $INSTANCE stats")" | grep -q T; }
restored() {
    until_ok is_back
    cmp "$OUT.before" "$OUT.after"
    refute shows_now 'DAEMON'
    t kill-server
}

@test "at 80 x 24 all of it is there, with units; q, Ctrl-C and SIGTERM put the terminal back" {
    need_tmux
    router --max-tokens 5 <<<"What is the capital of France?" >"$OUT"
    for way in q C-c TERM; do
        watch
        until_ok is_full
        shows '^k3 "'"$INSTANCE"'"  [0-9:]+  the last 0\.[2-9] s$'
        shows '^tokens +0\.00 /s +[1-9][0-9]* in all +passes 0\.00 /s'
        shows '^pass +\[\.+\] idle$'
        shows '^ring +\[[#.]+\] [0-9.]+ [MGk]?B of 2\.10 MB read ahead$'
        shows '^trunk +[0-9.]+ [MGk]?B/s(, [0-9]+ % of the [0-9.]+ GB/s of its drives)?, [0-9]+ in flight$'
        shows '^experts +[0-9.]+ [MGk]?B/s, '
        shows '^experts [0-9.]+ % hits \([0-9]+ of [0-9]+\), [0-9]+ of [0-9]+ slots hold one'
        shows '^memory +trunk [0-9.]+ [MGk]?B pinned, 2\.10 MB ring, [0-9.]+ kB resident; experts [0-9.]+ [MGk]?B;$'
        shows '^k3-computed +ready +[0-9]+ .* [0-9.]+ MB +0$'
        shows '^q leaves$'
        case $way in
        TERM) kill -TERM "$(pgrep -f "^$K3_BIN/k3ctl --instance $INSTANCE stats")" ;;
        *) t send-keys $way ;;
        esac
        restored
    done
}

@test "it follows the size of the terminal" {
    need_tmux
    watch
    shows '^q leaves$'
    t resize-window -x 50 -y 12
    shows '^pass +\[\.{10}\] idle$'
    [ "$(screen | head -1 | cut -c1-4)" = 'k3 "' ]
    t resize-window -x 120 -y 40
    shows '^pass +\[\.{60}\] idle$'
    shows '^q leaves$'
    t send-keys C-z
    until_ok is_stopped
    refute is_full
    kill -CONT "$(pgrep -f "^$K3_BIN/k3ctl --instance $INSTANCE stats")"
    until_ok is_full
    t send-keys q
    restored
}

@test "a daemon that is gone is shown as that, without its old numbers, until it is back" {
    need_tmux
    watch
    shows '^k3-trunkd +ready'
    SUPERVISOR=$("$ROOT/run/k3-run" status --instance "$INSTANCE" --bin-dir "$K3_BIN" | sed -n 's/.*k3-run pid \([0-9]*\).*/\1/p')
    kill -STOP "$SUPERVISOR" # so that it starts no other
    kill -KILL "$(pid_of k3-trunkd)"
    shows '^k3-trunkd +gone, restarting +- +- +- +-'
    shows '^ring +k3-trunkd is not there$'
    shows '^trunk +k3-trunkd is not there$'
    kill -KILL "$(pid_of k3-computed)"
    shows '^tokens +k3-computed is not there$'
    kill -CONT "$SUPERVISOR"
    shows '^k3-trunkd +ready +[0-9]+ .* +1$'
    shows '^tokens +[0-9]'
    t send-keys q
    restored
    ctl wait --timeout $((20 * SLOW))
}

@test "colours only where they are wanted; one daemon alone" {
    need_tmux
    watch
    shows '^k3-trunkd +ready'
    t capture-pane -p -e | grep -q $'\e\[32m'
    t kill-server
    ENVIRONMENT=NO_COLOR=1 watch
    shows '^k3-trunkd +ready'
    [ -z "$(t capture-pane -p -e | grep $'\e')" ]
    t kill-server
    watch trunkd
    until_ok is_full
    shows '^k3-trunkd  ready  pid'
    shows '^  read_bytes +[0-9.]+ [MGk]?B +[0-9.]+ [MGk]?B/s'
    t send-keys q
    restored
}

@test "elsewhere: a plain block each time, no line longer than 80, no escapes, until it is ended" {
    for how in "" NO_COLOR=1; do
        env $how timeout -s TERM $((2 * SLOW)) "$K3_BIN/k3ctl" --instance "$INSTANCE" stats --watch 0.3 >"$OUT" || [ $? -eq 124 ]
        [ "$(grep -c '^k3 "' "$OUT")" -ge 2 ]
        [ "$(grep -c '^k3-computed +ready' -E "$OUT")" -ge 2 ]
        [ "$(awk 'length > 80' "$OUT" | wc -l)" -eq 0 ]
        grep -q 'passes 0\.00 /s, - each' "$OUT"
        [ -z "$(grep $'\e' "$OUT")" ]
        refute grep -q 'q leaves' "$OUT"
    done
    run ctl stats --watch 0
    [ "$status" -eq 2 ]
    for how in "" --json --prometheus "--watch 0.1" "--watch 0.1 --json"; do
        run bash -c "'$K3_BIN/k3ctl' --instance '$INSTANCE' stats $how >/dev/full"
        [ "$status" -eq 1 ]
        [ "$output" = "k3ctl: stdout cannot be written" ]
    done
    run "$K3_BIN/k3ctl" --instance "$INSTANCE-none" stats --watch
    [ "$status" -eq 3 ]
}
