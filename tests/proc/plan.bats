#!/usr/bin/env bats
# k3-plan and what k3-run makes of it: the plan before anything is loaded, presets, refusals, reservations.
load helpers

setup_file() {
    export BIG=$BATS_FILE_TMPDIR/big # 3.4 GB of trunk and experts that need no disk
    "$K3_BIN/k3-mkmodel" --released --layers 5 --experts 32 --sparse --out "$BIG" >/dev/null
}
run_() { "$ROOT/run/k3-run" "$@" --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&- 4>&-; }
teardown() {
    : >"$BATS_TEST_TMPDIR/stop"
    run_ down >/dev/null 2>&1 || true
    "$ROOT/run/k3-run" down --instance "$INSTANCE-2" >/dev/null 2>&1 || true
}
refused() { # refused PATTERN COMMAND...: exit 2, one line that says so
    local pattern=$1 status=0
    shift
    "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- 4>&- || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -qE -- "$pattern" "$BATS_TEST_TMPDIR/err"
}
plan() { "$K3_BIN/k3-plan" "$@"; }
# A machine of that many MB, with nothing else on it.
machine() { # machine MB
    local root=$BATS_TEST_TMPDIR/machine
    mkdir -p "$root/proc/self" "$root/shm"
    printf 'MemTotal: %d kB\nMemAvailable: %d kB\n' $(($1 * 1024)) $(($1 * 1024)) >"$root/proc/meminfo"
    MACHINE=(--root "$root" --shm-dir "$root/shm")
}

@test "the released shape runs in 2G with a context of 4096, and the plan says what it is made of" {
    plan --memory 2G --rate 3 >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    for part in 'trunk ring' 'trunk pinned' 'resident tensors' 'expert slots' state context 'row buffers' threads index \
        'page tables' programs; do
        grep -qE "^  $part +[0-9.]+ MB" "$BATS_TEST_TMPDIR/out"
    done
    awk '/^  [a-z]/ { v = ""; for (i = 1; i <= NF; i++) if ($i == "MB" && v == "") v = $(i - 1); if (/all together/) total = v; else sum += v }
         END { exit !(total <= 2147.5 && total > 0.95 * 2147.5 && sum > total - 2 && sum < total + 2) }' "$BATS_TEST_TMPDIR/out"
    grep -qE '^a token reads +1[23][0-9]\.[0-9]+ GB' "$BATS_TEST_TMPDIR/out"
    grep -qE '^limit +4[0-9]\.?[0-9]* s/token, by the drive: .* 3\.00 GB/s' "$BATS_TEST_TMPDIR/out"
    grep -q '^division  *trunk and experts share a device' "$BATS_TEST_TMPDIR/out"
    [ "$(plan --table | grep -c '^| [0-9]*G |')" -ge 10 ]
    plan --memory 2.5G --rate 3 | grep -q '; --memory is 2684\.4 MB$'
}

@test "budgets that cannot be: negative, zero, no numbers, larger than the machine, below the floor" {
    machine 16000
    refused '--memory -1: must be' plan --memory -1
    refused '--memory 0: must be' plan --memory 0
    refused '--memory lots: must be' plan --memory lots
    refused '--memory 1.5: must be .*1\.5G' plan --memory 1.5
    refused '--trunk-gb -3: must be' plan --trunk-gb -3
    refused '--trunk-gb 0: must be' plan --trunk-gb 0
    refused '--cache-gb nan: must be' plan --cache-gb nan
    refused '--memory of 64.00 GB is more than there is|--memory of 68.72 GB is more than there is: 16.78 GB are available' \
        plan "${MACHINE[@]}" --memory 64G
    refused 'takes 9[0-9]\.[0-9]+ GB, but 16.78 GB are available.*missing; what would fit: --trunk-gb 1[0-9]\.' \
        plan "${MACHINE[@]}" --trunk-gb 90
    refused '--memory 536.9 MB is [0-9.]+ MB less than the 1\.[0-9]+ GB .*what would fit: .*--memory 1[0-9]+M' \
        plan "${MACHINE[@]}" --memory 512M
    refused '--trunk-gb 0.1 .*give at least --trunk-gb 0\.26' plan "${MACHINE[@]}" --trunk-gb 0.1
    refused '--cache-gb 0.1: gives 5 slots.*give at least --cache-gb 0\.28' plan "${MACHINE[@]}" --cache-gb 0.1
    refused 'preset huge: there is no such preset; there are ultra, laptop, desktop' plan --preset huge
    refused 'takes 1[0-9]+\.[0-9]+ GB, but 16.78 GB are available' plan "${MACHINE[@]}" --preset server
    refused '--memory 512T: must be' run_ up --memory 512T
    refused 'more than there is' run_ up --memory 100000G
    refused '--memory 2M|less than the' run_ up --memory 2M
    refused '--memory-from disk: must be' run_ up --memory-from disk
    refused '--policy fifo: .*lru, lfru' run_ up --dry-run --policy fifo
    refused '--verify maybe: must be' run_ up --dry-run --verify maybe
    refused '--prefetch x' run_ up --dry-run --prefetch x
    refused '--threads 999: .*--force-threads' run_ up --dry-run --threads 999
    refused '--io-depth 999: .*256' run_ up --dry-run --io-depth 999
    refused '--io-block 63K: .*64K to 1G' run_ up --dry-run --io-block 63K
    nothing_left "$INSTANCE"
}

