#!/usr/bin/env bats
# The program against an independent float64 implementation, on random checkpoints of several shapes.  Seeds are chosen so
# that no choice (top-1, routing) hangs on rounding; compare.py refuses a seed where one does.
load ../proc/helpers

agree() { # agree NAME IDS STEPS BATCH-ROWS MKMODEL-OPTION...
    local name=$1 ids=$2 steps=$3 rows=$4
    shift 4
    [ -x /usr/bin/python3 ] && /usr/bin/python3 -c 'import numpy' || skip "no python3-numpy"
    "$K3_BIN/k3-mkmodel" "$@" --out "$BATS_TEST_TMPDIR/$name"
    /usr/bin/python3 "$ROOT/tests/reference/compare.py" "$K3_BUILD/probe/pass_probe" "$BATS_TEST_TMPDIR/$name" "$ids" "$steps" "$rows"
}

@test "formula model, 64 steps" {
    agree formula 5,17,63,2,90,41,8 64 64 --formula
}
@test "odd sizes, ragged batches of 3 rows, scattered tensors" {
    agree odd 1,2,3,4,5,6,7,8,9,10,11 64 3 --hidden 90 --layers 7 --vocab 211 --kda-heads 3 --kda-dim 17 --mla-heads 5 \
        --q-lora 37 --kv-lora 29 --qk-nope 11 --qk-rope 5 --v-dim 13 --experts 9 --top-k 3 --latent 32 --moe-inter 96 \
        --dense-inter 77 --res-block 2 --full-attn 2,5,7 --scatter --seed 14
}
@test "one layer, KDA and dense" {
    agree one 7,3,99,42 64 64 --hidden 64 --layers 1 --vocab 128 --kda-heads 2 --kda-dim 16 --mla-heads 2 --q-lora 16 \
        --kv-lora 16 --qk-nope 8 --qk-rope 4 --v-dim 8 --experts 4 --top-k 2 --latent 32 --moe-inter 32 --dense-inter 96 \
        --res-block 4 --full-attn none --seed 4
}
@test "MLA first, and all layers MoE" {
    agree mla 12,200,7,7,7,1,0 64 4 --hidden 96 --layers 6 --vocab 256 --kda-heads 4 --kda-dim 16 --mla-heads 3 --q-lora 48 \
        --kv-lora 32 --qk-nope 16 --qk-rope 8 --v-dim 24 --experts 16 --top-k 4 --latent 64 --moe-inter 64 --dense-inter 64 \
        --first-dense 0 --res-block 3 --full-attn 1,4,6 --seed 5
}
@test "top-k 1" {
    agree top1 3,1,4,1,5,9,2,6 64 5 --hidden 80 --layers 5 --vocab 300 --kda-heads 2 --kda-dim 24 --mla-heads 2 --q-lora 32 \
        --kv-lora 24 --qk-nope 12 --qk-rope 4 --v-dim 16 --experts 12 --top-k 1 --latent 64 --moe-inter 32 --dense-inter 100 \
        --res-block 3 --full-attn 4,5 --seed 6
}
@test "every expert chosen, no latent norm, weights not renormalised, f32 matrices, flat config" {
    agree all 250,1,2,3,77 64 64 --hidden 72 --layers 4 --vocab 256 --kda-heads 3 --kda-dim 8 --mla-heads 2 --q-lora 24 \
        --kv-lora 16 --qk-nope 12 --qk-rope 4 --v-dim 10 --experts 6 --top-k 6 --latent 32 --moe-inter 64 --dense-inter 80 \
        --res-block 2 --full-attn 3,4 --no-latent-norm --no-renormalize --routed-scale 0.5 --dtype f32 --flat --seed 8
}
@test "demo model, 64 steps" {
    [ -x /usr/bin/python3 ] && /usr/bin/python3 -c 'import numpy' || skip "no python3-numpy"
    /usr/bin/python3 "$ROOT/tests/reference/compare.py" "$K3_BUILD/probe/pass_probe" "$DEMO" 34,295,319,268,1055,262,392 20 4
}
