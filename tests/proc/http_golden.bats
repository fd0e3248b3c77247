#!/usr/bin/env bats
# Whole replies and whole streams as curl sees them, byte for byte, against the files in tests/data/http.  What differs from run to run
# (ids, times, the build) is replaced by its name.  A reply that is meant to change: K3_GOLDEN=write, and read the diff.
load http_helpers

setup_file() {
    up --ctx 2048 --sequences 4
    serve
}
teardown_file() {
    stop_server
    down
}

plain() { # plain < reply
    sed -E -e 's/"id":"(chatcmpl|cmpl|call)[-_][0-9a-f]+"/"id":"\1-ID"/g' -e 's/"created":[0-9]+/"created":TIME/g' \
        -e 's/"system_fingerprint":"[^"]*"/"system_fingerprint":"MODEL"/g' -e 's/"(prompt_ms|predicted_ms|prompt_per_second|predicted_per_second)":[0-9.e+-]+/"\1":N/g' \
        -e '/^: /d' -e 's/\r$//' -e 's/^Content-Length: .*/Content-Length: N/' -e '/^(date|x-k3-eta):/Id'
}

@test "every reply and every stream is what it was" {
    local wrong=0 n=0 f path body
    for f in "$ROOT"/tests/data/http/*.request; do
        { read -r path && read -r body; } <"$f"
        ask "$path" "$body" -N -i | plain >"$BATS_TEST_TMPDIR/o"
        [ "${K3_GOLDEN:-}" != write ] || cp "$BATS_TEST_TMPDIR/o" "${f%.request}.reply"
        diff -u "${f%.request}.reply" "$BATS_TEST_TMPDIR/o" || wrong=$((wrong + 1))
        n=$((n + 1))
    done
    [ "$n" -ge 15 ]
    [ "$wrong" = 0 ]
}
