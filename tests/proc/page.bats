#!/usr/bin/env bats
# The page of k3-router --http: what is served, the modules in node, and the whole of it in chromium on the demo model.
load http_helpers

setup_file() {
    serve_for_node page "${CHROMIUM:-chromium}"
    cp -r "$ROOT/k3-router/web" "$work/web"
}
teardown_file() { serve_for_node_end; }

head_of() { # head_of PATH [CURL OPTION...]: status line and headers, in lower case
    local path=$1
    shift
    rm -f "$BATS_TEST_TMPDIR/body"
    curl -sS -m $((20 * SLOW)) --path-as-is -o "$BATS_TEST_TMPDIR/body" -D - "$@" "$URL$path" | tr -d '\r' | tr '[:upper:]' '[:lower:]'
}

@test "the page and its files are served without a key, with their types and a strict policy" {
    for f in '' $(cd "$ROOT/k3-router/web" && ls *.html *.css *.js *.svg | sed 's,^,web/,'); do
        run head_of "/$f"
        echo "$f: $output"
        [[ ${lines[0]} == 'http/1.1 200 ok' ]]
        case $f in
        '' | *.html) type='text/html; charset=utf-8' f=web/index.html ;;
        *.css) type='text/css; charset=utf-8' ;;
        *.js) type='text/javascript; charset=utf-8' ;;
        *.svg) type='image/svg+xml' ;;
        esac
        [[ $output == *"content-type: $type"* ]]
        cmp "$BATS_TEST_TMPDIR/body" "$ROOT/k3-router/$f"
        for h in 'x-content-type-options: nosniff' 'referrer-policy: no-referrer' 'cache-control: no-cache' \
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"; do
            [[ $output == *"$h"* ]]
        done
        [[ $output =~ etag:\ \"[0-9a-f]{32}\" ]]
    done
    run grep -nE "(https?:)?//[a-z]|<style|style=| on[a-z]+=\"|<script>" "$ROOT/k3-router/web/index.html"
    [ "$status" -eq 1 ]
}
@test "what is known is not sent again; HEAD and methods" {
    tag=$(head_of /web/app.js | sed -n 's/^etag: //p')
    for given in "$tag" "W/$tag" "\"x\", $tag" '*'; do
        run head_of /web/app.js -H "If-None-Match: $given"
        [[ ${lines[0]} == 'http/1.1 304 not modified' && $output == *"etag: $tag"* ]]
        [ ! -s "$BATS_TEST_TMPDIR/body" ]
    done
    for given in '"x"' "${tag%\"}" "${tag}x"; do
        [[ $(head_of /web/app.js -H "If-None-Match: $given" | head -1) == 'http/1.1 200 ok' ]]
    done
    run head_of / -I
    [[ ${lines[0]} == 'http/1.1 200 ok' && $output == *"content-length: $(wc -c <"$ROOT/k3-router/web/index.html")"* ]]
    run head_of / -X POST -d x
    [[ ${lines[0]} == 'http/1.1 405 method not allowed' && $output == *'allow: get, head, options'* ]]
}
@test "there is no way out of the table of files" {
    for p in /web /web/ /web/app.js/ /web/x.js /web//app.js //web/app.js /web/./app.js /web/../web/app.js /web/../../Makefile /web/%2e%2e/%2e%2e/etc/passwd \
        /web/..%2f..%2fetc%2fpasswd '/web/..\..\etc\passwd' /web/app.js%00.html /WEB/app.js /index.html /web/README.md // /. /..; do
        run head_of "$p" -H "Authorization: Bearer $KEY"
        echo "$p: $output"
        # libmicrohttpd ends a path at %00: what is before it is the path.
        [[ ${lines[0]} == 'http/1.1 404 not found' || $p == *%00* ]]
        [[ $(tr -d '\0' <"$BATS_TEST_TMPDIR/body") != *root:* ]]
    done
    [[ $(head_of /web/x.js | head -1) == 'http/1.1 401 unauthorized' ]]
    [[ $(head_of / -H 'Origin: http://evil.example' | head -1) == 'http/1.1 403 forbidden' ]]
}
@test "the statistics have the flow of the weight daemons while somebody looks" {
    ask /v1/chat/completions '{"messages":[{"role":"user","content":"What is the capital of Italy?"}]}' -H "Authorization: Bearer $KEY" >/dev/null
    for _ in $(seq $((100 * SLOW))); do
        got=$(ask /v1/k3/stats '' -H "Authorization: Bearer $KEY" | jq -c .)
        jq -e '.machine.experts.layer_demands | add > 0' <<<"$got" >/dev/null && break
        sleep 0.1
    done
    echo "$got"
    jq -e '.machine | .model == "demo-model" and .layers == 9 and .layers_model == 9 and .ctx == 2048 and .sequences == 2 and
        (.experts.layer_demands | length) == 9 and .experts.layer_demands[0] == 0 and (.promised_bytes > 1e6) and
        ([.experts.layer_demands, .experts.layer_hits] | transpose | all(.[0] >= .[1])) and
        (.trunk.drives | length) >= 1 and (.trunk.ring_filled_bytes >= 0) and .trunk.at_ns > 0 and
        ([.members[] | .alive and (.failed | not) and .private_bytes > 0] | all) and (.members | length) == 4' <<<"$got"
    jq -e '(.machine.experts.layer_demands | add) <= .daemons["k3-expertd"].stats.demands.value and .now_ns > .machine.trunk.at_ns' <<<"$got"
}
@test "who looks at the page does not fill the log; what is refused is in it" {
    [[ $(head_of /web/x.js | head -1) == 'http/1.1 401 unauthorized' ]]
    ask /v1/k3/stats '' -H "Authorization: Bearer $KEY" >/dev/null
    ask /v1/models '' -H "Authorization: Bearer $KEY" >/dev/null
    server_says 'event=request method=GET path=/v1/models status=200' 10
    grep -q 'event=request method=GET path=/web/x.js status=401' "$SERVER_LOG"
    run grep -E 'path=/(web/\{file\}|web/\?file\?|v1/k3/stats) status=(200|304)' "$SERVER_LOG"
    [ "$status" -eq 1 ]
}
@test "events, Markdown, conversations and rates, in node" {
    command -v node >/dev/null || skip "node is not installed"
    cd "$work"
    run timeout $((120 * SLOW)) node --test --test-reporter=tap modules.test.mjs
    echo "$output"
    [ "$status" -eq 0 ]
    [[ $output == *'# fail 0'* ]]
}
@test "chat, thinking, stop, reload, errors, injection, machine, keyboard, narrow: in chromium" {
    command -v node >/dev/null || skip "node is not installed"
    CHROMIUM=$(command -v "${CHROMIUM:-chromium}") || skip "chromium is not installed"
    export CHROMIUM
    [ -d "$work/node_modules/playwright-core" ] || skip "npm could not install playwright-core: $(tail -1 "$work/npm.log" 2>&1)"
    cd "$work"
    run timeout $((300 * SLOW)) node page.mjs "$URL" "$KEY" "$SERVER"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(grep -c '^ok ' <<<"$output")" -eq 16 ]
    ! kill -0 "$SERVER" 2>/dev/null || server_says event=stopped 10
}
