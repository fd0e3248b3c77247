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

@test "a directory that cannot be made: what must be there, and sizes that say something" {
    run "$K3_BIN/k3-mkmodel" --out "$BATS_TEST_TMPDIR/none/a"
    [ "$status" -eq 2 ]
    [ "$output" = "k3-mkmodel: $BATS_TEST_TMPDIR/none: No such file or directory: --out makes one directory, in one that is there already" ]
    run "$K3_BIN/k3-mkmodel" --sparse --out /proc/a
    [ "$status" -eq 2 ]
    [[ $output =~ ^"k3-mkmodel: /proc has 0 bytes free, the model needs "[0-9.]+" kB"$ ]]
}
