#!/usr/bin/env bats
# k3-pack: a packed trunk gives the same answers as the shards; what may go wrong with one is refused by name.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/m"
    "$K3_BIN/k3-mkmodel" --formula --scatter --seed 2 --out "$BATS_FILE_TMPDIR/other"
}
setup() {
    M=$BATS_FILE_TMPDIR/m OUT=$BATS_TEST_TMPDIR/out ERR=$BATS_TEST_TMPDIR/err D=$BATS_TEST_TMPDIR/dev
    mkdir "$D"
}
teardown() {
    down
    nothing_left "$INSTANCE"
}
pack() { # pack STATUS OPTION...
    local want=$1 status=0
    shift
    timeout $((60 * SLOW)) "$K3_BIN/k3-pack" "$@" >"$OUT" 2>"$ERR" 3>&- || status=$?
    cat "$OUT" "$ERR"
    [ "$status" -eq "$want" ] || { echo "status $status, not $want"; return 1; }
}
has() { # has FILE PATTERN...: in its one line
    local file=$1 p
    shift
    [ "$(wc -l <"$file")" -eq 1 ]
    for p in "$@"; do grep -qF -- "$p" "$file" || { echo "no $p"; return 1; }; done
}
refuses() { # refuses PROGRAM OPTION... -- PATTERN...: 2, one line
    local options=() status=0
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    timeout $((20 * SLOW)) "$K3_BIN/${options[0]}" --instance "$INSTANCE" --log-level error "${options[@]:1}" 2>"$ERR" 3>&- || status=$?
    cat "$ERR"
    [ "$status" -eq 2 ]
    has "$ERR" "$@"
}
flip() { # flip FILE OFFSET: one bit
    python3 -c 'import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2])); b = f.read(1)[0]; f.seek(int(sys.argv[2])); f.write(bytes([b ^ 4]))' "$1" "$2"
}
logits() { router --ids 1,2,3,4,5,6,7 --max-tokens 6 --logits "$1" --json </dev/null | jq -c .generated_ids; }

