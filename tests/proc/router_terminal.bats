#!/usr/bin/env bats
# k3-router at a terminal (tmux): conversation, history, several lines, commands, Ctrl-C in its three meanings, the progress line,
# colours, resizing.
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

t() { # a server that is just leaving takes a new session with it: asked again then
    tmux -L "$INSTANCE" -f /dev/null "$@" 3>&- 4>&- || { [ "$1" = new-session ] && sleep 1 && tmux -L "$INSTANCE" -f /dev/null "$@" 3>&- 4>&-; }
}
open() { # open OPTION...: a router in an 80 x 24 terminal
    local run="${ENVIRONMENT:-} $K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE $*; echo left with \$?; sleep 60"
    # On a busy machine the terminal's server may need a second attempt.
    t new-session -d -x 80 -y 24 "$run" || { sleep 1; t new-session -d -x 80 -y 24 "$run"; }
    prompt
}
screen() { t capture-pane -p; }
shows() { # shows REGEX: waits until a line of the screen matches
    local end=$((SECONDS + 60 * SLOW))
    while [ $SECONDS -lt $end ]; do
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
    prompt
    t send-keys C-r
    t send-keys -l "Wo ist"
    shows '^> Wo ist Österreich\? 你好'
    t send-keys Escape
    t send-keys C-c
    type /quit
    shows 'left with 0'
}

