#!/usr/bin/env bats
# k3-mkmodel: what --help says, and what becomes of a directory that cannot be made.
load helpers

@test "the defaults in --help are those that it takes" {
    local options
    options=$("$K3_BIN/k3-mkmodel" --help | sed -nE 's/^  --([a-z-]+) [A-Z]+ .*\(([-0-9.e]+)\)$/--\1=\2/p')
    [ "$(wc -l <<<"$options")" -eq 26 ]
    "$K3_BIN/k3-mkmodel" --out "$BATS_TEST_TMPDIR/a"
    "$K3_BIN/k3-mkmodel" $options --out "$BATS_TEST_TMPDIR/b"
    diff -r "$BATS_TEST_TMPDIR/a" "$BATS_TEST_TMPDIR/b"
}

@test "how much will be written is said before it is" {
    "$K3_BIN/k3-mkmodel" --out "$BATS_TEST_TMPDIR/a" 2>"$BATS_TEST_TMPDIR/err"
    cat "$BATS_TEST_TMPDIR/err"
    grep -qE "^k3-mkmodel: writing [0-9.]+ MB of weights in 10 shards to $BATS_TEST_TMPDIR/a$" "$BATS_TEST_TMPDIR/err"
    "$K3_BIN/k3-mkmodel" --released --sparse --layers 2 --experts 8 --vocab 16384 --out "$BATS_TEST_TMPDIR/b" 2>"$BATS_TEST_TMPDIR/err"
    grep -q '^k3-mkmodel: writing 4.21 GB of weights as holes in 3 shards' "$BATS_TEST_TMPDIR/err"
}

@test "a directory that cannot be made: what must be there, and sizes that say something" {
    run "$K3_BIN/k3-mkmodel" --out "$BATS_TEST_TMPDIR/none/a"
    [ "$status" -eq 2 ]
    [ "$output" = "k3-mkmodel: $BATS_TEST_TMPDIR/none: No such file or directory: --out makes one directory, in one that is there already" ]
    run "$K3_BIN/k3-mkmodel" --sparse --out /proc/a
    [ "$status" -eq 2 ]
    [[ $output =~ ^"k3-mkmodel: /proc has 0 bytes free, the model needs "[0-9.]+" kB"$ ]]
}
