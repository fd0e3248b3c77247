#!/usr/bin/env bats
# The tokenizer against another implementation: the npm package tiktoken with K3's split pattern.
load helpers.bash

setup_file() {
    work=$(mktemp -d /tmp/k3-tokenizer-XXXXXX)
    export work
    cp "$ROOT"/tests/node/package.json "$ROOT"/tests/node/compare.mjs "$work/"
    (cd "$work" && timeout 120 npm install --no-save --no-package-lock --no-audit --no-fund >"$work/npm.log" 2>&1) || true
}

teardown_file() {
    rm -rf "$work"
}

@test "ids equal those of tiktoken on random lines, on every code point and on the published corpus" {
    command -v node >/dev/null || skip "node is not installed"
    [ -d "$work/node_modules/tiktoken" ] || skip "npm could not install tiktoken: $(tail -1 "$work/npm.log")"
    released="$ROOT/../shared/data/tiktoken.model"
    [ -e "$released" ] || released=
    run timeout 300 node "$work/compare.mjs" "$K3_BUILD/probe/tokenize_probe" "$work" "$DEMO/tiktoken.model" $released
    echo "$output"
    [ "$status" -eq 0 ]
    [[ "$output" == *" 0 different" ]]
}
