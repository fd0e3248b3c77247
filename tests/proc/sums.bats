#!/usr/bin/env bats
# k3.sums: k3ctl verify makes it and checks with it, without any daemon.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/m"
    "$K3_BIN/k3-mkmodel" --formula --scatter --seed 2 --out "$BATS_FILE_TMPDIR/other"
}
setup() {
    M=$BATS_TEST_TMPDIR/m
    cp -r "$BATS_FILE_TMPDIR/m" "$M"
    OUT=$BATS_TEST_TMPDIR/out ERR=$BATS_TEST_TMPDIR/err
}
verify() { # verify STATUS OPTION...
    local want=$1 status=0
    shift
    timeout $((60 * SLOW)) "$K3_BIN/k3ctl" --instance "$INSTANCE" verify "$@" >"$OUT" 2>"$ERR" 3>&- || status=$?
    cat "$OUT" "$ERR"
    [ "$status" -eq "$want" ] || { echo "status $status, not $want"; return 1; }
}
refused() { # refused PATTERN... -- OPTION...: 2, one line
    local patterns=() p
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    shift
    verify 2 "$@"
    [ "$(wc -l <"$ERR")" -eq 1 ]
    [ ! -s "$OUT" ]
    for p in "${patterns[@]}"; do grep -qF -- "$p" "$ERR" || { echo "no $p"; return 1; }; done
}
flip() { # flip FILE OFFSET: one bit
    python3 - "$1" "$2" <<'END'
import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2]))
    b = f.read(1)[0]
    f.seek(int(sys.argv[2]))
    f.write(bytes([b ^ 4]))
END
}
place() { # place TENSOR: sets file and off of the tensor whose name ends so
    read -r file off < <(python3 - "$M" "$1" <<'END'
import glob, json, struct, sys
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        for name, t in json.loads(f.read(n)).items():
            if name.endswith(sys.argv[2]):
                print(path, 8 + n + t["data_offsets"][0])
END
)
    [ -n "$file" ]
}

