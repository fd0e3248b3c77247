#!/usr/bin/env bats
# k3-computed over its socket, with real k3-trunkd and k3-expertd on the demo model: answers, refusals, cancelling, draining.
load computed_helpers

setup_file() { all_three --ctx 4096 --sequences 2 --batch-rows 16; echo "$COMPUTED $EXPERTD $TRUNKD" >"$BATS_FILE_TMPDIR/pids"; }
teardown_file() { read -r COMPUTED EXPERTD TRUNKD <"$BATS_FILE_TMPDIR/pids"; stop_all; }
teardown() { for i in 1 2 3 4; do request forget 0000000000000000000000000000000$i; done | ask >/dev/null; }

@test "the answer is the expected one, and the stop id is its last token" {
    right=$(jq -c '.[0].generated_ids' "$DEMO/expected.json")
    { submit $ID 100 '"stop_ids":[1282]' | sed 's/"stop_ids":\[\],//'; request collect; } | ask >"$BATS_TEST_TMPDIR/out"
    [ "$(head -1 "$BATS_TEST_TMPDIR/out" | jq -c '[.ok, .known, .whole_model]')" = '[true,false,true]' ]
    [ "$(tail -1 "$BATS_TEST_TMPDIR/out" | jq -c .tokens)" = "$right" ]
    [ "$(tail -1 "$BATS_TEST_TMPDIR/out" | jq -c '.events[-1] | [.type, .reason, .stop_id]')" = '["done","stop",1282]' ]
    [ "$(tail -1 "$BATS_TEST_TMPDIR/out" | jq .progress)" -gt 5 ]
    { submit $ID 1; request collect "" '"from":3'; } | sed 's/"id":""/"id":"'$ID'"/' | ask >"$BATS_TEST_TMPDIR/again"
    [ "$(head -1 "$BATS_TEST_TMPDIR/again" | jq -c .known)" = true ] # a repeat changes nothing
    [ "$(tail -1 "$BATS_TEST_TMPDIR/again" | jq -c .tokens)" = "$(jq -c '.[3:]' <<<"$right")" ]
}

@test "logits come first, as little endian float32, and their argmax is the first token" {
    { submit $ID 2 '"logits":true'; request collect; } | ask | tail -1 >"$BATS_TEST_TMPDIR/out"
    [ "$(jq -c '[.events[].type]' "$BATS_TEST_TMPDIR/out")" = '["logits","token","token","done"]' ]
    jq -r '.events[0].base64' "$BATS_TEST_TMPDIR/out" | base64 -d >"$BATS_TEST_TMPDIR/logits"
    [ "$(stat -c %s "$BATS_TEST_TMPDIR/logits")" -eq $((1536 * 4)) ]
    best=$(od -An -v -tf4 -w4 "$BATS_TEST_TMPDIR/logits" | awk '$1 > m || NR == 1 { m = $1; i = NR - 1 } END { printf "%d %.3f", i, m }')
    [ "$best" = "295 27.931" ] # run/demo-model/expected.json: 27.93086
    [ "$(jq '.tokens[0]' "$BATS_TEST_TMPDIR/out")" -eq 295 ]
}

