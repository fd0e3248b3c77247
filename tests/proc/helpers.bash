# Shared by the process tests.  tests/run sets K3_BIN and K3_BUILD; defaults serve a bare `bats tests/proc/x.bats`.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
K3_BIN=${K3_BIN:-$ROOT/bin}
K3_BUILD=${K3_BUILD:-$ROOT/build/release}
DEMO=$ROOT/run/demo-model
export K3_BIN K3_BUILD
# What a limit in seconds is multiplied by.
case $K3_BUILD in *asan* | *ubsan* | *tsan*) SLOW=6 ;; *) SLOW=1 ;; esac

# The instance of one test file: t-<checkout>-<file>, so that leftovers can be told and two checkouts can test at once.
INSTANCE=t-$(cksum <<<"$ROOT" | cut -c1-4)-$(basename "${BATS_TEST_FILENAME:-shell}" .bats | tr -c 'A-Za-z0-9\n' '-' | cut -c1-24)
export INSTANCE

# A command that must fail.  ("! command" ends no test: the shell's errexit leaves it out.)
refute() { # refute COMMAND...
    if "$@"; then
        echo "this succeeded and should not: $*"
        return 1
    fi
}
up() { # up OPTION...
    "$ROOT/run/k3-run" up --instance "$INSTANCE" --bin-dir "$K3_BIN" "$@" 3>&- 4>&-
}
down() {
    "$ROOT/run/k3-run" down --instance "$INSTANCE" >/dev/null 2>&1 3>&- 4>&- || true
}
# Takes out what `up` says of a start that takes its time, as it does under a sanitizer: a refusal is one line besides.
without_progress() { # without_progress FILE
    sed -i '/^k3-run: [0-9]* s: ready: /d' "$1"
}
router() { # router OPTION...  (prompt on stdin)
    timeout $((120 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "${BATS_FILE_TMPDIR:-/tmp}/state" "$@" 3>&-
}
ctl() { "$K3_BIN/k3ctl" --instance "$INSTANCE" "$@"; }
# One value of a member's stats page.
stat_of() { # stat_of DAEMON NAME
    ctl stats "$1" --json | jq -r --arg d "$1" --arg n "$2" '.. | objects | select(has($n)) | .[$n] | if type == "object" then .value else . end' | head -1
}
need_root() {
    [ "$(id -u)" -eq 0 ] || skip "needs root"
    unshare -m true 2>/dev/null || skip "needs mount namespaces"
}
mounted() { # mounted TYPE OPTIONS PLACE COMMAND...: the command with this mount, which nobody else sees
    unshare -m --propagation private bash -c 'mount -t "$0" -o "$1" none "$2" && shift 2 && exec "$@"' "$@"
}
run_dir() { # run_dir INSTANCE
    if [ -n "${XDG_RUNTIME_DIR:-}" ]; then echo "$XDG_RUNTIME_DIR/k3/$1"; else echo "/tmp/k3-$(id -u)/$1"; fi
}
pid_of() { # pid_of DAEMON: the process that holds the daemon's lock
    ctl info "$1" --json 2>/dev/null | jq -r '.. | objects | select(has("pid")) | .pid' | head -1
}
# Nothing may be left of an instance.
nothing_left() { # nothing_left INSTANCE
    [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).$1.*")" ] || { find /dev/shm -maxdepth 1 -name "k3.$(id -u).$1.*"; return 1; }
    [ ! -e "$(run_dir "$1")" ] || { find "$(run_dir "$1")"; return 1; }
    for _ in {1..40}; do # one that was ended by its supervisor may still be leaving
        pgrep -f -- "--instance $1( |\$)" | grep -qvx "$$" || return 0
        sleep 0.05
    done
    pgrep -af -- "--instance $1( |\$)"
    return 1
}
