#!/usr/bin/env bats
# The promise of the numeric contract through real daemons: one prompt, one set of logits, whatever the settings.
load helpers

PROMPT=11,7,503,90,41,8,1999,64,3,77,1200,5,5,5,900,31,17,63,2,90,1041,8,333,12,1,0,2047,600,601,602,45,46,47,48,49,50,51,52,53,54

setup_file() {
    "$K3_BIN/k3-mkmodel" --hidden 640 --layers 8 --vocab 2048 --kda-heads 5 --kda-dim 64 --mla-heads 5 --q-lora 192 \
        --kv-lora 128 --qk-nope 48 --qk-rope 16 --v-dim 64 --experts 48 --top-k 4 --latent 320 --moe-inter 320 --dense-inter 1536 \
        --res-block 3 --full-attn 4,7,8 --seed 11 --out "$BATS_FILE_TMPDIR/model"
    [ "$(du -sm "$BATS_FILE_TMPDIR/model" | cut -f1)" -ge 80 ]
    base=(--model "$BATS_FILE_TMPDIR/model" --ctx 128)
    up "${base[@]}" --ring-mb 64 --trunk-gb 0.0672 --cache-gb 1 --threads 2
    router --ids "$PROMPT" --max-tokens 8 --json --logits "$BATS_FILE_TMPDIR/base.f32" >"$BATS_FILE_TMPDIR/base.json" </dev/null
    jq -c .generated_ids "$BATS_FILE_TMPDIR/base.json" >"$BATS_FILE_TMPDIR/base.ids"
    down
}
teardown() { down; }

model() { echo "$BATS_FILE_TMPDIR/model"; }
# Runs the prompt on the family that is up and compares logits and tokens with the first run.
same() {
    router --ids "$PROMPT" --max-tokens 8 --json --logits "$BATS_TEST_TMPDIR/l.f32" >"$BATS_TEST_TMPDIR/o.json" </dev/null
    [ "$(stat -c %s "$BATS_TEST_TMPDIR/l.f32")" -eq $((2048 * 4)) ]
    cmp "$BATS_FILE_TMPDIR/base.f32" "$BATS_TEST_TMPDIR/l.f32"
    [ "$(jq -c .generated_ids "$BATS_TEST_TMPDIR/o.json")" = "$(cat "$BATS_FILE_TMPDIR/base.ids")" ]
}

@test "the base run gave eight tokens and logits that are not all equal" {
    [ "$(jq '.generated_ids | length' "$BATS_FILE_TMPDIR/base.json")" -eq 8 ]
    [ "$(od -An -v -tx4 -w4 "$BATS_FILE_TMPDIR/base.f32" | sort -u | wc -l)" -gt 1000 ]
}
@test "ring of 2 MiB, nothing pinned: the ring wraps, the bits stay" {
    up --model "$(model)" --ctx 128 --ring-mb 2 --trunk-gb 0.0021 --cache-gb 1
    same
    [ "$(stat_of k3-trunkd ring_wraps)" -ge 20 ]
    [ "$(stat_of k3-trunkd pinned_bytes)" -eq 0 ]
}
@test "half of the trunk pinned: both sources are used" {
    up --model "$(model)" --ctx 128 --ring-mb 2 --trunk-gb 0.030 --cache-gb 1
    same
    [ "$(stat_of k3-computed ring_row_bytes)" -gt 10000000 ]
    [ "$(stat_of k3-computed pinned_row_bytes)" -gt 10000000 ]
}
@test "all of the trunk pinned: the ring is not used" {
    up --model "$(model)" --ctx 128 --ring-mb 2 --trunk-gb 1 --cache-gb 1
    same
    [ "$(stat_of k3-computed ring_row_bytes)" -eq 0 ]
    [ "$(stat_of k3-computed pinned_row_bytes)" -gt 10000000 ]
}
@test "the smallest arena: experts are evicted all the time" {
    up --model "$(model)" --ctx 128 --ring-mb 64 --cache-gb 0.0009
    same
    [ "$(stat_of k3-expertd slots)" -lt 8 ]
    [ "$(stat_of k3-expertd evictions)" -gt 100 ]
}
@test "policy lfru in a small arena: other experts are evicted, the bits stay" {
    for policy in lru lfru; do
        up --model "$(model)" --ctx 128 --ring-mb 64 --cache-gb 0.0135 --policy "$policy"
        [ "$(ctl info k3-expertd --json | jq -r '.. | .policy? // empty')" = "$policy" ]
        same
        [ "$(stat_of k3-expertd evictions)" -gt 100 ]
        stat_of k3-expertd hits >"$BATS_TEST_TMPDIR/$policy"
        down
    done
    cat "$BATS_TEST_TMPDIR/lru" "$BATS_TEST_TMPDIR/lfru"
    refute cmp "$BATS_TEST_TMPDIR/lru" "$BATS_TEST_TMPDIR/lfru"
}
@test "all experts resident; a second run on warm daemons" {
    up --model "$(model)" --ctx 128 --ring-mb 64 --cache-gb 1
    same
    same
    [ "$(stat_of k3-expertd evictions)" -eq 0 ]
    [ "$(stat_of k3-expertd hits)" -gt 0 ]
}
@test "one thread" {
    up --model "$(model)" --ctx 128 --threads 1
    same
}
@test "two threads" {
    up --model "$(model)" --ctx 128 --threads 2 --force-threads
    same
}
@test "three threads, more than there are cores here" {
    up --model "$(model)" --ctx 128 --threads 3 --force-threads
    same
}
@test "plain C kernels" {
    up --model "$(model)" --ctx 128 --kernels c
    same
}
@test "AVX2 kernels" {
    grep -qw avx2 /proc/cpuinfo || skip "no AVX2 here"
    up --model "$(model)" --ctx 128 --kernels avx2
    same
}
@test "AVX-512 kernels" {
    grep -qw avx512dq /proc/cpuinfo || skip "no AVX-512 here"
    up --model "$(model)" --ctx 128 --kernels avx512
    same
}
@test "passes of 1 row" {
    up --model "$(model)" --ctx 128 --batch-rows 1
    same
}
@test "passes of 7 rows" {
    up --model "$(model)" --ctx 128 --batch-rows 7
    same
}
@test "passes of 64 rows" {
    up --model "$(model)" --ctx 128 --batch-rows 64
    same
}
@test "beside three other sequences" {
    up --model "$(model)" --ctx 128 --sequences 4 --batch-rows 16
    for i in 1 2 3; do
        router --ids "$i,$((i * 7)),$((i * 100)),4,5,6,7,8,9,10,11,$i" --max-tokens 40 --json </dev/null >/dev/null &
    done
    same
    [ "$(stat_of k3-computed sequences_most)" -ge 2 ]
    wait
}
@test "the worst of everything at once: 2 MiB ring, smallest arena, 3 threads, 7 rows, AVX2, company" {
    grep -qw avx2 /proc/cpuinfo || skip "no AVX2 here"
    up --model "$(model)" --ctx 128 --ring-mb 2 --trunk-gb 0.02 --cache-gb 0.0009 --threads 3 --force-threads \
        --batch-rows 7 --kernels avx2 --sequences 3
    for i in 1 2; do
        router --ids "$i,$((i * 7)),4,5,6,7" --max-tokens 30 --json </dev/null >/dev/null &
    done
    same
    wait
}