@test "commands" {
    open
    type /help
    shows '^/system \[TEXT\]'
    [ "$(screen | awk 'length > 79' | wc -l)" -eq 0 ]
    type "/think on"
    shows 'thinking is on'
    type "What is the capital of Italy?"
    shows 'Italy: Rome\.'
    shows '^The capital of Italy is Rome\.$'
    t capture-pane -p -e | grep 'Italy: Rome' | grep -q $'\e\[2m' # thinking is dimmed
    type /think
    shows '^\(thinking is on\)$'
    type "/effort low"
    shows 'thinking effort: low'
    type "/think perhaps"
    shows '^/think on or /think off$'
    type /reset
    shows 'a new conversation'
    type "/system Be brief."
    shows 'with this system message'
    type "/nonsense x"
    shows '^/nonsense: no such command; /help'
    type "/reset x"
    shows '/reset takes nothing more'
    type "//slash"
    prompt
    type /stats
    shows '^conversation  3 messages, [0-9]+ of 2048 positions'
    tail -n +2 $(ls -t "$STATE"/*.journal | head -1) | head -1 | jq -c .submit.prompt_ids | tr -d '[]' >"$BATS_TEST_TMPDIR/ids"
    router --state-dir "$BATS_TEST_TMPDIR/s2" --think on --effort low --system "Be brief." --json --max-tokens 1 <<<"/slash" |
        jq -c .prompt_ids | tr -d '[]' | cmp - "$BATS_TEST_TMPDIR/ids"
    type /quit
    shows 'left with 0'
}

@test "several lines: a paste, a backslash, a block, Alt-Enter, the editor; none sends more than one message" {
    printf '#!/bin/sh\nprintf "by\\nhand\\n\\n" >"$1"\n' >"$BATS_TEST_TMPDIR/editor"
    chmod +x "$BATS_TEST_TMPDIR/editor"
    ENVIRONMENT="VISUAL= EDITOR=$BATS_TEST_TMPDIR/editor" open --max-tokens 1
    printf 'a paste\nof three\n\tlines' >"$BATS_TEST_TMPDIR/paste"
    t load-buffer "$BATS_TEST_TMPDIR/paste"
    t paste-buffer -p
    shows '^ +lines$'
    [ -z "$(ls "$STATE"/*.journal 2>/dev/null)" ] # not sent before Enter
    t send-keys Enter
    prompt
    t send-keys -l 'one\'
    t send-keys Enter
    shows '^\. *$'
    t send-keys -l 'two'
    t send-keys Enter
    prompt
    t send-keys -l '"""'
    t send-keys Enter
    t send-keys -l 'in a'
    t send-keys Enter
    t send-keys -l 'block"""'
    t send-keys Enter
    prompt
    t send-keys -l 'alt'
    t send-keys M-Enter
    t send-keys -l 'enter'
    t send-keys Enter
    prompt
    type /edit
    prompt
    t send-keys -l 'half'
    t resize-window -x 50 -y 20
    shows '^> half$'
    t send-keys -l ' resized'
    shows '^> half resized$'
    t send-keys C-c
    type "/save $BATS_TEST_TMPDIR/talk.json"
    shows 'messages are in'
    [ "$(jq -c '[.messages[] | select(.role == "user").content]' "$BATS_TEST_TMPDIR/talk.json")" = \
        '["a paste\nof three\n\tlines","one\ntwo","in a\nblock","alt\nenter","by\nhand"]' ]
    # The history has each as it was sent, also what was dropped, and nobody else may read it.
    [ "$(stat -c %a "$STATE/history")" = 600 ]
    jq -c . "$STATE/history" | grep -qx '"a paste\\nof three\\n\\tlines"'
    grep -qx '"half resized"' "$STATE/history"
    kill -KILL "$(pgrep -f "^$K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE")" # after a death, too
    printf '"torn' >>"$STATE/history"
    t kill-server
    open
    t send-keys Up
    shows '^> /save'
    t send-keys C-c
    [ "$(tail -n 2 "$STATE/history" | head -n 1)" = '"torn' ]
    kill -TERM "$(pgrep -f "^$K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE")"
    shows 'left with 0'
}

@test "bytes that are no character take nothing with them" {
    open --max-tokens 1
    printf 'caf\351\r' >"$BATS_TEST_TMPDIR/typed"
    t load-buffer "$BATS_TEST_TMPDIR/typed"
    t paste-buffer -r
    shows 'cut off at the token limit'
    prompt
    printf 'no \303\342' >"$BATS_TEST_TMPDIR/typed" # what is pasted ends with them, and the paste ends, too
    t load-buffer "$BATS_TEST_TMPDIR/typed"
    t paste-buffer -p
    shows '^> no '
    t send-keys Enter
    type /quit
    shows 'left with 0'
    [ "$(ls "$STATE"/*.journal | wc -l)" -eq 2 ]
    [ "$(jq -c . "$STATE/history" | tr -d '\n')" = '"caf�""no ��""/quit"' ]
}

@test "a conversation is saved whole, never over another one, and loaded again" {
    open --think on
    type "What is the capital of Italy?"
    shows '^The capital of Italy is Rome\.$'
    type "/save $BATS_TEST_TMPDIR/a.json"
    shows '\(2 messages are in'
    [ "$(jq -c '[.messages[] | [.role, .content, .reasoning_content]]' "$BATS_TEST_TMPDIR/a.json")" = \
        '[["user","What is the capital of Italy?",null],["assistant","The capital of Italy is Rome.","Italy: Rome."]]' ]
    type "/save $BATS_TEST_TMPDIR/a.json"
    shows 'there is a file already; /save -f'
    type "What is the capital of France?"
    prompt
    first=$(ls -t "$STATE"/*.journal | head -1)
    type "/load $BATS_TEST_TMPDIR/a.json"
    shows '\(a conversation of 2 messages\)'
    type "What is the capital of France?"
    prompt
    second=$(ls -t "$STATE"/*.journal | head -1)
    [ "$first" != "$second" ]
    # The same prompt to the id: the whole history, with its thinking.
    cmp <(sed -n 2p "$first" | jq -c .submit.prompt_ids) <(sed -n 2p "$second" | jq -c .submit.prompt_ids)
    type "/save -f $BATS_TEST_TMPDIR/a.json"
    shows '\(4 messages are in'
    echo '{"messages":[{"role":"robot"}]}' >"$BATS_TEST_TMPDIR/b.json"
    type "/load $BATS_TEST_TMPDIR/b.json"
    shows 'messages\[0\]\.role: "robot"'
    type "/load $BATS_TEST_TMPDIR/none.json"
    shows 'none.json: No such'
    type /stats
    shows '^conversation  4 messages'
    [ -z "$(find "$BATS_TEST_TMPDIR" -name 'a.json.*')" ]
    type /quit
    shows 'left with 0'
}

@test "colours at a terminal only, and not with NO_COLOR or TERM=dumb" {
    for environment in NO_COLOR=1 TERM=dumb; do
        ENVIRONMENT=$environment open --think on
        type "What is the capital of Italy?"
        shows '^\[thinking\] Italy: Rome\.$'
        shows '^\[answer\]$'
        shows '^The capital of Italy is Rome\.$'
        [ -z "$(t capture-pane -p -e | grep $'\e')" ]
        t kill-server
    done
    router --state-dir "$STATE" --think on <<<"What is the capital of Italy?" >"$BATS_TEST_TMPDIR/piped" 2>&1
    [ "$(cat "$BATS_TEST_TMPDIR/piped")" = "The capital of Italy is Rome." ]
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

@test "an answer whose terminal is lost, or whose router is told to end, is gone on with by --resume" {
    local sig n=0 id
    for sig in HUP TERM; do
        open --raw --temperature 100 --top-p 1 --seed 8 --max-tokens 300
        trunkd=$(pid_of k3-trunkd)
        kill -STOP "$trunkd" # the answer cannot come to its end before the signal
        type "Tell me"
        shows 'waiting for trunk' || {
            kill -CONT "$trunkd"
            return 1
        }
        if [ $sig = HUP ]; then
            t kill-server
        else
            kill -TERM "$(pgrep -P "$(t display-message -p '#{pane_pid}')" -f "k3-router --instance $INSTANCE")"
            shows 'go on with' || n=1
        fi
        kill -CONT "$trunkd"
        [ $n = 0 ]
        id=$(basename "$(ls -t "$STATE"/*.journal | head -1)" .journal)
        refute grep -q '^end' "$STATE/$id.journal"
        timeout $((60 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$STATE" --resume "$id" >"$BATS_TEST_TMPDIR/$sig"
        [ "$(router --state-dir "$STATE" --resume "$id" --json | jq .usage.completion_tokens)" = 300 ]
        t kill-server 2>/dev/null || true
    done
    cmp "$BATS_TEST_TMPDIR/HUP" "$BATS_TEST_TMPDIR/TERM"
}

@test "control characters of an answer do not reach the terminal" {
    command -v script >/dev/null || skip "script is not installed"
    ask="printf 'Tell me' | $K3_BIN/k3-router --instance $INSTANCE --state-dir $STATE --raw --temperature 100 --top-p 1 --seed 8 2>/dev/null" # without the progress line
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
