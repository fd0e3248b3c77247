# The user guide says what the programs do: its commands have only options that exist, its messages are those of the sources.
load helpers

@test "the options of every command in the guide exist" {
    python3 - "$ROOT" "$K3_BIN" <<'PY'
import glob, re, subprocess, sys
root, bins = sys.argv[1:]
helps, bad, n = {}, 0, 0
def options(program, part):
    if (program, part) not in helps:
        where = f"{root}/run/k3-run" if program == "k3-run" else f"{bins}/{program}"
        words = [where] + ([part] if program == "k3-bench" and part else []) + ["--help"]
        text = subprocess.run(words, capture_output=True, text=True).stdout
        helps[program, part] = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    return helps[program, part]
for path in glob.glob(root + "/docs/user/*.md") + [root + "/README.md"]:
    for block in re.findall(r"^```\n(.*?)^```", open(path).read(), re.S | re.M):
        block = block.replace("\\\n", " ")
        for line in block.splitlines():
            line = re.sub(r"(^| )#.*", "", line)
            for piece in re.split(r"[|;]|&&", line):
                m = re.search(r"(?:^|(?<![=/])bin/|(?<![=/])run/|\s)(k3-[a-z]+|k3ctl)(?=\s|$)(.*)", piece)
                if not m:
                    continue
                words = m[2].split()
                part = words[0] if words and not words[0].startswith("-") else ""
                for o in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", m[2]):
                    n += 1
                    if o not in options(m[1], part):
                        bad += 1
                        print(f"{path}: {piece.strip()}: {m[1]} has no {o}")
print(n, "options")
sys.exit(bad or n < 60)
PY
}

@test "every message of troubleshooting.md is in the sources" {
    python3 - "$ROOT" <<'PY'
import glob, re, sys
root = sys.argv[1]
text = ""
for pattern in ("*/*.c", "*/*.h", "run/k3-run", "run/supervisor.bash"):
    for path in glob.glob(f"{root}/{pattern}"):
        if "/tests/" not in path:
            text += open(path).read()
text = re.sub(r'"\s*K3_SUMS_NAME\s*"', "k3.sums", text)
text = re.sub(r'"\s*(?:PRI[ux]\d*|K3_[A-Z_]*|SHM_DIR)?\s*"', "", text)   # pieces of one string
text = text.replace('\\"', '"')
bad = n = 0
for line in open(root + "/docs/user/troubleshooting.md"):
    if not line.startswith("|"):
        continue
    for span in re.findall(r"`([^`]*)`", line.split("|")[1]):
        event = re.match(r"event=([a-z_]*)", span)
        pieces = ['"%s"' % event[1]] if event else [p.strip(" :;,()") for p in span.split("…")]
        for p in pieces:
            if len(p) < 6:
                continue
            n += 1
            flat = re.sub(r"^(k3-run|k3-fetch): ", "", p)
            if flat not in text and not re.search(re.escape(flat).replace(r"\ 429", " %ld").replace(r"\ 503", " %ld"), text):
                bad += 1
                print("not in the sources:", p)
print(n, "pieces of messages")
sys.exit(bad or n < 40)
PY
}

@test "the files that the guide names are there, and every page is in its index" {
    cd "$ROOT/docs/user"
    for f in *.md; do
        [ "$f" = README.md ] || grep -q "\`$f\`" README.md || { echo "$f is not in README.md"; return 1; }
    done
    grep -oh '`[a-z-]*\.md`' README.md ../README.md | tr -d '`' | sort -u | grep -vx design.md | while read -r f; do
        [ -e "$f" ] || [ -e "../$f" ] || { echo "no $f"; return 1; }
    done
}
