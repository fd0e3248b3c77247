#!/usr/bin/env bats
# k3-sim: the table, the plot, bad input; a real trace when it is there.
load helpers

sim() { "$K3_BIN/k3-sim" "$@"; }
refused() { # refused PATTERN ARGUMENT...: exit 2, one line
    local pattern=$1 status=0
    shift
    sim "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" || status=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$status" -eq 2 ] && [ ! -s "$BATS_TEST_TMPDIR/out" ]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/err")" -eq 1 ]
    grep -q -- "$pattern" "$BATS_TEST_TMPDIR/err"
}
pairs() { # pairs NUMBER...: little-endian int32
    local n
    for n in "$@"; do printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) $((n >> 24 & 255)))"; done
}
setup() {
    # Three passes of one row over layers 1 and 2, top 2: 1.1 1.2 | 2.1 2.2, then the same but 2.3 for 2.2, then as first.
    T=$BATS_TEST_TMPDIR/t.bin
    pairs 1 1 1 2 2 1 2 2 1 1 1 2 2 1 2 3 1 1 1 2 2 1 2 2 >"$T"
    SMALL=(--raw --experts 4 --top-k 2 --slot-bytes 1000000)
}
REAL=$ROOT/../shared/data/expert_trace.bin
# One number of the table of hits: the row of that many slots, the column of that name.
cell() { # cell SLOTS NAME < output
    awk -v n="$1" -v name="$2" '/^ *slots/ && !c { for (i = 1; i <= NF; i++) if ($i == name) c = i } c && $1 == n { print $c; exit }'
}

@test "the table of a trace made by hand" {
    sim "${SMALL[@]}" --slots 3,4,5 "$T" | tee "$BATS_TEST_TMPDIR/o"
    grep -q '2 layers of 4 experts, top 2; 3 passes, 3 rows, 12 demands of 5 different experts' "$BATS_TEST_TMPDIR/o"
    # 12 demands, 5 of them the first of their kind; with 4 slots lru loses each expert just before its turn.
    [ "$(cell 5 lru <"$BATS_TEST_TMPDIR/o")" = 58.33 ]
    [ "$(cell 5 lfru <"$BATS_TEST_TMPDIR/o")" = 58.33 ]
    [ "$(cell 5 belady <"$BATS_TEST_TMPDIR/o")" = 58.33 ]
    [ "$(cell 4 belady <"$BATS_TEST_TMPDIR/o")" = 50.00 ]
    [ "$(cell 3 lru <"$BATS_TEST_TMPDIR/o")" = 0.00 ]
    [ "$(cell 3 belady <"$BATS_TEST_TMPDIR/o")" = 33.33 ]
}
@test "sizes in GB, a position once, the plot" {
    sim "${SMALL[@]}" --once --gb 0.005,0.003 --svg "$BATS_TEST_TMPDIR/p.svg" "$T" | tee "$BATS_TEST_TMPDIR/o"
    grep -q 'every position once' "$BATS_TEST_TMPDIR/o"
    [ "$(cell 5 lru <"$BATS_TEST_TMPDIR/o")" = 0.00 ] # all three passes are position 0
    [ "$(grep -c '<polyline' "$BATS_TEST_TMPDIR/p.svg")" -eq 4 ]
    grep -q 'demands that hit' "$BATS_TEST_TMPDIR/p.svg"
    grep -q '</svg>' "$BATS_TEST_TMPDIR/p.svg"
}
@test "bad input is refused with one line" {
    refused 'TRACE is missing' --raw
    refused 'No such file' "$BATS_TEST_TMPDIR/none"
    refused 'not a regular file' /tmp
    refused 'needs --raw' "$T"
    refused '12 pairs\|no 5 experts' --raw --experts 6 --top-k 5 "$T"
    refused 'pair 11 is (2, 2)\|experts 0 to 1' --raw --experts 2 --top-k 2 "$T"
    refused 'slots 0' "${SMALL[@]}" --slots 0 "$T"
    refused 'slots 3x' "${SMALL[@]}" --slots 3,3x "$T"
    refused 'gb -1' "${SMALL[@]}" --gb=-1 "$T"
    refused 'gb 0.0001' "${SMALL[@]}" --gb 0.0001 "$T"
    refused 'pinned best' "${SMALL[@]}" --pinned best "$T"
    refused 'half-life 0' "${SMALL[@]}" --half-life 0 "$T"
    refused 'svg /no/such' "${SMALL[@]}" --svg /no/such/file.svg "$T"
    refused 'for --raw' --top-k 2 "$T"
    refused 'one trace at a time' "${SMALL[@]}" "$T" "$T"
    head -c 13 "$T" >"$BATS_TEST_TMPDIR/odd"
    refused '13 bytes' "${SMALL[@]}" "$BATS_TEST_TMPDIR/odd"
    : >"$BATS_TEST_TMPDIR/empty"
    refused 'not a trace' "$BATS_TEST_TMPDIR/empty"
    refused '0 bytes' "${SMALL[@]}" "$BATS_TEST_TMPDIR/empty"
}
@test "look-ahead: refused without one, a table with one" {
    refused 'holds none: k3ctl trace start --lookahead' "${SMALL[@]}" --lookahead "$T"
    up --trunk-gb 1
    ctl trace start --lookahead "$BATS_TEST_TMPDIR/a.trace"
    printf 'What is the capital of %s?\n' France Japan Brazil | router --lines >/dev/null
    down
    sim --lookahead --slots 40 "$BATS_TEST_TMPDIR/a.trace" | tee "$BATS_TEST_TMPDIR/o"
    # k' = 0, 2, 4, 8, 16; of the four best guesses most come, by chance it would be an eighth
    [ "$(grep -cE '^ +40 ' "$BATS_TEST_TMPDIR/o")" -eq 5 ]
    awk '$1 == 40 && $2 == 4 { exit !($3 > 60) }' "$BATS_TEST_TMPDIR/o"
    awk '$1 == 40 && $2 == 16 { exit !($3 > 95) }' "$BATS_TEST_TMPDIR/o"
}
@test "the real trace: below one token's demands lru hits nothing and lfru something" {
    [ -r "$REAL" ] || skip "no $REAL"
    sim --raw --once --slots 743,1472,10010 "$REAL" | tee "$BATS_TEST_TMPDIR/o"
    grep -q '8 passes, 12 rows, 15986 demands of 10010 different experts, every position once' "$BATS_TEST_TMPDIR/o"
    [ "$(cell 743 lru <"$BATS_TEST_TMPDIR/o")" = 0.00 ]
    awk "BEGIN { exit !($(cell 743 lfru <"$BATS_TEST_TMPDIR/o") > 10) }"
    [ "$(cell 10010 lru <"$BATS_TEST_TMPDIR/o")" = "$(cell 10010 belady <"$BATS_TEST_TMPDIR/o")" ]
    sim --raw --slots 5000 "$REAL" | grep -q '68 rows, 63824 demands of 10010'
}
