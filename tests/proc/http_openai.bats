#!/usr/bin/env bats
# The npm package openai against k3-router --http.
load http_helpers

setup_file() {
    work=$(mktemp -d /tmp/k3-openai-XXXXXX)
    export work
    cp "$ROOT"/tests/node/openai/* "$work/" 2>/dev/null || true
    (cd "$work" && timeout 120 npm ci --no-audit --no-fund >"$work/npm.log" 2>&1 3>&-) || true
    up --ctx 2048 --sequences 2
    echo abcdefghijklmnopqrstuvwxyz >"$work/key"
    chmod 600 "$work/key"
    export KEY=abcdefghijklmnopqrstuvwxyz
    serve --api-key-file "$work/key"
}
teardown_file() {
    stop_server
    down
    rm -rf "$work"
}

@test "chat, streams, completions, models, errors and cancellation, by the npm package openai" {
    command -v node >/dev/null || skip "node is not installed"
    [ -d "$work/node_modules/openai" ] || skip "npm could not install openai: $(tail -1 "$work/npm.log")"
    run timeout $((100 * SLOW)) node "$work/client.mjs" "$URL" "$KEY"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(grep -c '^ok ' <<<"$output")" -eq 11 ]
    idle 10 # the aborted one, too
}

@test "structured output and calls that must come, by the npm package openai" {
    command -v node >/dev/null || skip "node is not installed"
    [ -d "$work/node_modules/openai" ] || skip "npm could not install openai: $(tail -1 "$work/npm.log")"
    run timeout $((100 * SLOW)) node "$work/constrained.mjs" "$URL" "$KEY"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(grep -c '^ok ' <<<"$output")" -eq 4 ]
}