@test "made, checked, and every flipped byte is named by file and offset" {
    verify 0 --model "$M" --make
    [ ! -e "$M/k3.sums.part" ]
    verify 0 --model "$M"
    grep -q "104 trunk pieces.*56 experts" "$OUT"
    for tensor in layers.3.self_attn.o_proj.weight layers.3.input_layernorm.weight layers.2.block_sparse_moe.experts.5.w2.weight_scale \
        embed_tokens.weight lm_head.weight; do
        place "$tensor"
        flip "$file" $((off + 3))
        verify 4 --model "$M"
        [ "$(wc -l <"$OUT")" -eq 1 ]
        grep -qF "bad: $file at " "$OUT"
        case $tensor in *w2*) ;; *) grep -qF "bad: $file at $off " "$OUT" ;; esac
        [ "$(wc -l <"$ERR")" -eq 1 ]
        grep -qF "1 of 262 parts" "$ERR"
        grep -qF "$file at" "$ERR"
        flip "$file" $((off + 3))
    done
    verify 0 --model "$M"
    # two at once: both are named
    place layers.3.self_attn.o_proj.weight
    flip "$file" "$off"
    place layers.4.input_layernorm.weight
    flip "$file" "$off"
    verify 4 --model "$M"
    [ "$(grep -c '^bad: ' "$OUT")" -eq 2 ]
    grep -qF "2 of 262 parts" "$ERR"
}
@test "a part of the layers, by the sums of all" {
    verify 0 --model "$M" --make
    verify 0 --model "$M" --layers 3
    place layers.5.self_attn.o_proj.weight
    flip "$file" "$off"
    verify 0 --model "$M" --layers 3
    verify 4 --model "$M"
    # of some layers, for all
    verify 0 --model "$M" --layers 3 --make --replace
    refused "covers 3 layers, 8 are to run" "--make" -- --model "$M"
}
@test "going on where an earlier run was stopped" {
    verify 0 --model "$M" --make
    cp "$M/k3.sums" "$BATS_TEST_TMPDIR/whole"
    head -c 4321 "$M/k3.sums" >"$M/k3.sums.part"
    rm "$M/k3.sums"
    verify 0 --model "$M" --make
    grep -q "going on from there" "$ERR"
    cmp "$M/k3.sums" "$BATS_TEST_TMPDIR/whole"
    # Not when a shard was written since.
    head -c 4321 "$BATS_TEST_TMPDIR/whole" >"$M/k3.sums.part"
    touch -d "10 seconds ago" "$M/k3.sums.part"
    touch "$M/model-00003-of-000009.safetensors"
    verify 0 --model "$M" --make --replace
    refute grep -q "going on" "$ERR"
    cmp "$M/k3.sums" "$BATS_TEST_TMPDIR/whole"
    # Nor from what another model or version left.
    sed '2s/model ./model x/' "$BATS_TEST_TMPDIR/whole" | head -c 4321 >"$M/k3.sums.part"
    verify 0 --model "$M" --make --replace
    refute grep -q "going on" "$ERR"
    cmp "$M/k3.sums" "$BATS_TEST_TMPDIR/whole"
}
@test "a shard that is written while it is read: no sums" {
    place lm_head.weight
    python3 -c 'import os, sys
n = 10**18
while True:
    n += 1
    os.utime(sys.argv[1], ns=(n, n))' "$file" 3>&- &
    toucher=$!
    until [ "$(stat -c %Y "$file")" -eq 1000000000 ]; do sleep 0.01; done
    verify 4 --model "$M" --make || { kill $toucher; return 1; }
    kill $toucher
    grep -q "was written while it was read" "$ERR"
    [ ! -e "$M/k3.sums" ]
    wait $toucher || true
    verify 0 --model "$M" --make
    refute grep -q "going on" "$ERR"
}
@test "only one writes at a time" {
    : >"$M/k3.sums.part"
    exec 8<"$M/k3.sums.part"
    flock -n 8
    refused "k3.sums.part" "another k3ctl verify" -- --model "$M" --make
    exec 8<&-
    verify 0 --model "$M" --make
}
@test "sums that are there are not made anew unasked: what is damaged would become right" {
    verify 0 --model "$M" --make
    cp "$M/k3.sums" "$BATS_TEST_TMPDIR/good"
    place layers.3.self_attn.o_proj.weight
    flip "$file" "$off"
    refused "$M/k3.sums is there already" "--replace" -- --model "$M" --make
    cmp "$M/k3.sums" "$BATS_TEST_TMPDIR/good"
    verify 4 --model "$M"
    refused "--replace goes with" -- --model "$M" --replace
    verify 0 --model "$M" --make --replace
    verify 0 --model "$M"
}
@test "no sums, sums of another model, damaged ones, not a file" {
    refused "$M/k3.sums is not there" "--make" -- --model "$M"
    verify 0 --model "$BATS_FILE_TMPDIR/other" --make
    cp "$BATS_FILE_TMPDIR/other/k3.sums" "$M/k3.sums"
    refused "$M/k3.sums" "another model" "--make" -- --model "$M"
    verify 0 --model "$M" --make --replace
    sed -i '7s/.$/x/' "$M/k3.sums"
    refused "$M/k3.sums line 7" "--make" -- --model "$M"
    verify 0 --model "$M" --make --replace
    sed -i '9d' "$M/k3.sums"
    refused "$M/k3.sums line 9" -- --model "$M"
    : >"$M/k3.sums"
    refused "$M/k3.sums line 1" -- --model "$M"
    rm "$M/k3.sums"
    mkfifo "$M/k3.sums"
    refused "$M/k3.sums" "regular" -- --model "$M"
}
@test "options: a model, or an instance that runs; nothing else's" {
    verify 3
    grep -q "is not running.*give the checkpoint with --model DIR" "$ERR"
    refused "nowhere" -- --model "$M/nowhere"
    refused "does not take --json" -- --model "$M" --json
    refused "unexpected \"k3-trunkd\"" -- k3-trunkd
    run "$K3_BIN/k3ctl" --instance "$INSTANCE" ping --make
    [ "$status" -eq 2 ]
    chmod 500 "$M"
    [ "$(id -u)" -eq 0 ] || refused "$M/k3.sums.part" "Permission denied" -- --model "$M" --make
    chmod 700 "$M"
}
@test "a shard that ends early is named" {
    verify 0 --model "$M" --make
    mkdir "$BATS_TEST_TMPDIR/dev"
    place lm_head.weight
    truncate -s -10 "$file"
    verify 2 --model "$M"
    grep -qF "$file" "$ERR"
}