@test "what cannot be answered is refused by name, with exit code 2" {
    ok=$(submit $ID 5)
    refused() { # refused REQUEST WORDS: asked all together below
        printf '%s\n' "$1" >>"$BATS_TEST_TMPDIR/requests"
        printf '%s\n' "$2" >>"$BATS_TEST_TMPDIR/words"
    }
    refused "${ok/$PROMPT/1,2,1536}" "prompt_ids[2] is 1536: the vocabulary has 1536 ids, 0 to 1535"
    refused "${ok/$PROMPT/1,-2}" "prompt_ids[1] is not a whole number"
    refused "${ok/$PROMPT/1,2.5}" "prompt_ids[1] is not a whole number"
    refused "${ok/$PROMPT/1,1e300}" "prompt_ids[1] is not a whole number"
    refused "${ok/$PROMPT/1,\"2\"}" "prompt_ids[1] is not a number"
    refused "${ok/$PROMPT/}" "prompt_ids is empty"
    refused "${ok/prompt_ids/prompt}" "prompt_ids is missing"
    refused "${ok/\[$PROMPT\]/7}" "prompt_ids is not an array"
    refused "${ok/\"max_tokens\":5/\"max_tokens\":4069}" "prompt 28 + max_tokens 4069 = 4097 ids, --ctx is 4096"
    refused "${ok/\"max_tokens\":5/\"max_tokens\":0}" "max_tokens is 0"
    refused "${ok/\"max_tokens\":5/\"max_tokens\":1.5}" "max_tokens is 1.5"
    refused "${ok/$PROMPT/$(seq -s, 1 1 4100 | sed 's/[0-9]*/7/g')}" "the prompt has 4100 ids, --ctx is 4096"
    refused "${ok/\"temperature\":0/\"temperature\":-1}" "temperature -1"
    refused "${ok/\"top_p\":1/\"top_p\":0}" "top_p 0"
    refused "${ok/\"min_p\":0/\"min_p\":2}" "min_p 2"
    refused "${ok/\"top_k\":0/\"top_k\":-1}" "top_k is -1"
    refused "${ok/\"seed\":\"1\"/\"seed\":1}" "seed (none): it must be a string"
    refused "${ok/\"seed\":\"1\"/\"seed\":\"18446744073709551616\"}" "seed 18446744073709551616"
    refused "${ok/\"stop_ids\":\[\]/\"stop_ids\":[9999]}" "stop_ids[0] is 9999"
    refused "${ok/$ID/xyz}" "id xyz: it must be 32 hex digits"
    refused "${ok/\"seed\":/\"model_digest\":\"00ff\",\"seed\":}" "model_digest 00ff: this is $DEMO"
    refused "${ok/\"seed\":/\"model_digest\":7,\"seed\":}" "model_digest (no string): this is $DEMO"
    refused '{"cmd":"poll"}' "id (none)"
    refused '{"cmd":"dance"}' "unknown command dance"
    ask <"$BATS_TEST_TMPDIR/requests" >"$BATS_TEST_TMPDIR/replies"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/replies")" -eq 24 ]
    paste -d '\n' "$BATS_TEST_TMPDIR/words" "$BATS_TEST_TMPDIR/replies" | while read -r words && read -r reply; do
        [ "$(jq -r '[.ok, .code] | @csv' <<<"$reply")" = "false,2" ] || { echo "$reply"; return 1; }
        grep -qF -- "$words" <<<"$(jq -r .error <<<"$reply")" || { echo "$reply does not say $words"; return 1; }
    done
    [ "$(request poll | ask | jq -c '[.ok, .errno]')" = '[false,"ENOENT"]' ]
    reply=$(request cancel | ask)
    [ "$(jq -c '[.ok, .errno]' <<<"$reply")" = '[false,"ENOENT"]' ]
    jq -e '.error | endswith("restarted")' <<<"$reply" # nothing is to be submitted again
    { submit $ID 1; request collect; } | ask | tail -1 | jq -e '.tokens == [295]' # unharmed
}

@test "cancel ends a running and a queued answer; the other goes on" {
    b=00000000000000000000000000000002 c=00000000000000000000000000000003 d=00000000000000000000000000000004
    { submit $ID 4000; submit $b 4000; submit $c 4000; submit $d 10; } | ask >/dev/null
    [ "$(request poll $c | ask | jq -r .state)" = queued ]
    [ "$(request poll $d | ask | jq -r '.progress.ahead')" -ge 1 ]
    { request cancel $c; request cancel $b; } | ask | jq -e .ok
    for i in $b $c; do
        [ "$(request collect $i | ask | jq -r '.events[-1] | .type + .reason')" = donecancelled ]
    done
    [ "$(request collect $d | ask | jq '.tokens | length')" -eq 10 ] # has come to run beside the first
    request cancel $ID | ask | jq -e .ok
    [ "$(request collect $ID | ask | jq -r '.events[-1].reason')" = cancelled ]
    [ "$(stat_of k3-computed cancelled)" -eq 3 ]
    [ "$(stat_of k3-computed sequences_most)" -eq 2 ]
}

@test "generated ids are gone on from, to the same answer" {
    more='"generated_ids":[295,319,268,1055]'
    { submit $ID 12; request collect; } | ask | tail -1 | jq -c .tokens >"$BATS_TEST_TMPDIR/whole"
    { submit 00000000000000000000000000000002 12 "$more"; request collect 00000000000000000000000000000002; } | ask | tail -1 >"$BATS_TEST_TMPDIR/rest"
    [ "$(jq -c .tokens "$BATS_TEST_TMPDIR/rest")" = "$(jq -c '.[4:]' "$BATS_TEST_TMPDIR/whole")" ]
    [ "$(jq '.events[0].index' "$BATS_TEST_TMPDIR/rest")" -eq 4 ]
}

