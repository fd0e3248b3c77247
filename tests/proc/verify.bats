#!/usr/bin/env bats
# --verify: a family that reads with k3.sums gives the same answers, and a flipped byte fails the request that meets it,
# named by file and offset, while every daemon lives.
load helpers

setup_file() {
    "$K3_BIN/k3-mkmodel" --formula --out "$BATS_FILE_TMPDIR/m"
    "$K3_BIN/k3-mkmodel" --formula --scatter --seed 2 --out "$BATS_FILE_TMPDIR/scattered"
    "$K3_BIN/k3ctl" verify --model "$BATS_FILE_TMPDIR/m" --make
    "$K3_BIN/k3ctl" verify --model "$BATS_FILE_TMPDIR/scattered" --make
}
setup() {
    M=$BATS_TEST_TMPDIR/m ERR=$BATS_TEST_TMPDIR/err
    cp -r "$BATS_FILE_TMPDIR/m" "$M"
}
teardown() {
    down
    nothing_left "$INSTANCE"
}
flip() { # flip FILE OFFSET: one bit
    python3 -c 'import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(int(sys.argv[2])); b = f.read(1)[0]; f.seek(int(sys.argv[2])); f.write(bytes([b ^ 4]))' "$1" "$2"
}
places() { # places TENSOR...: a line "FILE OFFSET" for every tensor whose name ends so
    python3 - "$M" "$@" <<'END'
import glob, json, struct, sys
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        for name, t in json.loads(f.read(n)).items():
            if any(name.endswith(s) for s in sys.argv[2:]):
                print(path, 8 + n + t["data_offsets"][0])
END
}
ask() { router --ids 1,2,3 --max-tokens 6 --json </dev/null 2>"$ERR"; }
ids() { ask | jq -c .generated_ids; }
fails_with() { # fails_with FILE OFFSET: the request, not the daemons
    local status=0
    ask >"$BATS_TEST_TMPDIR/out" || status=$?
    cat "$ERR"
    [ "$status" -eq 4 ]
    grep -qF "$1 at offset $2" "$ERR"
    grep -qF checksum "$ERR"
    ctl ping
}
field() { ctl info "$1" --json | jq -r --arg n "$2" '.. | objects | select(has($n)) | .[$n]' | head -1; }
refuses() { # refuses PROGRAM OPTION... -- PATTERN...: 2, one line
    local options=() status=0 p
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    timeout $((20 * SLOW)) "$K3_BIN/${options[0]}" --instance "$INSTANCE" --log-level error "${options[@]:1}" 2>"$ERR" 3>&- || status=$?
    cat "$ERR"
    [ "$status" -eq 2 ]
    [ "$(wc -l <"$ERR")" -eq 1 ]
    for p in "$@"; do grep -qF -- "$p" "$ERR" || { echo "no $p"; return 1; }; done
}

