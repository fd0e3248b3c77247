#!/usr/bin/env bats
# k3-bench measures, so only its use is tested here; no test of this suite is timed.
load helpers

MODEL=$BATS_FILE_TMPDIR/model

setup_file() { # 70 MB: large enough to stream through a small ring
    "$K3_BIN/k3-mkmodel" --out "$BATS_FILE_TMPDIR/model" --layers 4 --experts 64 --hidden 512 --vocab 2048 --kda-heads 8 \
        --kda-dim 64 --mla-heads 4 --q-lora 128 --kv-lora 128 --qk-nope 32 --qk-rope 32 --v-dim 32 --dense-inter 4096 \
        --moe-inter 256 --latent 256 --top-k 4 --shared-experts 2 --first-dense 1 --full-attn 4 --res-block 2 --eos 2 \
        --bos 1 --pad 0 >&2
}
bench() { timeout $((120 * SLOW)) "$K3_BIN/k3-bench" "$@" 3>&-; }
left_nothing() {
    [ -z "$(find /dev/shm -maxdepth 1 -name "k3.$(id -u).bench-*")" ]
    [ -z "$(find "$(dirname "$(run_dir x)")" -maxdepth 1 -name 'bench-*' 2>/dev/null)" ]
}

@test "k3-bench refuses what it does not measure, by name" {
    run "$K3_BIN/k3-bench" disk
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *disk*kernels*pass*io*decode*sweep* ]]
}
refused() { # refused WORD OPTION...: exit 2 and one line with WORD, before anything is measured
    local word=$1
    shift
    run "$K3_BIN/k3-bench" "$@"
    echo "$output"
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *"$word"* ]]
}
@test "kernels run where the stack is small, and are refused where it is too small" {
    (ulimit -Ss 128; bench kernels --only bf16 --rows 64 --pairs 1 --weights-mb 16) >&2
    run bash -c "ulimit -s 128; exec '$K3_BIN/k3-bench' kernels --only bf16 --rows 64 --pairs 1 --weights-mb 16"
    [ "$status" -eq 2 ]
    [[ ${lines[0]} == *"128 KiB"*"1024 are needed"*"ulimit -Hs"* ]]
}
@test "kernels and pass refuse what they cannot measure, with what they can" {
    refused avx2 --kernels sse
    refused mxfp4 kernels --only fp8
    refused "1, 2, 3, 4, 8, 16, 64 or 512" kernels --rows 5
    refused --weights-mb kernels --weights-mb 1
    refused --weights-mb kernels --weights-mb 65536 # refused for the memory
    refused --pairs kernels --pairs 0
    refused avx2 pass --model "$MODEL" --kernels sse
    refused --rows pass --model "$MODEL" --rows 4 --decode
    refused "multiple of --sequences 3" pass --model "$MODEL" --rows 4 --sequences 3
    refused --force-threads pass --model "$MODEL" --threads 1024
    refused --force-threads kernels --threads 1024
    refused "from 1 to 4096" pass --model "$MODEL" --rows 4097
    refused "are needed" pass --model "$MODEL" --io-depth 2 --io-block 1M --decode --sequences 256 --prompt 1048576
    refused "No such file" pass --model "$BATS_TEST_TMPDIR/none"
    left_nothing
}
@test "kernels: every shape against its limit, and what is no matrix" {
    bench kernels --pairs 1 --rows 1 --weights-mb 16 >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    for cols in 1536 3584 6144 7168 12288 33792; do
        grep -qE "^bf16 +1 +$cols( +[0-9]+\.[0-9]){4} +(memory|FMA) +[0-9.]+ \([0-9.]+ to [0-9.]+\)$" "$BATS_TEST_TMPDIR/out"
    done
    for cols in 3072 3584; do
        grep -qE "^mxfp4 +1 +$cols( +[0-9]+\.[0-9]){4} +(memory|FMA) +[0-9.]+ \([0-9.]+ to [0-9.]+\)$" "$BATS_TEST_TMPDIR/out"
    done
    for op in 'KDA step' convolution attention 'RMS norm' 'attention residual' router SiTU; do
        grep -qE "^$op.* ns +[0-9.]+ GB/s +[0-9]+ +[0-9.]+ \(.*\) %$" "$BATS_TEST_TMPDIR/out"
    done
    [ "$(grep -cE '^drawing of 163840, (greedy|top-p and min-p) .* ns +- +1 +[0-9.]+ \(.*\) %$' "$BATS_TEST_TMPDIR/out")" -eq 2 ]
    grep -q '^share of a token: .*137 GB of weights; over 100 %' "$BATS_TEST_TMPDIR/out"
    bench kernels --pairs 1 --rows 8 --weights-mb 16 --only mxfp4 --kernels c >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -q '^c kernels' "$BATS_TEST_TMPDIR/out"
    [ "$(grep -cE '^mxfp4 +8 ' "$BATS_TEST_TMPDIR/out")" -eq 2 ]
    refute grep -qE '^(bf16|KDA)' "$BATS_TEST_TMPDIR/out"
}
@test "--force-threads: more threads than cores, where the part is told to" {
    local n=$(($(nproc) + 1))
    bench kernels --pairs 1 --rows 1 --weights-mb 16 --only mxfp4 --threads $n --force-threads | grep -q "kernels, $n threads"
    bench pass --model "$MODEL" --pairs 1 --threads $n --force-threads | grep -q "kernels, $n threads"
    bench decode --model "$MODEL" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K --seconds 0.1 --pairs 1 \
        --threads $n --force-threads | grep -q '^a pass '
    refused --force-threads decode --model "$MODEL" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K \
        --threads 1024
}
# The table of stages: each by its name, the shares of all sum to 100 %, the bytes and FLOP to those of the pass.
stages_add_up() {
    for stage in embedding 'attention residuals' 'norms and sums' 'attention projections' 'KDA recurrence' 'latent attention' \
        router 'shared experts, dense' 'routed experts' lm_head other 'waiting for the trunk' 'waiting for experts'; do
        grep -qE "^$stage +[0-9]+\.[0-9]+ +[0-9]+\.[0-9] %" "$1"
    done
    awk '/^stage / { on = 1; next } !on { next }
        { share = $0; sub(/ %.*/, "", share); sub(/.* /, "", share) }
        /^the pass/ { whole = share; exit }
        { sum += share }
        END { print sum, whole; exit !(sum > 99.99 && sum < 100.01 && whole + 0 == 100) }' "$1"
}
@test "pass: one row and many against the limit; every stage, and nothing is read meanwhile" {
    bench pass --model "$MODEL" --pairs 3 --tsv >"$BATS_TEST_TMPDIR/one"
    cat "$BATS_TEST_TMPDIR/one"
    grep -q '^1 row of 1 sequence after 16 positions' "$BATS_TEST_TMPDIR/one"
    grep -qE '^read from the drive +0 bytes$' "$BATS_TEST_TMPDIR/one"
    grep -qE '^a pass / its limit +[0-9.]+ \([0-9.]+ to [0-9.]+\)$' "$BATS_TEST_TMPDIR/one"
    grep -qE '^share of the FMA peak +[0-9.]+ \([0-9.]+ to [0-9.]+\)$' "$BATS_TEST_TMPDIR/one"
    stages_add_up "$BATS_TEST_TMPDIR/one"
    [ "$(grep -cE '^[123](	[0-9.]+){19}$' "$BATS_TEST_TMPDIR/one")" -eq 3 ]
    bench pass --model "$MODEL" --pairs 1 --rows 48 --sequences 3 --prompt 5 --kernels c >"$BATS_TEST_TMPDIR/many"
    cat "$BATS_TEST_TMPDIR/many"
    grep -q '^48 rows of 3 sequences after 5 positions; c kernels' "$BATS_TEST_TMPDIR/many"
    stages_add_up "$BATS_TEST_TMPDIR/many"
    bench pass --model "$MODEL" --pairs 1 --decode --sequences 2 --layers 1 >"$BATS_TEST_TMPDIR/dense" # no experts at all
    cat "$BATS_TEST_TMPDIR/dense"
    grep -q '^2 rows of 2 sequences after 16 positions' "$BATS_TEST_TMPDIR/dense"
    left_nothing
}
@test "a /dev/shm that is too small: the weights lie in memfds" {
    need_root
    cat >"$BATS_TEST_TMPDIR/both" <<'TEXT'
"$K3_BIN/k3-bench" pass --model "$1" --pairs 1 --io-depth 4 --io-block 256K || exit
"$K3_BIN/k3-bench" decode --model "$1" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K --seconds 0.1 --pairs 1 || exit
ls /dev/shm
TEXT
    mounted tmpfs size=8m /dev/shm bash "$BATS_TEST_TMPDIR/both" "$MODEL" >"$BATS_TEST_TMPDIR/out" 3>&-
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE '^read from the drive +0 bytes$' "$BATS_TEST_TMPDIR/out"
    grep -qE '^a pass +[0-9.]+ s +[0-9.]+ \([0-9.]+ to [0-9.]+\) of the larger' "$BATS_TEST_TMPDIR/out"
    refute grep -q '^k3\.' "$BATS_TEST_TMPDIR/out"
    left_nothing
}
@test "a drive is said to be measured only when it is" {
    local XDG_CACHE_HOME=$BATS_TEST_TMPDIR/cache
    export XDG_CACHE_HOME
    mkdir "$XDG_CACHE_HOME"
    "$K3_BIN/k3-mkmodel" --out "$BATS_TEST_TMPDIR/large" --layers 2 --hidden 1024 --vocab 20000 # 64 MiB can be measured
    for n in 1 2; do
        bench pass --model "$BATS_TEST_TMPDIR/large" --pairs 1 2>"$BATS_TEST_TMPDIR/err$n" >/dev/null
        cat "$BATS_TEST_TMPDIR/err$n"
    done
    grep -q 'measuring how many reads' "$BATS_TEST_TMPDIR/err1"
    [ -s "$XDG_CACHE_HOME/k3/devices" ] || skip "this drive cannot be measured"
    refute grep -q 'measuring how many reads' "$BATS_TEST_TMPDIR/err2"
}
@test "pass, io, decode and sweep name the model that they need, and how to make one" {
    for part in pass io decode sweep; do
        run "$K3_BIN/k3-bench" $part
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *--model*k3-mkmodel* ]]
    done
}
@test "io: raw, each daemon and both; what it starts is gone afterwards" {
    bench io --model "$MODEL" --trunk-gb 0.0042 --ring-mb 4 --io-depth 4 --io-block 256K --seconds 0.1 --pairs 2 --tsv \
        >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE '^k3-trunkd alone +[0-9.]+ GB/s  [0-9.]+ \([0-9.]+ to [0-9.]+\) of raw' "$BATS_TEST_TMPDIR/out"
    grep -qE '^both together .* of the better alone' "$BATS_TEST_TMPDIR/out"
    [ "$(grep -cE '^[12](\s[1-9][0-9]*){4}$' "$BATS_TEST_TMPDIR/out")" -eq 2 ]
    left_nothing
}
@test "io refuses a trunk that is too small to stream" {
    run bench io --model "$DEMO" --seconds 0.1 --pairs 1
    echo "$output"
    [ "$status" -eq 2 ]
    [[ $output == *"too small"* ]]
    [[ $output != *"give a smaller"* ]] # there is no block with which this would be a drive's rate
    left_nothing
}
@test "decode: passes are counted and compared with the limit, for spread and prefix pins" {
    for pins in spread prefix; do
        bench decode --model "$MODEL" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K --sequences 3 \
            --tokens 100 --seconds 0.1 --pairs 2 --pins $pins >"$BATS_TEST_TMPDIR/out"
        cat "$BATS_TEST_TMPDIR/out"
        grep -qE "^3 sequences, [0-9.]+ MB pinned of [0-9.]+ MB, pins $pins" "$BATS_TEST_TMPDIR/out"
        grep -qE '^a pass +[0-9.]+ s +[0-9.]+ \([0-9.]+ to [0-9.]+\) of the larger' "$BATS_TEST_TMPDIR/out"
    done
    left_nothing
}
@test "decode refuses to compare with reading where nothing is read, before it measures" {
    run bench decode --model "$MODEL" --trunk-gb 1 --io-depth 4 --io-block 256K --seconds 600
    echo "$output"
    [ "$status" -eq 2 ]
    [[ ${lines[-1]} == "k3-bench: with --trunk-gb 1 and --cache-gb 1 a pass reads nothing"*"give less --trunk-gb"* ]]
    left_nothing
    bench decode --model "$MODEL" --trunk-gb 1 --io-depth 4 --io-block 256K --sequences 2 --against 1 --pairs 1 |
        grep -qE '^tokens per second of 2 sequences / of 1: '
}
@test "decode: three sequences against one, in windows that alternate" {
    bench decode --model "$MODEL" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K --sequences 3 \
        --against 1 --tokens 40 --pairs 2 --tsv >"$BATS_TEST_TMPDIR/out"
    cat "$BATS_TEST_TMPDIR/out"
    grep -qE '^  3 sequences +[0-9.]+ ' "$BATS_TEST_TMPDIR/out"
    grep -qE '^  1 sequence +[0-9.]+ ' "$BATS_TEST_TMPDIR/out"
    grep -qE '^tokens per second of 3 sequences / of 1: [0-9.]+ \([0-9.]+ to [0-9.]+\), .* 2 alternating pairs$' "$BATS_TEST_TMPDIR/out"
    [ "$(grep -E '^[12](	[0-9.]+){8}$' "$BATS_TEST_TMPDIR/out" | cut -f 1,2 | tr '\n\t' ' :')" = "1:3 1:1 2:3 2:1 " ]
    left_nothing
}
@test "sweep: a line for each cell and round; a share that is too small says so" {
    bench sweep --model "$MODEL" --total-gb 0.05 --ladder 0.04 --repeats 2 --tokens 100 --ring-mb 8 --io-depth 4 \
        --io-block 256K --seconds 0.1 >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err"
    cat "$BATS_TEST_TMPDIR/out" "$BATS_TEST_TMPDIR/err"
    head -1 "$BATS_TEST_TMPDIR/out" | grep -q '^total_gb	trunk_share	repeat	tokens_per_s'
    [ "$(grep -cE '^0\.05	0\.[0-9]+	[12]	' "$BATS_TEST_TMPDIR/out")" -eq 6 ] # 0.25, 0.60, 0.86
    grep -qE '^# 0\.05	0\.10	-	.*--trunk-gb' "$BATS_TEST_TMPDIR/out"
    grep -qE '^# 0\.04	plan	[0-9.]+ ' "$BATS_TEST_TMPDIR/out"
    [ "$(grep -cE "^k3-bench: refused: 0\.05 GB, trunk's share 0\.10: --trunk-gb" "$BATS_TEST_TMPDIR/err")" -eq 1 ]
    left_nothing
}
@test "sweep: where every cell is refused, the reason once and exit 2" {
    run bench sweep --model "$MODEL" --total-gb 0.005 --ladder 0.004 --ring-mb 8 --io-depth 4 --io-block 256K
    echo "$output"
    [ "$status" -eq 2 ]
    [ "$(grep -c -- '--trunk-gb' <<<"$output")" -eq 1 ]
    [ "$(grep -c ': the same$' <<<"$output")" -eq 4 ]
    [ "${lines[-1]}" = "k3-bench: every cell was refused" ]
    refute grep -q '^#\|^total_gb' <<<"$output"
    refused "No such file" sweep --model "$BATS_TEST_TMPDIR/none"
}
@test "pass: a long one says how far it is, without a terminal too; stopped, it says so" {
    "$K3_BIN/k3-bench" pass --model "$MODEL" --io-depth 4 --io-block 256K --prompt 300000 >/dev/null 2>"$BATS_TEST_TMPDIR/err" 3>&- &
    pid=$!
    for _ in $(seq $((300 * SLOW))); do
        grep -q ', layer ' "$BATS_TEST_TMPDIR/err" && break
        sleep 0.1
    done
    kill -INT $pid
    status=0
    wait $pid || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 1 ]
    grep -qE '^k3-bench: sequence 1 of 1: position [0-9]+ of 300000, layer [1-4] of 4$' "$BATS_TEST_TMPDIR/err"
    [ "$(tail -1 "$BATS_TEST_TMPDIR/err")" = "k3-bench: stopped by SIGINT" ]
    left_nothing
}
stopped_by() { # stopped_by SIGNAL: a run of decode is ended by it, and puts all away
    "$K3_BIN/k3-bench" decode --model "$MODEL" --trunk-gb 0.03 --ring-mb 4 --cache-gb 0.02 --io-depth 4 --io-block 256K \
        --tokens 50 --seconds 30 --pairs 9 >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
    pid=$!
    for _ in $(seq $((1500 * SLOW))); do
        [ "$(K3_BIN=$K3_BIN "$K3_BIN/k3ctl" --instance "bench-$pid" ping computed 2>/dev/null | grep -c ready)" -eq 1 ] && break
        sleep 0.02
    done
    kill -"$1" $pid
    status=0
    wait $pid || status=$?
    [ "$status" -eq 1 ]
    [ "$(tail -1 "$BATS_TEST_TMPDIR/err")" = "k3-bench: stopped by SIG$1" ]
    left_nothing
}
@test "an interrupt ends the benchmark and what it started" {
    stopped_by INT
}
@test "a terminal that goes away ends the benchmark and what it started" {
    stopped_by HUP
}
@test "a result that cannot be written is a failure" {
    for part in '--help' 'kernels --only bf16 --rows 1 --pairs 1 --weights-mb 16'; do
        status=0
        bench $part >/dev/full 2>"$BATS_TEST_TMPDIR/err" || status=$?
        [ $status -eq 1 ]
        grep -q 'the result could not be written' "$BATS_TEST_TMPDIR/err"
    done
    status=0
    { bench pass --model "$MODEL" --pairs 1 2>"$BATS_TEST_TMPDIR/err" || echo $? >"$BATS_TEST_TMPDIR/status"; } | true
    [ "$(cat "$BATS_TEST_TMPDIR/status")" = 1 ]
    grep -q 'the result could not be written' "$BATS_TEST_TMPDIR/err"
    left_nothing
}
