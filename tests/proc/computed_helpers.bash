# For the tests of k3-computed: daemons started one by one, and requests over computed.sock.
load helpers
# The three daemons use little of everything, so that the ring wraps and slots are evicted.
LOG=$BATS_FILE_TMPDIR
RUN=$(run_dir "$INSTANCE")

trunkd() { "$K3_BIN/k3-trunkd" --model "${MODEL:-$DEMO}" --instance "$INSTANCE" --ring-mb 2 --trunk-gb 0.003 "$@" 2>>"$LOG/trunkd.log" 3>&- 4>&- & TRUNKD=$!; }
expertd() { "$K3_BIN/k3-expertd" --model "${MODEL:-$DEMO}" --instance "$INSTANCE" --cache-gb 0.0005 "$@" 2>>"$LOG/expertd.log" 3>&- 4>&- & EXPERTD=$!; }
computed() { "$K3_BIN/k3-computed" --model "${MODEL:-$DEMO}" --instance "$INSTANCE" "$@" 2>>"$LOG/computed.log" 3>&- 4>&- & COMPUTED=$!; }
logged() { # logged FILE PATTERN [SECONDS]: waits until the log has the line
    local i
    for ((i = 0; i < ${3:-20} * 20 * SLOW; i++)); do
        grep -q -- "$2" "$LOG/$1.log" 2>/dev/null && return 0
        sleep 0.05
    done
    echo "$1.log has no $2:"; cat "$LOG/$1.log"
    return 1
}
all_three() { # all_three OPTION OF COMPUTED...
    rm -f "$LOG"/*.log
    trunkd && expertd && computed "$@" && logged computed event=ready
}
ends_within() { # ends_within PID TENTHS (times SLOW): and leaves its exit status in STATUS
    local i
    for ((i = 0; i < $2 * SLOW; i++)); do
        if ! kill -0 "$1" 2>/dev/null; then wait "$1" && STATUS=0 || STATUS=$?; return 0; fi
        sleep 0.1
    done
    echo "$1 is still there after $2 tenths of a second"
    return 1
}
stop_all() {
    local p
    for p in "${COMPUTED:-}" "${EXPERTD:-}" "${TRUNKD:-}"; do [ -n "$p" ] && kill -TERM "$p" 2>/dev/null; done
    for p in "${COMPUTED:-}" "${EXPERTD:-}" "${TRUNKD:-}"; do
        [ -n "$p" ] && { ends_within "$p" 50 || kill -KILL "$p"; }
    done
    COMPUTED='' EXPERTD='' TRUNKD=''
    rm -rf "$RUN"
    rm -f /dev/shm/k3."$(id -u).$INSTANCE".* # a killed one leaves its segments
    if grep -A30 -e Sanitizer -e "runtime error" "$LOG"/*.log; then return 1; fi # sanitizer builds
}
ask() { timeout $((60 * SLOW)) "$K3_BUILD/probe/submit_probe" "$RUN" computed.sock; } # ask < requests
ID=00000000000000000000000000000001
PROMPT=1283,367,377,375,359,1,1285,288,262,264,319,268,1055,30,1284,367,1285,1282,1283,367,377,375,373,1,1285,1283,366,1285
submit() { # submit ID MAX_TOKENS [MORE FIELDS]
    echo "{\"cmd\":\"submit\",\"id\":\"$1\",\"prompt_ids\":[$PROMPT],\"max_tokens\":$2,\"temperature\":0,\"top_k\":0,\"top_p\":1,\"min_p\":0,\"seed\":\"1\",\"stop_ids\":[]${3:+,$3}}"
}
request() { echo "{\"cmd\":\"$1\",\"id\":\"${2:-$ID}\"${3:+,$3}}"; }
