# run/supervisor.bash: the part of k3-run that stays.  Sourced by k3-run.
#
# A member's life, as the supervisor sees it (state in the members file):
#   running -> running   it died after having been ready: started again at once
#   running -> waiting   it died before it was ready: back-off of 0.5, 1, 2 .. 10 seconds, then running
#   running -> failed    it left with 2 (refused), or the family was never ready: that is final
# As long as the family was never ready, a member that ends, ends the family.
# Members are started with --supervised: they leave when this process is killed.

declare -A m_pid=() m_state=() m_restarts=() m_code=() m_started=() m_due=() m_delay=()
family_ready='' stopping='' kick='' timer='' waiter='' lock_fd='' now='' now_ms=0
GRACE=8

say() { # say LEVEL EVENT PAIRS: one line in k3-run.log, and on the terminal in the foreground
    set_now
    printf '%s\n' "level=$1 event=$2 $3 at=$now" >>"$run_log"
    [ -n "$detached" ] || printf '%s\n' "level=$1 event=$2 $3 at=$now" >&2
}
# Builtins where they will do: on a busy machine each process costs a tenth of a second.
set_now() { # now: the time of day
    local t=$EPOCHREALTIME TZ=UTC
    printf -v now '%(%Y-%m-%dT%H:%M:%S)T.%sZ' "${t%[.,]*}" "${t: -6:3}"
}
report() { # report WORDS: to the waiting `up`, which reads fd 3
    [ -z "$detached" ] || printf '%s\n' "$*" >&3 2>/dev/null
}
write_members() {
    local n text=''
    for n in "${member_names[@]}"; do
        text+="$n ${m_state[$n]} ${m_pid[$n]:--} ${m_restarts[$n]} ${m_code[$n]:-0} ${m_started[$n]:-0}"$'\n'
    done
    if [ ! -e "$members_file" ]; then # the first: one write, and k3ctl wait is not there yet
        printf '%s' "$text" >"$members_file"
        return
    fi
    printf '%s' "$text" >"$members_file.new"
    mv -f -- "$members_file.new" "$members_file"
}
member_field() { # member_field NAME FIELD
    awk -v n="$1" -v f="$2" '$1 == n { print $f }' "$members_file" 2>/dev/null
}
# No child may inherit the instance's lock, its reservation or the channel to `up`: it would keep them alive after we are
# gone.
start_member() { # start_member NAME
    local n=$1
    member_argv "$n"
    "${argv[@]}" >>"$run_dir/$n.log" 2>&1 </dev/null {lock_fd}>&- {plan_fd}>&- 3>&- &
    m_pid[$n]=$!
    m_state[$n]=running
    m_started[$n]=$EPOCHSECONDS
}
was_ready() { # was_ready NAME: this very process has said so in its log
    grep -q "event=ready .*pid=${m_pid[$1]} " "$run_dir/$1.log"
}
# The reason in a member's log: its last error line, else its last line that is no event.
reason_of() { # reason_of NAME: sets reason
    local lines=() i error='' other=''
    { mapfile -t lines <"$run_dir/$1.log"; } 2>/dev/null
    for ((i = ${#lines[@]} - 1; i >= 0; i--)); do
        case ${lines[i]} in
        'level=error '*)
            error=${lines[i]}
            break
            ;;
        level=*) ;;
        *) [ -n "$other" ] || other=${lines[i]} ;;
        esac
    done
    reason=${error:-${other:-it gave no reason}}
    if [[ $reason =~ text=\"([^\"]*)\" ]]; then reason=${BASH_REMATCH[1]}; fi
}
end_of() { # end_of STATUS: sets how: "exit=2" or "signal=KILL"
    how=exit=$1
    if [ "$1" -gt 128 ] && kill -l $(($1 - 128)) >/dev/null 2>&1; then how=signal=$(kill -l $(($1 - 128))); fi
}
stop_family() {
    local n ids until
    stopping=yes
    for n in "${member_names[@]}"; do
        if [ -n "${m_pid[$n]:-}" ]; then
            kill -TERM "${m_pid[$n]}" 2>/dev/null
            kill -CONT "${m_pid[$n]}" 2>/dev/null
        fi
    done
    [ -z "$waiter" ] || kill "$waiter" 2>/dev/null
    until=$((SECONDS + GRACE))
    while [ $SECONDS -lt $until ]; do
        if [ -z "$timer" ] || ! kill -0 "$timer" 2>/dev/null; then
            sleep 1 {lock_fd}>&- {plan_fd}>&- 3>&- &
            timer=$!
        fi
        ids=() # as in supervise: no process may be started from here to `wait -n`
        for n in "${member_names[@]}"; do
            [ -n "${m_pid[$n]:-}" ] && kill -0 "${m_pid[$n]}" 2>/dev/null && ids+=("${m_pid[$n]}")
        done
        [ ${#ids[@]} -gt 0 ] || break
        wait -n "$timer" "${ids[@]}" 2>/dev/null
    done
    for n in "${member_names[@]}"; do
        [ -n "${m_pid[$n]:-}" ] || continue
        if kill -0 "${m_pid[$n]}" 2>/dev/null; then
            say warn member_killed "name=$n pid=${m_pid[$n]} text=\"did not leave within $GRACE seconds\""
            kill -KILL "${m_pid[$n]}" 2>/dev/null
        fi
        wait "${m_pid[$n]}" 2>/dev/null
        m_pid[$n]=''
    done
    [ -z "$timer" ] || kill "$timer" 2>/dev/null
}
leave() { # leave STATUS: the last thing; the lock goes with the directory
    remove_leftovers
    exit "$1"
}
fail_family() { # fail_family NAME STATUS
    local text reason how
    reason_of "$1"
    end_of "$2"
    text=$reason
    [ "$2" -eq 2 ] || text="$1 failed ($how): $text"
    say error start_failed "name=$1 $how text=\"${text//\"/\'}\""
    if [ "$2" -ne 2 ] && [ -n "$detached" ]; then
        while IFS= read -r line; do report "log $line"; done < <(tail -n 5 "$run_dir/$1.log")
    fi
    stop_family
    # Before the answer goes out, nothing is left.
    remove_leftovers
    if [ "$2" -gt 0 ] && [ "$2" -le 4 ]; then set -- "$1" "$2"; else set -- "$1" 1; fi
    report "failed $2 $text"
    [ -n "$detached" ] || echo "k3-run: $text" >&2
    exit "$2"
}
longer_delay() { # longer_delay NAME
    m_delay[$1]=$((m_delay[$1] == 0 ? 500 : m_delay[$1] * 2 > 10000 ? 10000 : m_delay[$1] * 2))
}
start_later() { # start_later NAME MS
    m_state[$1]=waiting
    set_now_ms
    m_due[$1]=$((now_ms + $2))
}
member_ended() { # member_ended NAME STATUS
    local n=$1 how reason line level event delay=0
    end_of "$2"
    m_code[$n]=$2
    if [ -z "$family_ready" ]; then
        fail_family "$n" "$2"
    elif [ "$2" -eq 2 ]; then
        m_state[$n]=failed
        reason_of "$n"
        line="name=$n pid=${m_pid[$n]} $how text=\"${reason//\"/\'}\""
        say error member_refused "$line"
    elif was_ready "$n"; then
        m_restarts[$n]=$((m_restarts[$n] + 1))
        # Whoever dies by itself soon after its start, and did so before, would only take a core.
        if [ "$2" -eq 0 ] || [ "$how" = signal=KILL ] || [ $((EPOCHSECONDS - m_started[$n])) -ge 10 ]; then
            m_delay[$n]=0
        else
            delay=${m_delay[$n]}
            longer_delay "$n"
        fi
        line="name=$n pid=${m_pid[$n]} $how restarts=${m_restarts[$n]}"
        [ "$delay" -eq 0 ] || line+=" next_try_ms=$delay"
        level=warn event=member_died
        [ "$2" -ne 0 ] || level=info event=member_ended # it was asked to
        say $level $event "$line"
        printf '%s\n' "level=$level event=$event $line at=$now" >>"$run_dir/$n.log"
        if [ "$delay" -eq 0 ]; then
            start_member "$n"
        else
            start_later "$n" "$delay"
        fi
    else
        m_restarts[$n]=$((m_restarts[$n] + 1))
        longer_delay "$n"
        start_later "$n" "${m_delay[$n]}"
        line="name=$n pid=${m_pid[$n]} $how next_try_ms=${m_delay[$n]}"
        reason_of "$n"
        say error member_failed "$line text=\"${reason//\"/\'}\""
    fi
    write_members
}
set_now_ms() { now_ms=$((${EPOCHREALTIME/[.,]/} / 1000)); }

# How long to sleep when nobody ends: until the next attempt of a member that waits, at most 5 s.
start_timer() {
    local n ms=5000 left text
    set_now_ms
    for n in "${member_names[@]}"; do
        if [ "${m_state[$n]}" = waiting ]; then
            left=$((m_due[$n] - now_ms))
            [ $left -lt 10 ] && left=10
            [ $left -lt $ms ] && ms=$left
        fi
    done
    printf -v text '%d.%03d' $((ms / 1000)) $((ms % 1000))
    sleep "$text" {lock_fd}>&- {plan_fd}>&- 3>&- &
    timer=$!
}
start_due() {
    local n any=''
    set_now_ms
    for n in "${member_names[@]}"; do
        case ${m_state[$n]} in
        waiting) [ -n "$kick" ] || [ "$now_ms" -ge "${m_due[$n]}" ] || continue ;;
        failed) [ -n "$kick" ] || continue ;;
        *) continue ;;
        esac
        start_member "$n"
        any=yes
    done
    kick=''
    [ -z "$any" ] || write_members
}

waiter_ended() { # waiter_ended STATUS: of k3ctl wait
    local text
    waiter=''
    if [ "$1" -eq 0 ]; then
        family_ready=yes
        rm -f -- "$run_dir/k3-run.wait"
        say info family_ready "instance=$instance pid=$$"
        report "ready ${opt[model]}"
        [ -z "$detached" ] || exec 3>&-
        return
    fi
    text=$(sed 's/^k3ctl: //' "$run_dir/k3-run.wait")
    say error start_failed "exit=$1 text=\"${text//\"/\'}\""
    stop_family
    remove_leftovers
    report "failed 1 $text"
    [ -n "$detached" ] || echo "k3-run: $text" >&2
    exit 1
}

refuse_use() { # refuse_use HOLDER
    local text="instance \"$instance\" is in use by $1; choose another --instance, or stop it"
    text+=" with: k3-run down --instance $instance"
    report "failed 2 $text"
    [ -n "$detached" ] || echo "k3-run: $text" >&2
    drop_plan
    exit 2
}
take_instance_lock() {
    exec {lock_fd}<>"$lock_file"
    if ! flock -n "$lock_fd"; then
        refuse_use "k3-run pid $(lock_pid "$lock_file")"
    fi
    # `down` may have removed the file between our open and our lock.
    if [ ! "/proc/$$/fd/$lock_fd" -ef "$lock_file" ]; then
        report "failed 1 instance \"$instance\" was being taken down; try again"
        exit 1
    fi
    echo "1 $$" >"$lock_file"
    # Daemons of a supervisor that was killed leave within seconds; one that stays was started by hand, and taking this
    # instance would end in removing its segments.
    local n until=$((SECONDS + 5))
    for n in "${member_names[@]}"; do
        while lock_held "$run_dir/$n.lock" && [ $SECONDS -lt $until ]; do sleep 0.05 {lock_fd}>&- {plan_fd}>&- 3>&-; done
        if lock_held "$run_dir/$n.lock"; then
            rm -f -- "$lock_file"
            refuse_use "$n pid $(lock_pid "$run_dir/$n.lock"), which no k3-run has started"
        fi
    done
}

# What `up` was given by its caller (a test's pipes, a terminal's descriptors) must not live as long as we do; and an
# `up` that was killed must not take us with it.
cut_loose() {
    local fd
    trap '' PIPE
    for fd in /proc/$$/fd/*; do
        fd=${fd##*/}
        if [ "$fd" -gt 3 ] && [ "$fd" -ne 255 ] && [ "$fd" != "$plan_fd" ]; then exec {fd}>&-; fi
    done
}

