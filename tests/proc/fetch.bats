# k3-fetch against a hub that misbehaves (fetch_server.py): whatever happens, a file that has its name has the announced sum.
load helpers

setup_file() {
    export no_proxy='*'
    unset HF_TOKEN HF_ENDPOINT
    python3 "$ROOT/tests/proc/fetch_server.py" "$DEMO" "$BATS_FILE_TMPDIR/log" >"$BATS_FILE_TMPDIR/ports" 3>&- 4>&- &
    SERVER=$!
    for _ in {1..200}; do [ -s "$BATS_FILE_TMPDIR/ports" ] && break; sleep 0.05; done
    read -r HUB CDN <"$BATS_FILE_TMPDIR/ports"
    LOG=$BATS_FILE_TMPDIR/log
    WORK=$(mktemp -d /dev/shm/k3-fetch-test.XXXXXX 2>/dev/null) || WORK=$BATS_FILE_TMPDIR # hundreds of fsyncs, quickly
    export SERVER HUB CDN LOG WORK
}
teardown_file() {
    kill "$SERVER"
    rm -rf "$WORK"
}
setup() {
    TMP=$WORK/$BATS_TEST_NUMBER
    mkdir "$TMP"
    OUT=$TMP/out
    : >"$LOG"
}
fetch() { # fetch REPO OPTION...
    local repo=$1
    shift
    timeout $((60 * SLOW)) "$K3_BIN/k3-fetch" --base "http://127.0.0.1:$HUB" --repo "$repo" --out "$OUT" --retry-delay 0.02 "$@" 3>&-
}
complete() { # everything is there, right, and nothing else
    local f
    for f in "$DEMO"/*; do
        case $f in */README.md | */expected.json) continue ;; esac
        cmp "$f" "$OUT/${f##*/}" || return 1
    done
    [ -z "$(find "$OUT" -name '*.part*' -o -name '*.wrong' -o -name '*.lock' -o -name '*.new')" ] || { ls "$OUT"; return 1; }
    [ "$(wc -l <"$OUT/k3-fetch.sha256")" -eq 9 ]
    (cd "$OUT" && sha256sum -c --quiet k3-fetch.sha256)
}
one_line() { # of stderr, beside progress and tries
    grep -v '; trying again in\|has no LICENSE' "$TMP/err" >"$TMP/line"
    cat "$TMP/err"
    [ "$(wc -l <"$TMP/line")" -eq 1 ]
}
fails() { # fails STATUS PATTERN FETCH-ARGUMENT...: one clear line
    local want=$1 pattern=$2 status=0
    shift 2
    fetch "$@" 2>"$TMP/err" || status=$?
    one_line
    grep -q -- "$pattern" "$TMP/line"
    [ "$status" -eq "$want" ]
}

@test "a repository comes whole, of one commit, and the family's tools read it; the second run reads and fetches nothing" {
    fetch x/good --revision main
    complete
    "$K3_BIN/k3ctl" verify --model "$OUT" --make
    grep -q 'HEAD /x/good/resolve/main/model.safetensors.index.json' "$LOG"
    grep '/resolve/main/' "$LOG" >"$TMP/main"
    refute grep -v 'HEAD .*index.json' "$TMP/main"
    : >"$LOG"
    run fetch x/good
    [ "$status" -eq 0 ]
    [[ "$output" == *"9 files of x/good"*"0 bytes of them fetched now"* ]]
    refute grep 'GET .*/model-' "$LOG"
}

@test "connections that drop at random points" {
    fetch x/drops --parallel 3
    complete
    grep -q 'GET .*bytes=[1-9].* "cdn-' "$LOG"
}

@test "429 with Retry-After and 503 are waited out" {
    SECONDS=0
    fetch x/busy
    complete
    [ "$SECONDS" -ge 1 ]
}

@test "a server that stalls" {
    fetch x/stall --stall 1
    complete
}

@test "a server that ignores Range sends the file anew" {
    fetch x/norange
    complete
    grep -q 'GET .*bytes=[1-9]' "$LOG"
}

@test "a range that begins elsewhere is not taken" {
    fetch x/shifted 2>"$TMP/err"
    complete
    grep -q 'sends another range' "$TMP/err"
}

@test "the file changes on the server in the middle" {
    fetch x/changes
    complete
    grep -q 'bytes=[1-9].* "older"' "$LOG"
}

@test "bodies with a wrong sum are fetched again; three times in a row end it with 4, and nothing wrong has a name" {
    fetch x/wronghash
    complete
    OUT=$TMP/never
    status=0
    fetch x/wrong 2>"$TMP/err" || status=$?
    cat "$TMP/err"
    [ "$status" -eq 4 ]
    tail -1 "$TMP/err" | grep -q '1 of 9 files did not come as announced.*model-00004.*the hub announces'
    [ ! -e "$OUT/model-00004-of-000004.safetensors" ]
    [ -e "$OUT/model-00003-of-000004.safetensors" ]
    refute grep model-00004 "$OUT/k3-fetch.sha256"
}