@test "a second k3-computed of the instance is refused, and so is what the machine does not have" {
    computed --ctx 64
    ends_within "$COMPUTED" 50
    [ "$STATUS" -eq 2 ]
    tail -1 "$LOG/computed.log" | grep -q "$(head -1 <"$BATS_FILE_TMPDIR/pids" | cut -d' ' -f1)" # names the holder
    run "$K3_BIN/k3-computed" --model "$DEMO" --instance "$INSTANCE-x" --threads 1000
    [ "$status" -eq 2 ] && [[ $output =~ "--threads 1000: this process may use "[0-9]+" core"s?" ("[0-9]+" CPU"s?")" ]]
    run "$K3_BIN/k3-computed" --model "$DEMO" --instance "$INSTANCE-x" --kernels mmx
    [ "$status" -eq 2 ] && [[ $output == *"--kernels mmx: there are auto, c, avx2 and avx512"* ]]
    run "$K3_BIN/k3-computed" --model "$DEMO" --instance "$INSTANCE-x" --ctx 16000000 --sequences 256
    [ "$status" -eq 2 ] && [[ $output == *"GB are needed for 256 sequences of --ctx 16000000"* ]]
    run "$K3_BIN/k3-computed" --instance "$INSTANCE-x"
    [ "$status" -eq 2 ] && [[ $output == *"--model is missing"* ]]
}

@test "one thread a core, each bound to its own; what it starts before is not bound" {
    ctl info computed >"$BATS_TEST_TMPDIR/info"
    jq '."k3-computed" | { threads, threads_pinned, cores, cpus, cpu_quota }' "$BATS_TEST_TMPDIR/info"
    jq -e '."k3-computed" | .threads == ([.cores, .cpu_quota // .cores] | min) and .cpus >= .cores' "$BATS_TEST_TMPDIR/info"
    jq -e '."k3-computed" | .threads_pinned == (.threads == .cores)' "$BATS_TEST_TMPDIR/info"
    submit $ID 60 | ask >/dev/null
    [ "$(request collect $ID | ask | jq '.tokens | length')" -eq 60 ]
    # Threads whose mask is smaller than that of the process's first thread was: the team alone.
    local pid all
    pid=$(pid_of k3-computed) all=$(awk '/^Cpus_allowed_list/ { print $2 }' /proc/self/status)
    if [ "$(jq '."k3-computed" | .threads_pinned and .cores > 1' "$BATS_TEST_TMPDIR/info")" = true ]; then
        [ "$(awk -v all="$all" '/^Cpus_allowed_list/ && $2 != all { n++ } END { print n + 0 }' /proc/"$pid"/task/*/status)" -eq \
          "$(jq '."k3-computed".threads' "$BATS_TEST_TMPDIR/info")" ]
    fi
}

@test "latent KV: bytes of a position in info, and what attention read is counted exactly" {
    local per before after
    per=$(ctl info computed | jq -r '."k3-computed".latent_kv | rtrimstr(" bytes a position")')
    [ "$per" -eq "$(jq '.text_config | (.linear_attn_config.full_attn_layers | length) * (.kv_lora_rank + .qk_rope_head_dim) * 4' \
        "$DEMO/config.json")" ]
    ctl info computed | jq -e '."k3-computed" | has("kv_bytes_per_position") | not'
    before=$(stat_of k3-computed kv_bytes)
    { submit $ID 60; request collect; } | ask >/dev/null
    after=$(stat_of k3-computed kv_bytes)
    # 28 positions of the prompt and 59 of the answer; the 60th token does not go through the model
    [ $((after - before)) -eq $((87 * 88 / 2 * per)) ]
}

@test "draining finishes what runs and refuses what is new" {
    submit $ID 60 | ask >/dev/null
    ctl drain k3-computed
    reply=$(submit 00000000000000000000000000000002 5 | ask)
    [ "$(jq -c '[.ok, .errno]' <<<"$reply")" = '[false,"ESHUTDOWN"]' ]
    jq -e '.error | startswith("no new requests") and contains("restart computed")' <<<"$reply"
    [ "$(request collect $ID | ask | jq '.tokens | length')" -eq 60 ]
    submit $ID 60 | ask | jq -e '.known'
}
