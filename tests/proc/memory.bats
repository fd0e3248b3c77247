#!/usr/bin/env bats
# Where memory comes from, and what a machine may forbid: always the same bits, and info says which way it took.
load helpers

setup_file() {
    OUT=$(mktemp -d /tmp/k3-memory-XXXXXX) # short, and another user can get there
    chmod 777 "$OUT"
    export OUT
    family base
    [ "$(stat -c %s "$OUT/base/logits")" -gt 1000 ]
    [ "$(jq length "$OUT/base/ids")" -gt 1 ]
}
teardown_file() { rm -rf "$OUT"; }
teardown() {
    local p
    for p in $PIDS; do kill "$p" 2>/dev/null && wait "$p" || true; done
    PIDS=''
    rm -f "/dev/shm/k3.$(id -u).$INSTANCE."*
    rm -rf "$(run_dir "$INSTANCE")"
}
PIDS=''

family() { # family NAME OPTION...: WITH holds the command that runs it
    mkdir -m 777 "$OUT/$1"
    "${WITH[@]}" bash "$ROOT/tests/proc/memory_family.bash" "$OUT/$1" "${@:2}" 3>&- 4>&-
}
WITH=(env)
same_bits() { # same_bits NAME
    cmp "$OUT/base/logits" "$OUT/$1/logits" && cmp "$OUT/base/ids" "$OUT/$1/ids"
}
says() { # says NAME MEMBER FIELD
    jq -r ".$3" "$OUT/$1/$2.json"
}
sanitized() { [ "$SLOW" -gt 1 ]; } # there mlock does nothing
direct_here() { # direct_here DIR: true or false
    if python3 -c 'import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)' "$1/config.json" 2>/dev/null; then
        echo true
    else
        echo false
    fi
}