@test "more bytes than announced are cut off, fewer are not taken" {
    fetch x/longer 2>"$TMP/err"
    complete
    grep -q 'sends more than the' "$TMP/err"
    OUT=$TMP/shorter
    fetch x/shorter 2>"$TMP/err"
    complete
    grep -q 'sends .* bytes where .* are to come' "$TMP/err"
}

@test "the token goes to the hub and not to the host that it redirects to" {
    echo t0ken >"$TMP/token"
    fails 2 'mode 600' x/secret --token-file "$TMP/token"
    chmod 600 "$TMP/token"
    fails 1 'the hub refuses .*it may need a token' x/secret
    fetch x/secret --token-file "$TMP/token"
    complete
    grep -q '^hub GET .*Bearer t0ken' "$LOG"
    grep -q '^cdn GET' "$LOG"
    refute grep -i '^cdn.*bearer' "$LOG"
    OUT=$TMP/env
    HF_TOKEN=t0ken fetch x/secret
    complete
    HF_TOKEN=wrong fails 1 'the token may not read it' x/secret
    HF_TOKEN=$'t0ken\nX: y' fails 2 'the token has blanks' x/secret
}

@test "SIGKILL in the middle, again and again; SIGTERM says how to go on" {
    for n in 1 2; do
        "$K3_BIN/k3-fetch" --base "http://127.0.0.1:$HUB" --repo x/slow --out "$OUT" --parallel 2 2>/dev/null 3>&- &
        pid=$!
        for _ in {1..500}; do
            now=$(cat "$OUT"/*.part "$OUT"/*.safetensors 2>/dev/null | wc -c)
            [ "$now" -ge $((n * 1200000)) ] && break
            sleep 0.02
        done
        kill -KILL "$pid"
        wait "$pid" || [ $? -eq 137 ]
    done
    grep -q 'bytes=[1-9]' "$LOG"
    [ -n "$(find "$OUT" -name '*.part')" ]
    : >"$LOG"
    "$K3_BIN/k3-fetch" --base "http://127.0.0.1:$HUB" --repo x/slow --out "$OUT" 2>"$TMP/err" 3>&- &
    pid=$!
    for _ in {1..200}; do grep -q 'cdn GET' "$LOG" && break; sleep 0.02; done
    kill -TERM "$pid"
    status=0
    wait "$pid" || status=$?
    cat "$TMP/err"
    [ "$status" -eq 1 ]
    grep -q 'stopped; the same command goes on' "$TMP/err"
    fetch x/slow
    complete
}

@test "a part of another file, a longer one, and one that was damaged" {
    mkdir "$OUT"
    f=model-00001-of-000004.safetensors
    head -c 100000 "$DEMO/$f" >"$OUT/$f.part"                  # no tag: begun anew
    fetch x/good
    complete
    for damage in longer flipped; do
        OUT=$TMP/$damage
        mkdir "$OUT"
        head -c 100000 "$DEMO/$f" >"$OUT/$f.part"
        printf 'k3-fetch 1\n2 %s %s\n-\n' "$(sha256sum <"$DEMO/$f" | cut -c1-64)" "$(stat -c %s "$DEMO/$f")" >"$OUT/$f.part.tag"
        if [ $damage = longer ]; then cat "$DEMO/$f" "$DEMO/$f" >"$OUT/$f.part"; else printf x | dd of="$OUT/$f.part" bs=1 seek=5000 conv=notrunc status=none; fi
        fetch x/good
        complete
    done
    grep -q "GET .*$f bytes=100000-" "$LOG"
}

@test "a file that is there and wrong is set aside; --verify says so and changes nothing" {
    f=model-00002-of-000004.safetensors
    fetch x/good
    fetch x/good --verify
    printf x | dd of="$OUT/$f" bs=1 seek=5000 conv=notrunc status=none
    rm "$OUT/config.json"
    status=0
    fetch x/good --verify >"$TMP/out.txt" 2>"$TMP/err" || status=$?
    cat "$TMP/err"
    [ "$status" -eq 4 ]
    grep -q '^missing: config.json' "$TMP/out.txt"
    grep -q "$f has another sum" "$TMP/err"
    grep -q '1 files are wrong and 1 missing' "$TMP/err"
    [ ! -e "$OUT/config.json" ]
    fetch x/good >"$TMP/out.txt" 2>"$TMP/err"
    grep -q "now $f.wrong" "$TMP/err"
    grep -qF '1.2 MB of them fetched now' "$TMP/out.txt"
    rm "$OUT/$f.wrong"
    complete
    rm "$OUT/config.json"
    status=0
    fetch x/good --verify >/dev/null 2>&1 || status=$?
    [ "$status" -eq 1 ]
}

@test "--list says sizes and writes nothing; --layers takes a part, and it runs" {
    fetch x/good --list >"$TMP/list"
    cat "$TMP/list"
    [ "$(grep -c '^missing' "$TMP/list")" -eq 9 ]
    grep -q '^absent .* LICENSE' "$TMP/list"
    grep -q "$(stat -c %s "$DEMO/config.json")  config.json" "$TMP/list"
    [ ! -e "$OUT" ]
    fetch x/good --layers 1
    [ "$(find "$OUT" -name '*.safetensors' | wc -l)" -lt 4 ]
    "$K3_BIN/k3ctl" verify --model "$OUT" --layers 1 --make
    fetch x/good --also README.md --list | grep -q 'missing .* README.md'
}

@test "the released repository: sizes to the byte, before anything is fetched" {
    fetch moonshotai/Kimi-K3 --list >"$TMP/list"
    tail -1 "$TMP/list" | grep -q '1.56 TB\|1560.9. GB'
    touch "$BATS_FILE_TMPDIR/KIMI_WRONG"
    fails 4 'model-00050-of-000096.safetensors: the hub announces 16990916913 bytes, the released moonshotai/Kimi-K3 has 16990916912' moonshotai/Kimi-K3 --list
    rm "$BATS_FILE_TMPDIR/KIMI_WRONG"
    fails 2 'has room for .* bytes, .* are to be fetched: .* too few' moonshotai/Kimi-K3
    [ -z "$(find "$OUT" -name '*.part*')" ]
}

@test "what is refused: names, hubs, revisions, files without a sum" {
    fails 2 'puts a tensor into "../evil.safetensors"' x/names
    [ ! -e "$TMP/evil.safetensors" ]
    rm -r "$OUT"
    fails 2 'has no model-00002' x/gone
    fails 2 'http can be read and changed on the way' x/good --base http://example.org
    fails 2 'must be https://HOST' x/good --base ftp://127.0.0.1
    fails 2 'must be https://HOST' x/good --base http://user@127.0.0.1
    fails 2 'must be OWNER/NAME' ../x
    fails 2 'no plain file name' x/good --also ../../etc/passwd
    fails 2 'exclude each other' x/good --list --verify
    fails 1 'Could not resolve\|no-such-host' x/leap --retries 1
    fails 4 'the hub announces no sum' x/nosum
    refute fetch x/good --list 2>"$TMP/err" >/dev/full
    grep -q 'stdout cannot be written' "$TMP/err"
    fails 4 'it may have 1073741824' x/hugeindex --list
    head -c 600 /dev/zero | tr '\0' a >"$TMP/token"
    chmod 600 "$TMP/token"
    fails 2 'the token is too long' x/good --token-file "$TMP/token"
    fetch x/nosum --unsummed
    complete
}

@test "two at once in one directory" {
    mkdir "$OUT"
    exec 8>"$OUT/k3-fetch.lock"
    flock 8
    fails 2 'another k3-fetch is at work' x/good
    [ -e "$OUT/k3-fetch.lock" ]
    exec 8>&-
    fetch x/good
    complete
}

@test "a disk that is full is said in one line, and the same command goes on" {
    need_root
    mkdir "$OUT"
    mounted tmpfs size=2m "$OUT" bash -c "
        head -c 1m /dev/zero >'$OUT/ballast'
        '$K3_BIN/k3-fetch' --base http://127.0.0.1:$HUB --repo x/good --out '$OUT' 2>'$TMP/err'
        echo \$? >'$TMP/status'"
    cat "$TMP/err"
    [ "$(cat "$TMP/status")" -eq 2 ]
    mounted tmpfs size=64m "$OUT" bash -c "
        '$K3_BIN/k3-fetch' --base http://127.0.0.1:$HUB --repo x/slow --out '$OUT' 2>'$TMP/err' &
        until ls '$OUT'/model-*.part >/dev/null 2>&1; do sleep 0.02; done
        dd if=/dev/zero of='$OUT/ballast' bs=64k 2>/dev/null
        wait \$!
        echo \$? >'$TMP/status'
        rm '$OUT/ballast'
        '$K3_BIN/k3-fetch' --base http://127.0.0.1:$HUB --repo x/good --out '$OUT'
        cp -r '$OUT' '$TMP/kept'"
    cat "$TMP/err"
    [ "$(cat "$TMP/status")" -eq 1 ]
    grep -q 'no room left in .*; the same command goes on when there is' "$TMP/err"
    OUT=$TMP/kept
    complete
}
