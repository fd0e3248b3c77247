#!/usr/bin/env bats
# The npm package openai against k3-router --http.
load http_helpers

setup_file() { serve_for_node openai; }
teardown_file() { serve_for_node_end; }
client_passes() { # client_passes FILE CHECKS
    command -v node >/dev/null || skip "node is not installed"
    [ -d "$work/node_modules/openai" ] || skip "npm could not install openai: $(tail -1 "$work/npm.log")"
    run timeout $((100 * SLOW)) node "$work/$1" "$URL" "$KEY"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(grep -c '^ok ' <<<"$output")" -eq "$2" ]
}

@test "chat, streams, completions, models, errors and cancellation, by the npm package openai" {
    client_passes client.mjs 11
    idle 10 # the aborted one, too
}

@test "structured output and calls that must come, by the npm package openai" {
    client_passes constrained.mjs 4
}
