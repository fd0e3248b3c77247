#!/usr/bin/env bats
# k3-router at a terminal (tmux): conversation, history, commands, Ctrl-C in its three meanings, the progress line.
load helpers

setup_file() {
    command -v tmux >/dev/null || return 0
    up --ctx 2048 --ring-mb 2 --trunk-gb 0.0022 # hardly anything pinned, so that a pass needs k3-trunkd
}
teardown_file() { down; }
setup() {
    command -v tmux >/dev/null || skip "tmux is not installed"
    STATE=$BATS_TEST_TMPDIR/state
}
teardown() { t kill-server 2>/dev/null || true; }

t() { tmux -L "$INSTANCE" -f /dev/null "$@" 3>&- 4>&-; }
open() { # open OPTION...: a router in an 80 x 24 terminal
    local run="$K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE $*; echo left with \$?; sleep 60"
    # On a busy machine the terminal's server may need a second attempt.
    t new-session -d -x 80 -y 24 "$run" || { sleep 1; t new-session -d -x 80 -y 24 "$run"; }
    prompt
}
screen() { t capture-pane -p; }
shows() { # shows REGEX: waits until a line of the screen matches
    for _ in $(seq $((400 * SLOW))); do
        screen | grep -qE -- "$1" && return 0
        sleep 0.05
    done
    screen
    return 1
}
prompt() { # waits until the last line is an empty prompt
    for _ in $(seq $((400 * SLOW))); do
        [ "$(screen | grep -v '^ *$' | tail -1 | tr -d ' ')" = ">" ] && return 0
        sleep 0.05
    done
    screen
    return 1
}
type() { prompt && t send-keys -l "$1" && t send-keys Enter; }

@test "a conversation, with history over two runs" {
    open
    type "What is the capital of France?"
    shows '^The capital of France is Paris\.$'
    type "Wo ist Österreich? 你好"
    shows '^> Wo ist Österreich\? 你好$'
    prompt
    t send-keys C-d
    shows 'left with 0'
    t kill-server
    open
    t send-keys Up
    shows '^> Wo ist Österreich\? 你好$'
    t send-keys Up
    shows '^> What is the capital of France\?$'
    t send-keys Enter
    shows '^The capital of France is Paris\.$'
    type /quit
    shows 'left with 0'
}

@test "commands" {
    open
    type /help
    shows '^/system TEXT'
    type "/think on"
    shows 'thinking is on'
    type "What is the capital of Italy?"
    shows 'Italy: Rome\.'
    shows '^The capital of Italy is Rome\.$'
    t capture-pane -p -e | grep 'Italy: Rome' | grep -q $'\e\[2m' # thinking is dimmed
    type /think
    shows '^/think on or /think off$'
    type /reset
    shows 'a new conversation'
    type "/system Be brief."
    shows 'with this system message'
    type /nonsense
    shows 'no such command'
    type /quit
    shows 'left with 0'
}

@test "--json and --lines at a terminal say what they wait for" {
    for mode in --json --lines; do
        t new-session -d -x 80 -y 24 "$K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE $mode; echo left with \$?; sleep 60"
        shows 'reading (the prompt|prompts) from the terminal.*end with Ctrl-D'
        t send-keys -l "What is the capital of France?"
        t send-keys Enter C-d
        shows '"text":|of France is Paris'
        t kill-server
    done
}

@test "Ctrl-C stops the answer, then drops a line, then leaves" {
    open --raw --temperature 100 --top-p 1 --seed 8 --max-tokens 1500
    trunkd=$(pid_of k3-trunkd)
    kill -STOP "$trunkd" # the answer cannot come to its end before the interrupt
    type "Tell me"
    shows 'waiting for trunk' && t send-keys C-c && shows '^(\^C)?\(stopped\)$' || {
        kill -CONT "$trunkd"
        return 1
    }
    kill -CONT "$trunkd"
    prompt
    [ -n "$(pid_of k3-computed)" ]
    tail -qn 1 "$STATE"/*.journal | grep -qx 'end cancelled'
    t send-keys -l "half a line"
    shows '> half a line'
    t send-keys C-c
    shows 'half a line\^C$'
    prompt
    screen | refute grep -q 'left with'
    t send-keys C-c
    shows 'again, or Ctrl-D'
    screen | refute grep -q 'left with'
    t send-keys C-c
    shows 'left with 0'
    [ "$(router --state-dir "$STATE" <<<"What is the capital of France?")" = "The capital of France is Paris." ]
}

@test "control characters of an answer do not reach the terminal" {
    command -v script >/dev/null || skip "script is not installed"
    ask="printf 'Tell me' | $K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE --raw --temperature 100 --top-p 1 --seed 8"
    timeout 120 script -qec "$ask" "$BATS_TEST_TMPDIR/tty" </dev/null >/dev/null
    timeout 120 sh -c "$ask" >"$BATS_TEST_TMPDIR/plain"
    # The same answer: with escape and other control characters in a file, without them at a terminal.
    /usr/bin/python3 - "$BATS_TEST_TMPDIR/plain" "$BATS_TEST_TMPDIR/tty" <<'P'
import sys
bad = lambda s: [c for c in s if (c < ' ' and c not in '\n\t') or '\x7f' <= c < '\xa0']
plain = open(sys.argv[1], encoding='utf-8', newline='').read()
tty = open(sys.argv[2], encoding='utf-8', newline='').read()
assert len(bad(plain)) > 5, 'the noise has no control characters'
tty = tty.split('\n', 1)[1].rsplit('\nScript done', 1)[0].replace('\r\n', '\n')
assert not bad(tty), bad(tty)
want = ''.join('' if c == '\r' else '\ufffd' if bad(c) else c for c in plain)
assert tty.strip('\n') == want.strip('\n'), (tty[-80:], want[-80:])
P
}

@test "the progress line says what the pass waits for and is gone before text" {
    open
    trunkd=$(pid_of k3-trunkd)
    kill -STOP "$trunkd"
    type "What is the capital of France?"
    shows '^(prefill|decode) +layer [0-9]+/9 .*\(waiting for trunk\)$' || {
        kill -CONT "$trunkd"
        return 1
    }
    kill -CONT "$trunkd"
    shows '^The capital of France is Paris\.$'
    screen | refute grep -qE 'layer [0-9]+/'
    type /quit
    shows 'left with 0'
}