@test "one directory may serve trunk and experts" {
    local both=$BATS_TEST_TMPDIR/both
    mkdir "$both"
    cp "$DEMO"/*.safetensors "$both"
    run_ up --trunk-device "$both" --expert-device "$both" >"$BATS_TEST_TMPDIR/out"
    router --ids 1,2,3 --max-tokens 2 --json </dev/null | grep -q '"finish_reason":"length"'
    [ "$(find "/proc/$(pid_of k3-expertd)/fd" -lname "$both/*" | wc -l)" -gt 0 ]
    [ "$(find "/proc/$(pid_of k3-trunkd)/fd" -lname "$both/*" | wc -l)" -gt 0 ]
}

@test "what a refusal says would fit does fit" {
    machine 16000
    local hint try
    for try in '--memory 8G --trunk-gb 500' '--preset max' '--trunk-gb 50 --cache-gb 50' '--memory 60M --model'" $DEMO" \
        "--ctx 4000000 --memory 4G" "--memory 4G --ring-mb 16384"; do
        # shellcheck disable=SC2086
        run plan "${MACHINE[@]}" $try
        [ "$status" -eq 2 ]
        hint=$(sed 's/.*what would fit: //; s/, or .*//; s/ with / /' <<<"$output")
        echo "$try: $output"
        case $hint in
        *--memory*) plan "${MACHINE[@]}" ${try/--memory +([0-9])[MG]/} $hint ;;
        *) plan "${MACHINE[@]}" $try $hint ;;
        esac
    done
    # to the megabyte
    plan "${MACHINE[@]}" --model "$DEMO" --memory 60M 2>"$BATS_TEST_TMPDIR/err" || true
    hint=$(sed 's/.*what would fit: .*--memory \([0-9]*\)M.*/\1/' "$BATS_TEST_TMPDIR/err")
    plan "${MACHINE[@]}" --model "$DEMO" --memory "${hint}M" | grep -q '^  all together'
    refused 'less than the' plan "${MACHINE[@]}" --model "$DEMO" --memory $((hint - 1))M
}

@test "presets: listed, overridden, and with --memory the smaller binds" {
    run_ up --list-presets | grep -qE '^desktop +16 +10$'
    "$ROOT/run/k3-run" --list-presets --bin-dir "$K3_BIN" | grep -q '^auto '
    machine 64000
    plan "${MACHINE[@]}" --preset desktop | grep -q '^division  *preset desktop (16 GB trunk, 10 GB experts)'
    plan "${MACHINE[@]}" --preset desktop --cache-gb 4 --shell | grep -q '^cache-gb=4\.0'
    plan "${MACHINE[@]}" --preset desktop --cache-gb 4 --shell | grep -q '^trunk-gb=16\.0'
    plan "${MACHINE[@]}" --preset desktop --memory 8G | grep -q '^note  *--memory binds'
    plan "${MACHINE[@]}" --preset laptop --memory 48G | grep -q '^note  *the preset binds'
}

@test "control groups of every level count" {
    machine 64000
    local root=$BATS_TEST_TMPDIR/machine
    mkdir -p "$root/sys/fs/cgroup/app/k3"
    echo '0::/app/k3' >"$root/proc/self/cgroup"
    echo '31 25 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw' >"$root/proc/self/mountinfo"
    echo 8000000000 >"$root/sys/fs/cgroup/app/memory.max"
    echo 2000000000 >"$root/sys/fs/cgroup/app/memory.current"
    plan "${MACHINE[@]}" | grep -q '^available  *6000.0 MB (memory.max of /sys/fs/cgroup/app)'
    refused '6.00 GB are available .memory.max of /sys/fs/cgroup/app.' plan "${MACHINE[@]}" --memory 7G
}