@test "the default is shm" {
    for d in trunkd expertd; do
        [ "$(says base $d memory_from)" = shm ]
        [ "$(says base $d memory_fallback)" = null ]
        [ "$(says base $d numa_node)" = null ]
        [ "$(says base $d swapped_bytes)" -ge 0 ]
        [ "$(says base $d major_faults)" -ge 0 ]
    done
}
@test "a /dev/shm of 64 MiB: shm is refused and names the way; memfd is chosen where nothing was said, and runs" {
    need_root
    run mounted tmpfs size=64m /dev/shm bash "$ROOT/tests/proc/memory_family.bash" "$OUT" --ring-mb 128 --trunk-gb 0.13422 --memory-from shm
    echo "$output"
    [ "$status" -eq 2 ]
    [[ $output == *"/dev/shm has"*"--memory-from memfd"* ]]
    WITH=(mounted tmpfs size=64m /dev/shm)
    family small --ring-mb 128 --trunk-gb 0.13422 --cache-gb 0.1
    same_bits small
    [ "$(says small trunkd memory_from)" = memfd ]
    [ "$(says small expertd memory_from)" = memfd ]
    [ "$(says small trunkd ring_bytes)" -eq $((128 << 20)) ]
}
@test "memlock: all, some, none" {
    need_root
    sanitized || [ "$(says base trunkd locked_bytes)" -eq "$(says base trunkd data_bytes)" ] # root
    as_nobody 0 true || skip "needs setpriv and prlimit"
    WITH=(as_nobody 0)
    "${WITH[@]}" test -x "$K3_BIN/k3-trunkd" -a -r "$DEMO/config.json" || skip "the checkout cannot be read by others"
    family locked_0 --ring-mb 16 --trunk-gb 0.017
    same_bits locked_0
    WITH=(as_nobody $((8 << 20)))
    family locked_8 --ring-mb 16 --trunk-gb 0.017 # the ring is too large, the rest is not
    same_bits locked_8
    sanitized && return
    [ "$(says locked_0 trunkd locked_bytes)" -eq 0 ]
    [ "$(says locked_0 expertd locked_bytes)" -eq 0 ]
    [ "$(says locked_8 trunkd locked_bytes)" -eq $(($(says locked_8 trunkd data_bytes) - (16 << 20))) ]
    [ "$(says locked_8 trunkd locked_bytes)" -gt 0 ]
}
as_nobody() { # as_nobody MEMLOCK COMMAND...
    prlimit --memlock="$1:$1" setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all "${@:2}"
}
@test "io_uring is forbidden" {
    local how
    for how in EPERM ENOSYS; do
        WITH=("$K3_BUILD/probe/no_uring" $how)
        "${WITH[@]}" true || skip "no seccomp here"
        family "uring_$how"
        same_bits "uring_$how"
        [ "$(says "uring_$how" trunkd io)" = pread ]
        [ "$(says "uring_$how" expertd io)" = pread ]
    done
}
@test "a model on tmpfs" {
    need_root
    mkdir "$OUT/tmpfs-model"
    WITH=(mounted tmpfs size=64m "$OUT/tmpfs-model" bash -c 'cp "$0"/* "$1" && shift && exec "$@"' "$DEMO" "$OUT/tmpfs-model")
    want=$("${WITH[@]}" bash -c "$(declare -f direct_here); direct_here '$OUT/tmpfs-model'")
    family tmpfs --model "$OUT/tmpfs-model"
    same_bits tmpfs
    [ "$(says tmpfs trunkd direct)" = "$want" ]
    [ "$(says tmpfs expertd 'files_direct == .files')" = "$want" ]
}
@test "a model on an overlay" {
    need_root
    mkdir "$OUT/overlay-model" "$OUT/overlay-top"
    WITH=(mounted tmpfs size=64m "$OUT/overlay-top" bash -c 'mkdir "$0/upper" "$0/work" && mount -t overlay -o "lowerdir=$1,upperdir=$0/upper,workdir=$0/work" none "$2" &&
        shift 2 && exec "$@"' "$OUT/overlay-top" "$DEMO" "$OUT/overlay-model")
    "${WITH[@]}" true || skip "no overlay here"
    want=$("${WITH[@]}" bash -c "$(declare -f direct_here); direct_here '$OUT/overlay-model'")
    family overlay --model "$OUT/overlay-model"
    same_bits overlay
    [ "$(says overlay trunkd direct)" = "$want" ]
    [ "$(says overlay expertd 'files_direct == .files')" = "$want" ]
}
@test "reserved huge pages, or a memfd and one line that says why" {
    local d got
    family huge --memory-from hugetlb --ring-mb 4 --cache-gb 0.002
    same_bits huge
    for d in trunkd expertd; do
        got=$(says huge $d memory_from)
        if [ "$got" = hugetlb ]; then
            [ "$(says huge $d huge_bytes)" -ge $((2 << 20)) ]
            [ "$(says huge $d memory_fallback)" = null ]
        else
            [ "$got" = memfd ]
            [ "$(grep -c "level=warn event=memory_fallback asked=hugetlb got=memfd" "$OUT/huge/$d.log")" -eq 1 ]
            [[ $(says huge $d memory_fallback) == *hugetlb* ]]
        fi
    done
    if [ "$(cat /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages)" -ge 16 ]; then
        [ "$(says huge trunkd memory_from)" = hugetlb ]
    fi
}

# ---- k3-keeper lives and dies ----

start() { # start NAME OPTION...: a daemon by hand
    "$K3_BIN/$1" --instance "$INSTANCE" "${@:2}" 2>>"$BATS_TEST_TMPDIR/$1.log" 3>&- &
    PIDS+=" $!"
}
ready() { # ready NAME
    local i
    for ((i = 0; i < 400 * SLOW; i++)); do
        grep -q "event=ready" "$BATS_TEST_TMPDIR/$1.log" 2>/dev/null && return
        sleep 0.05
    done
    cat "$BATS_TEST_TMPDIR/$1.log"
    return 1
}
@test "without k3-keeper a memfd is not to be had: exit 3, one line, soon" {
    local status=0
    timeout $((30 * SLOW)) "$K3_BIN/k3-trunkd" --instance "$INSTANCE" --model "$DEMO" --memory-from memfd --log-level error \
        2>"$BATS_TEST_TMPDIR/log" 3>&- || status=$?
    cat "$BATS_TEST_TMPDIR/log"
    [ "$status" -eq 3 ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/log")" -eq 1 ]
    grep -q "k3-keeper --instance $INSTANCE" "$BATS_TEST_TMPDIR/log"
}
kill_all_around() { # kill_all_around HOW: alone and together, in the middle of an answer, while computed lives
    local model=$BATS_TEST_TMPDIR/model want=$BATS_TEST_TMPDIR/want i who pid d
    "$K3_BIN/k3-mkmodel" --hidden 384 --layers 9 --vocab 512 --kda-heads 4 --kda-dim 64 --mla-heads 4 --q-lora 96 \
        --kv-lora 64 --qk-nope 32 --qk-rope 16 --v-dim 32 --experts 32 --top-k 4 --latent 192 --moe-inter 192 --dense-inter 512 \
        --res-block 4 --full-attn 4,8,9 --seed 5 --out "$model"
    up --model "$model" --ctx 256 --ring-mb 2 --trunk-gb 0.012 --cache-gb 0.002 --memory-from "$1"
    ask() { router --ids 11,7,503,90,41,8,399,64 --max-tokens 60 --json </dev/null | jq -c .generated_ids; }
    ask >"$want"
    [ "$(jq length "$want")" -eq 60 ]
    for who in k3-keeper "k3-keeper k3-trunkd" "k3-keeper k3-expertd" "k3-trunkd k3-keeper k3-expertd"; do
        for i in 1 2; do
            ctl wait --timeout $((20 * SLOW))
            ask >"$BATS_TEST_TMPDIR/got" &
            pid=$!
            sleep 0.$((RANDOM % 4))
            for d in $who; do kill -KILL "$(pid_of "$d")"; done
            wait $pid
            cmp "$want" "$BATS_TEST_TMPDIR/got"
        done
    done
    ctl wait --timeout $((20 * SLOW))
    [ "$(stat_of k3-keeper segments)" -eq 2 ]
    "$ROOT/run/k3-run" restart keeper --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&- 4>&-
    ask | cmp "$want"
}
@test "k3-keeper, k3-trunkd, k3-expertd killed, alone and together: the answer stays, and so does what is in memory" {
    kill_all_around memfd
    # Not read again, though owner and keeper died together.
    [ "$(ctl info k3-trunkd --json | jq '.. | objects | select(has("taken_over")) | .taken_over')" = true ]
    [ "$(ctl info k3-expertd --json | jq '.. | objects | select(has("taken_over")) | .taken_over')" -gt 0 ]
    down
    nothing_left "$INSTANCE"
}
@test "the same with reserved huge pages" {
    [ "$(cat /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages)" -ge 32 ] || skip "32 free huge pages are needed"
    kill_all_around hugetlb
    down
    nothing_left "$INSTANCE"
}
@test "k3-keeper serves nobody else, not even root" {
    need_root
    as_nobody 0 test -x "$K3_BIN/k3-keeper" || skip "the checkout cannot be read by others"
    mkdir -m 777 "$OUT/other"
    (exec 2>"$BATS_TEST_TMPDIR/k3-keeper.log" 3>&- # and no process between us and the keeper
        exec setpriv --reuid 65534 --regid 65534 --clear-groups env XDG_RUNTIME_DIR="$OUT/other" \
            "$K3_BIN/k3-keeper" --instance "$INSTANCE") &
    PIDS=" $!"
    ready k3-keeper
    run python3 -c 'import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(20)
s.connect(sys.argv[1])
print("answer", len(s.recv(64)))' "$OUT/other/k3/$INSTANCE/keeper.sock"
    [[ $output == "answer 0" || $output == *ConnectionReset* ]]
    grep -q "event=client_refused uid=0" "$BATS_TEST_TMPDIR/k3-keeper.log"
}

# ---- options ----

@test "an unknown kind of memory and an unknown node are refused" {
    local d
    for d in k3-trunkd k3-expertd k3-computed; do
        run "$K3_BIN/$d" --instance "$INSTANCE" --model "$DEMO" --numa-node 1000 --log-level error 3>&-
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *"--numa-node 1000"*"there is 0"* ]]
        [ "$d" != k3-computed ] || continue
        run "$K3_BIN/$d" --instance "$INSTANCE" --model "$DEMO" --memory-from nvram --log-level error 3>&-
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *"--memory-from nvram: must be shm, memfd or hugetlb"* ]]
    done
    run up --memory-from nvram
    [ "$status" -eq 2 ]
    [[ $output == *"must be shm, memfd or hugetlb"* ]]
}
@test "--numa-node: the segment carries the policy, and each member says its node" {
    [ -r /proc/self/numa_maps ] || skip "a kernel without NUMA"
    local d pid
    start k3-trunkd --model "$DEMO" --numa-node 0 --ring-mb 2
    start k3-expertd --model "$DEMO" --numa-node 0
    start k3-computed --model "$DEMO" --numa-node 0 --ctx 64
    ready k3-computed
    for d in k3-trunkd k3-expertd k3-computed; do
        [ "$(ctl info $d --json | jq --arg d $d '(.[$d] // .).numa_node')" -eq 0 ]
    done
    for d in trunkd:trunkdata expertd:expertdata; do
        pid=$(pid_of "k3-${d%:*}")
        # Shared memory carries its policy itself: the pages that others map follow it, too.
        grep -qE "prefer(=relative)?(=static)?:0 file=/dev/shm/.*(${d#*:}|#[0-9])" "/proc/$pid/numa_maps" || {
            grep /dev/shm "/proc/$pid/numa_maps"
            return 1
        }
    done
}