supervise() {
    local n ids ended
    if [ -n "$detached" ]; then
        cut_loose
        report "pid $$"
    fi
    take_instance_lock
    : >"$run_log"
    printf '%s\n' "${opt[model]}" >"$run_dir/k3-run.model"
    trap 'stopping=yes' TERM INT HUP
    trap 'kick=yes' USR1
    say info starting "pid=$$ instance=$instance model=${opt[model]}"
    for n in "${member_names[@]}"; do
        : >"$run_dir/$n.log"
        m_state[$n]=running m_restarts[$n]=0 m_delay[$n]=0
    done
    for n in "${member_names[@]}"; do start_member "$n"; done
    write_members
    "$bin/k3ctl" --instance "$instance" wait --timeout "${opt[wait]}" >/dev/null 2>"$run_dir/k3-run.wait" \
        {lock_fd}>&- {plan_fd}>&- 3>&- &
    waiter=$!
    while [ -z "$stopping" ]; do
        start_due
        [ -n "$timer" ] || start_timer
        # From here to `wait -n` no process may be started: bash forgets, then, which children have ended meanwhile.
        ids=("$timer")
        ended=()
        for n in "${member_names[@]}"; do
            [ "${m_state[$n]}" = running ] || continue
            if kill -0 "${m_pid[$n]}" 2>/dev/null; then ids+=("${m_pid[$n]}"); else ended+=("$n"); fi
        done
        if [ -n "$waiter" ]; then
            if kill -0 "$waiter" 2>/dev/null; then ids+=("$waiter"); else ended+=(waiter); fi
        fi
        if [ ${#ended[@]} -eq 0 ]; then
            wait -n "${ids[@]}" 2>/dev/null
            kill -0 "$timer" 2>/dev/null || timer=''
            continue
        fi
        for n in "${ended[@]}"; do
            if [ "$n" = waiter ]; then
                wait "$waiter" 2>/dev/null
                waiter_ended $?
            else
                wait "${m_pid[$n]}" 2>/dev/null
                member_ended "$n" $?
            fi
        done
    done
    say info stopping "pid=$$ instance=$instance"
    stop_family
    [ -n "$family_ready" ] || report "failed 1 stopped before the family was ready"
    leave 0
}