@test "two plans at once: what one was promised the other does not get" {
    machine 16000
    local shm=$BATS_TEST_TMPDIR/machine/shm n
    for n in a b; do
        (
            exec 8<>"$shm/k3.$(id -u).$n.plan"
            status=0
            plan "${MACHINE[@]}" --instance $n --preset auto --shell --reserve-fd 8 >"$BATS_TEST_TMPDIR/$n" 2>&1 || status=$?
            echo $status >"$BATS_TEST_TMPDIR/$n.status"
            : >"$BATS_TEST_TMPDIR/$n.done"
            while [ ! -e "$BATS_TEST_TMPDIR/stop" ]; do sleep 0.05; done
        ) >/dev/null 2>&1 3>&- 4>&- &
    done
    until [ -e "$BATS_TEST_TMPDIR/a.done" ] && [ -e "$BATS_TEST_TMPDIR/b.done" ]; do sleep 0.05; done
    cat "$BATS_TEST_TMPDIR/a" "$BATS_TEST_TMPDIR/b"
    # One got nearly all, and the other cannot be had beside it.
    [ "$(cat "$BATS_TEST_TMPDIR"/?.status | sort | tr '\n' ' ')" = "0 2 " ]
    grep -hq 'promised to 1 other instance' "$BATS_TEST_TMPDIR/a" "$BATS_TEST_TMPDIR/b"
    # A third that asks for little is refused by the same count, until the two are gone.
    refused 'promised to 1 other instance' plan "${MACHINE[@]}" --instance c --memory 4G
    : >"$BATS_TEST_TMPDIR/stop"
    wait
    plan "${MACHINE[@]}" --instance c --memory 4G >/dev/null
}

@test "up prints the plan, reserves it, and down removes the reservation" {
    local file
    file=/dev/shm/k3.$(id -u).$INSTANCE.plan
    run_ up >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    head -1 "$BATS_TEST_TMPDIR/out" | grep -q "^plan of \"$INSTANCE\""
    grep -qE '^promised [0-9]+$' "$file"
    [ "$(stat -c %a "$file")" = 644 ]
    [ "$(awk '/promised/ { print ($2 < 200000000) }' "$file")" = 1 ]
    # the lock is the supervisor's alone
    for pid in $(pgrep -f -- "--instance $INSTANCE "); do
        [ -z "$(find "/proc/$pid/fd" -lname "$file" 2>/dev/null)" ] || [ "$pid" = "$(sed 's/.* //' "$(run_dir "$INSTANCE")/k3-run.lock")" ]
    done
    refute flock -n "$file" true
    run_ down
    nothing_left "$INSTANCE"
    refused 'numa-node 77' run_ up --numa-trunk 77 # a failed start
    nothing_left "$INSTANCE"
    refused 'less than the' run_ up --memory 2M
    nothing_left "$INSTANCE"
}

@test "dry run: the plan and nothing else; the commands have its budgets; nothing is reserved" {
    run_ up --dry-run --model "$BIG" --memory 1500M >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -q '^  trunk pinned ' "$BATS_TEST_TMPDIR/out"
    [ -z "$(grep 'k3-trunkd --' "$BATS_TEST_TMPDIR/out")" ]
    run_ up --commands --model "$BIG" --memory 1500M >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE 'k3-trunkd .*--trunk-gb [0-9.]+ .*--shared-drive' "$BATS_TEST_TMPDIR/out"
    grep -qE 'k3-expertd .*--cache-gb [0-9.]+' "$BATS_TEST_TMPDIR/out"
    grep -qE 'k3-computed .*--batch-rows [0-9]+ .*--requests-mb [0-9]+' "$BATS_TEST_TMPDIR/out"
    refute grep -q -- '--http' "$BATS_TEST_TMPDIR/out"
    run_ up --commands --model "$BIG" --memory 1500M --http 127.0.0.1:0 >"$BATS_TEST_TMPDIR/out"
    grep -qE 'k3-router .*--http 127.0.0.1:0 .*--http-mb 46' "$BATS_TEST_TMPDIR/out"
    run_ up --dry-run --model "$BIG" --memory 1500M --http 127.0.0.1:0 | grep -qE '^  server +48.2 MB$'
    nothing_left "$INSTANCE"
}