@test "the same answers with sums as without, and each byte is summed once" {
    rm "$M/k3.sums"
    up --model "$M" --ring-mb 2 --trunk-gb 0.0021
    for d in k3-trunkd k3-expertd; do
        [ "$(field $d verify)" = off ]
        field $d verify_note | grep -q k3.sums
        [ "$(stat_of $d verified_bytes)" = 0 ]
    done
    want=$(ids)
    down
    for model in "$BATS_FILE_TMPDIR/m" "$BATS_FILE_TMPDIR/scattered"; do
        up --model "$model" --ring-mb 2 --trunk-gb 0.0021 --cache-gb 0.00013
        for d in k3-trunkd k3-expertd; do [ "$(field $d verify)" = first ]; done
        [ "$(ids)" = "$want" ]
        first=$(stat_of k3-trunkd verified_bytes)
        [ "$first" -gt 0 ]
        [ "$(stat_of k3-expertd verified_bytes)" -gt 0 ]
        [ "$(ids)" = "$want" ]
        [ "$(stat_of k3-trunkd verified_bytes)" = "$first" ]
        for d in k3-trunkd k3-expertd; do [ "$(stat_of $d verify_failures)" = 0 ]; done
        down
    done
}
@test "a flipped byte of an expert" {
    up --model "$M" --cache-gb 0.0001
    want=$(ids)
    mapfile -t experts < <(places .w1.weight_packed | grep 00004-of)
    for p in "${experts[@]}"; do flip ${p% *} $((${p#* } + 7)); done
    "$ROOT/run/k3-run" restart k3-expertd --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&-
    status=0
    ask >"$BATS_TEST_TMPDIR/out" || status=$?
    cat "$ERR"
    [ "$status" -eq 4 ]
    grep -q checksum "$ERR"
    for p in "${experts[@]}"; do # the one that was named is one of them
        if grep -qF "${p% *} at offset ${p#* }" "$ERR"; then named=$p; fi
    done
    [ -n "$named" ]
    grep -qF "file=${named% *} off=${named#* }" "$(run_dir "$INSTANCE")/k3-expertd.log"
    [ "$(stat_of k3-expertd verify_failures)" -ge 1 ]
    ctl ping
    # Repaired, and no daemon was restarted.
    pid=$(pid_of k3-expertd)
    for p in "${experts[@]}"; do flip ${p% *} $((${p#* } + 7)); done
    [ "$(ids)" = "$want" ]
    [ "$(pid_of k3-expertd)" = "$pid" ]
}
@test "a flipped byte of a streamed piece" {
    read -r file off < <(places layers.5.self_attn.o_proj.weight)
    up --model "$M" --ring-mb 2 --trunk-gb 0.0021
    want=$(ids)
    flip "$file" $((off + 100))
    "$ROOT/run/k3-run" restart k3-trunkd --instance "$INSTANCE" --bin-dir "$K3_BIN" 3>&-
    fails_with "$file" "$off"
    grep -q "event=piece_wrong.*file=$file off=$off " "$(run_dir "$INSTANCE")/k3-trunkd.log"
    [ "$(stat_of k3-trunkd verify_failures)" -ge 1 ]
    flip "$file" $((off + 100))
    [ "$(ids)" = "$want" ]
}
@test "a flipped byte of a pinned piece" {
    read -r file off < <(places layers.5.self_attn.o_proj.weight)
    flip "$file" $((off + 100))
    up --model "$M"
    [ "$(stat_of k3-trunkd stream_pass_bytes)" = 0 ]
    fails_with "$file" "$off"
    flip "$file" $((off + 100))
    ids
}
@test "a flipped byte of a resident tensor: the family does not start, in words" {
    read -r file off < <(places layers.5.input_layernorm.weight)
    flip "$file" $((off + 1))
    status=0
    up --model "$M" 2>"$ERR" || status=$?
    cat "$ERR"
    [ "$status" -ne 0 ]
    grep -qF "$file at offset $off" "$ERR"
    flip "$file" $((off + 1))
    up --model "$M"
    ids
}
@test "sums asked for that are not there, of another model, damaged; an unknown way" {
    for d in k3-trunkd k3-expertd; do
        refuses $d --model "$M" --verify maybe -- "--verify" "maybe" "always"
        cp "$BATS_FILE_TMPDIR/scattered/k3.sums" "$M/k3.sums"
        refuses $d --model "$M" -- "$M/k3.sums" "another model"
        refuses $d --model "$M" --verify always -- "$M/k3.sums" "another model"
        head -c 3000 "$BATS_FILE_TMPDIR/m/k3.sums" >"$M/k3.sums"
        refuses $d --model "$M" -- "$M/k3.sums line" "k3ctl verify --make"
        rm "$M/k3.sums"
        refuses $d --model "$M" --verify first -- "--verify first" "$M/k3.sums is not there" "leave --verify out"
        refuses $d --model "$M" --verify always -- "--verify always" "$M/k3.sums is not there"
    done
    # off looks at nothing
    head -c 3000 "$BATS_FILE_TMPDIR/m/k3.sums" >"$M/k3.sums"
    "$K3_BIN/k3-trunkd" --model "$M" --instance "$INSTANCE" --verify off 2>"$ERR" 3>&- 4>&- &
    pid=$!
    for ((i = 0; i < 200 * SLOW; i++)); do grep -q event=ready "$ERR" && break; sleep 0.05; done
    [ "$(field k3-trunkd verify)" = off ]
    [ "$(field k3-trunkd verify_note)" = "" ]
    kill "$pid"
    wait "$pid"
}
@test "of two copies the wrong one is named, and the other is read from then on" {
    A=$BATS_TEST_TMPDIR/a B=$BATS_TEST_TMPDIR/b
    mkdir "$A" "$B"
    cp "$M"/*.safetensors "$A"
    cp "$M"/*.safetensors "$B"
    RUN=$(run_dir "$INSTANCE")
    up --model "$M" --ring-mb 2 --trunk-gb 0.0021
    want=$(ids)
    down
    mapfile -t wrong < <(places self_attn.o_proj.weight; places .w1.weight_packed | grep 00004-of)
    for p in "${wrong[@]}"; do f=${p% *}; flip "$B/${f##*/}" $((${p#* } + 7)); done
    mkdir -m 700 -p "${RUN%/*}" "$RUN"
    start() { "$K3_BIN/$1" --model "$M" --instance "$INSTANCE" "${@:2}" 2>"$BATS_TEST_TMPDIR/$1.log" 3>&- 4>&- & }
    start k3-trunkd --device "$B" --device "$A" --ring-mb 2 --trunk-gb 0.0021
    start k3-expertd --device "$B" --device "$A" --cache-gb 0.00013
    start k3-computed --device "$B" --device "$A"
    ctl wait
    # As long as the wrong copy is chosen the request fails; once it is known, no more.
    got=
    for ((i = 0; i < 40; i++)); do got=$(ids) && [ "$got" = "$want" ] && break; done
    [ "$got" = "$want" ]
    cat "$BATS_TEST_TMPDIR"/*.log
    for d in k3-trunkd k3-expertd; do
        refute grep "event=copy_wrong.*file=$A/" "$BATS_TEST_TMPDIR/$d.log"
        if [ "$(stat_of $d verify_failures)" != 0 ]; then grep "event=copy_wrong.*file=$B/" "$BATS_TEST_TMPDIR/$d.log"; fi
    done
    [ $(($(stat_of k3-trunkd verify_failures) + $(stat_of k3-expertd verify_failures))) -gt 0 ]
    kill $(jobs -p)
    wait
}
@test "k3ctl verify of the running instance's model" {
    up --model "$M"
    ctl verify | grep -qF "$M: 104 trunk pieces"
}