@test "packed or not, streamed or pinned, the same bits" {
    for model in "$M" "$BATS_FILE_TMPDIR/other"; do
        rm -rf "$D"/*
        pack 0 --model "$model" --out "$D"
        [ "$(ls "$D")" = trunk.k3pack ]
        up --model "$model" --ring-mb 2 --trunk-gb 0.0021
        want=$(logits "$BATS_TEST_TMPDIR/want")
        digest=$(ctl info k3-computed --json | jq -r '.. | objects | select(has("model_digest")) | .model_digest' | head -1)
        down
        for budget in "--ring-mb 2 --trunk-gb 0.0021" "--trunk-gb 0.01"; do
            up --model "$model" --trunk-device "$D" $budget
            [ "$(logits "$BATS_TEST_TMPDIR/got")" = "$want" ]
            cmp "$BATS_TEST_TMPDIR/want" "$BATS_TEST_TMPDIR/got"
            [ "$(ctl info k3-computed --json | jq -r '.. | objects | select(has("model_digest")) | .model_digest' | head -1)" = "$digest" ]
            # The trunk comes from there and from nowhere else; it is compared with the sums that the pack has.
            trunkd=$(pid_of k3-trunkd)
            [ "$(find "/proc/$trunkd/fd" -lname "*/trunk.k3pack" | wc -l)" -eq 1 ]
            [ "$(find "/proc/$trunkd/fd" -lname "*.safetensors" | wc -l)" -eq 0 ]
            [ "$(stat_of k3-trunkd verified_bytes)" -gt 0 ]
            [ "$(stat_of k3-trunkd verify_failures)" = 0 ]
            kill -KILL "$trunkd" "$(pid_of k3-computed)"
            ctl wait
            [ "$(logits "$BATS_TEST_TMPDIR/got")" = "$want" ]
            cmp "$BATS_TEST_TMPDIR/want" "$BATS_TEST_TMPDIR/got"
            down
        done
    done
}
@test "a pack of all layers serves fewer; of fewer, not more" {
    pack 0 --model "$M" --out "$D"
    up --model "$M" --layers 4
    want=$(logits "$BATS_TEST_TMPDIR/want")
    down
    up --model "$M" --layers 4 --trunk-device "$D"
    [ "$(logits "$BATS_TEST_TMPDIR/got")" = "$want" ]
    cmp "$BATS_TEST_TMPDIR/want" "$BATS_TEST_TMPDIR/got"
    down
    rm "$D/trunk.k3pack"
    pack 0 --model "$M" --layers 4 --out "$D"
    refuses k3-trunkd --model "$M" --device "$D" -- "$D/trunk.k3pack" "4 layers" "8 are to run"
}
@test "a flipped byte of a packed piece is found, and named" {
    pack 0 --model "$M" --out "$D"
    off=$(($(stat -c %s "$D/trunk.k3pack") - 5000))
    flip "$D/trunk.k3pack" "$off"
    up --model "$M" --trunk-device "$D"
    status=0
    router --ids 1,2,3 --max-tokens 2 --json </dev/null 2>"$ERR" || status=$?
    cat "$ERR"
    [ "$status" -eq 4 ]
    grep -q "$D/trunk.k3pack at offset [0-9]*.*checksum" "$ERR"
    ctl ping
}
@test "of another model, truncated, half-written, damaged: refused by both" {
    pack 0 --model "$M" --out "$D"
    cp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
    for program in k3-trunkd k3-computed; do
        cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack"
        refuses $program --model "$BATS_FILE_TMPDIR/other" --device "$D" -- "$D/trunk.k3pack" "another model" "k3-pack"
        truncate -s -4096 "$D/trunk.k3pack"
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "truncated" "$(stat -c %s "$BATS_TEST_TMPDIR/good")" "k3-pack"
        head -c 1000 "$BATS_TEST_TMPDIR/good" >"$D/trunk.k3pack"
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "1000 bytes" "truncated" "k3-pack"
        : >"$D/trunk.k3pack"
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "0 bytes"
        cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack"
        flip "$D/trunk.k3pack" 40
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "damaged header"
        cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack"
        flip "$D/trunk.k3pack" 1000
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "damaged table"
        rm "$D/trunk.k3pack"
        mkfifo "$D/trunk.k3pack"
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack" "regular"
        rm "$D/trunk.k3pack"
        cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack.part"
        refuses $program --model "$M" --device "$D" -- "$D/trunk.k3pack.part" "half-written" "k3-pack --model $M --out $D"
        rm "$D/trunk.k3pack.part"
    done
    # k3-run says it, too
    cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack"
    truncate -s -4096 "$D/trunk.k3pack"
    status=0
    up --model "$M" --trunk-device "$D" 2>"$ERR" || status=$?
    cat "$ERR"
    [ "$status" -eq 2 ]
    grep -qF "$D/trunk.k3pack" "$ERR"
}
@test "a half-written one beside shards is nobody's business" {
    cp "$M"/*.safetensors "$D"
    : >"$D/trunk.k3pack.part"
    up --model "$M" --trunk-device "$D"
    logits "$BATS_TEST_TMPDIR/got"
}
@test "no room: what is needed, what there is, nothing left behind" {
    unshare -m true 2>/dev/null || skip "needs the right to make a mount namespace"
    cat >"$BATS_TEST_TMPDIR/small" <<END
mount -t tmpfs -o size=256K tmpfs "$D" || exit 77
"$K3_BIN/k3-pack" --model "$M" --out "$D"
status=\$?
ls -A "$D" >"$BATS_TEST_TMPDIR/left"
exit \$status
END
    status=0
    unshare -m sh "$BATS_TEST_TMPDIR/small" >"$OUT" 2>"$ERR" || status=$?
    [ "$status" -ne 77 ] || skip "may not mount a tmpfs"
    cat "$ERR"
    [ "$status" -eq 2 ]
    has "$ERR" "839680 bytes" "262144 bytes" "$D"
    [ ! -s "$BATS_TEST_TMPDIR/left" ]
}
@test "a limit of the file size: refused in words, nothing left behind" {
    status=0
    (ulimit -f 200; exec "$K3_BIN/k3-pack" --model "$M" --out "$D") >"$OUT" 2>"$ERR" || status=$?
    cat "$ERR"
    [ "$status" -eq 2 ]
    has "$ERR" "839680 bytes" "File too large"
    [ -z "$(ls -A "$D")" ]
}
@test "stopped and gone on with; complete; one at a time" {
    pack 0 --model "$M" --out "$D"
    cp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
    pack 0 --model "$M" --out "$D"
    has "$OUT" "complete already"
    mv "$D/trunk.k3pack" "$D/trunk.k3pack.part" # all written, and stopped before it got its name
    flip "$D/trunk.k3pack.part" 700000
    pack 0 --model "$M" --out "$D"
    grep -q "going on from there" "$ERR"
    cmp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
    mv "$D/trunk.k3pack" "$D/trunk.k3pack.part"
    exec 8<"$D/trunk.k3pack.part"
    flock -n 8
    pack 2 --model "$M" --out "$D"
    has "$ERR" "another k3-pack"
    exec 8<&-
    cp "$BATS_TEST_TMPDIR/good" "$D/trunk.k3pack"
    pack 2 --model "$BATS_FILE_TMPDIR/other" --out "$D"
    has "$ERR" "$D/trunk.k3pack" "another model"
    cmp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
}
@test "a checkpoint that contradicts its sums is not packed" {
    cp -r "$M" "$BATS_TEST_TMPDIR/m"
    M=$BATS_TEST_TMPDIR/m
    "$K3_BIN/k3ctl" verify --model "$M" --make
    pack 0 --model "$M" --out "$D"
    has "$OUT" "equal to k3.sums"
    rm "$D/trunk.k3pack"
    S=$M/model-00003-of-000009.safetensors
    n=$(stat -c %s "$S")
    off=$(python3 -c '
import json, struct, sys
with open(sys.argv[1], "rb") as f:
    n = struct.unpack("<Q", f.read(8))[0]
    print(8 + n + next(t["data_offsets"][0] for k, t in json.loads(f.read(n)).items() if k.endswith("o_proj.weight")))' "$S")
    flip "$S" $((off + 9))
    pack 4 --model "$M" --out "$D"
    has "$ERR" "$S at $off" "k3.sums says" "$D/trunk.k3pack.part"
    [ ! -e "$D/trunk.k3pack" ]
    flip "$S" $((off + 9))
    pack 0 --model "$M" --out "$D"
    # sums of another model
    rm "$D/trunk.k3pack"
    "$K3_BIN/k3ctl" verify --model "$BATS_FILE_TMPDIR/other" --make
    cp "$BATS_FILE_TMPDIR/other/k3.sums" "$M/k3.sums"
    rm "$BATS_FILE_TMPDIR/other/k3.sums"
    pack 2 --model "$M" --out "$D"
    has "$ERR" "$M/k3.sums" "another model"
}
@test "options" {
    mkfifo "$D/trunk.k3pack.part"
    pack 2 --model "$M" --out "$D"
    has "$ERR" "$D/trunk.k3pack.part" "regular"
    rm "$D/trunk.k3pack.part"
    pack 2 --model "$M"
    has "$ERR" "--out DIR is needed"
    pack 2 --out "$D"
    has "$ERR" "--model DIR is needed"
    pack 2 --model "$M" --out "$D/nowhere"
    has "$ERR" "--out $D/nowhere" "directory"
    pack 2 --model "$D" --out "$D"
    has "$ERR" "$D/config.json"
    pack 0 --help
}
@test "of another model of the same shape: refused by the family and not taken for complete, with sums and without" {
    twin=$BATS_TEST_TMPDIR/twin
    cp -r "$M" "$twin"
    python3 - "$twin" <<'END'
import glob, struct, sys
for path in glob.glob(sys.argv[1] + "/*.safetensors"): # other weights: the last bit of every byte turns
    with open(path, "r+b") as f:
        n = 8 + struct.unpack("<Q", f.read(8))[0]
        f.seek(n)
        data = bytearray(f.read())
        for i in range(0, len(data)):
            data[i] ^= 1
        f.seek(n)
        f.write(data)
END
    pack 0 --model "$M" --out "$D"
    cp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
    for sums in no yes; do
        [ $sums = no ] || "$K3_BIN/k3ctl" verify --model "$twin" --make
        refuses k3-trunkd --model "$twin" --device "$D" -- "$D/trunk.k3pack" "another model of the same shape" "pack it anew"
        pack 2 --model "$twin" --out "$D"
        has "$ERR" "$D/trunk.k3pack" "another model of the same shape"
    done
    status=0
    up --model "$twin" --trunk-device "$D" 2>"$ERR" || status=$?
    [ "$status" -eq 2 ]
    # What an earlier run copied of the other model is not gone on with.
    rm "$twin/k3.sums"
    mv "$D/trunk.k3pack" "$D/trunk.k3pack.part"
    pack 0 --model "$twin" --out "$D"
    grep -q "begun anew" "$ERR"
    refute cmp -s "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/good"
    mv "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/second"
    pack 0 --model "$twin" --out "$D"
    cmp "$D/trunk.k3pack" "$BATS_TEST_TMPDIR/second"
    up --model "$twin" --trunk-device "$D"
    logits "$BATS_TEST_TMPDIR/got"
}