@test "what the options of k3-run become for the daemons" {
    run_ up --commands --model "$BIG" --trunk-device "$BIG" --verify off --numa-trunk 0 --numa-expert 1 --numa-compute 2 \
        --memory-from memfd --memory 1G >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE "k3-trunkd .*--device $BIG .*--verify off --memory-from memfd --numa-node 0" "$BATS_TEST_TMPDIR/out"
    grep -qE "k3-expertd .*--verify off --memory-from memfd --numa-node 1" "$BATS_TEST_TMPDIR/out"
    grep -qE "k3-computed .*--device $BIG .*--numa-node 2" "$BATS_TEST_TMPDIR/out"
    run_ up --commands --hugetlb | grep -qE 'k3-trunkd .*--memory-from hugetlb'
    refused 'two different ways' run_ up --hugetlb --memory-from shm
}

# Peak of everything in a control group of version 1, memory of the kernel included.
in_group() { # in_group LIMIT-BYTES COMMAND...
    local limit=$1
    shift
    [ -w /sys/fs/cgroup/memory/cgroup.procs ] || skip "no memory control group of version 1 to write to"
    GROUP=/sys/fs/cgroup/memory/$INSTANCE-$BATS_TEST_NUMBER
    mkdir -p "$GROUP"
    echo "$limit" >"$GROUP/memory.limit_in_bytes"
    bash -c 'echo $$ >"$0/cgroup.procs"; "$@"' "$GROUP" "$@" 3>&- 4>&-
}
group_gone() {
    local p i
    for p in $(cat "$GROUP/cgroup.procs"); do echo "$p" >/sys/fs/cgroup/memory/cgroup.procs || true; done
    for i in {1..50}; do rmdir "$GROUP" 2>/dev/null && return; sleep 0.1; done
}

@test "--memory is kept while each daemon is killed once, and used" {
    [ "$SLOW" -eq 1 ] || skip "a sanitizer takes memory of its own"
    in_group $((2500 << 20)) "$ROOT/run/k3-run" up --model "$BIG" --memory 1500M --instance "$INSTANCE" --bin-dir "$K3_BIN"
    local d
    for d in trunkd expertd computed; do
        kill -KILL "$(sed 's/.* //' "$(run_dir "$INSTANCE")/k3-$d.lock")"
        ctl wait --timeout 60
        in_group $((2500 << 20)) timeout 120 "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$BATS_TEST_TMPDIR/state" \
            --ids 1,2,3 --max-tokens 1 --json </dev/null | grep -q '"finish_reason":"length"'
    done
    local most fails
    most=$(cat "$GROUP/memory.max_usage_in_bytes") fails=$(cat "$GROUP/memory.failcnt")
    run_ down
    group_gone
    echo "most=$most fails=$fails"
    [ "$most" -le $((1500 << 20)) ]
    [ "$most" -ge $(((1500 << 20) * 85 / 100)) ]
    [ "$fails" -eq 0 ]
}

@test "two families started at once with auto: together they fit the machine" {
    [ "$SLOW" -eq 1 ] || skip "a sanitizer takes memory of its own"
    local limit=$((5 << 30)) most a=0 b=0
    in_group $limit bash -c '"$0" up --model "$1" --preset auto --instance "$2" --bin-dir "$3" >"$4/a" 2>&1 & p=$!
        "$0" up --model "$1" --preset auto --instance "$2-2" --bin-dir "$3" >"$4/b" 2>&1; b=$?; wait $p; echo $? $b >"$4/codes"' \
        "$ROOT/run/k3-run" "$BIG" "$INSTANCE" "$K3_BIN" "$BATS_TEST_TMPDIR"
    read -r a b <"$BATS_TEST_TMPDIR/codes"
    cat "$BATS_TEST_TMPDIR/a" "$BATS_TEST_TMPDIR/b"
    most=$(cat /dev/shm/k3."$(id -u)"."$INSTANCE"*.plan | awk '/promised/ { s += $2 } END { printf "%d\n", s }')
    echo "codes=$a,$b promised=$most"
    [ $((a + b)) -eq 0 ] || [ $((a + b)) -eq 2 ] # the second may find too little, and says so
    [ "$most" -gt 0 ]
    [ "$most" -le $limit ]
    run_ down
    "$ROOT/run/k3-run" down --instance "$INSTANCE-2"
    [ "$(cat "$GROUP/memory.failcnt")" -eq 0 ]
    group_gone
}
