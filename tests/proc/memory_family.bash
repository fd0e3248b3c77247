# memory_family.bash OUT OPTION...: starts the family with these options of `k3-run up`, asks the demo model, writes ids,
# logits and what `info` says of each member into OUT, and stops it.  A script of its own, since memory.bats runs it as
# another user, in namespaces and under filters.  INSTANCE, K3_BIN and K3_BUILD come with the environment.
set -eu
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
SLOW=1
case $K3_BUILD in *asan* | *ubsan* | *tsan*) SLOW=6 ;; esac
OUT=$1
shift
export XDG_RUNTIME_DIR=$OUT/run XDG_CACHE_HOME=$OUT/cache
mkdir -p "$XDG_RUNTIME_DIR"
trap '"$ROOT/run/k3-run" down --instance "$INSTANCE" >/dev/null 2>&1' EXIT
"$ROOT/run/k3-run" up --instance "$INSTANCE" --bin-dir "$K3_BIN" --ctx 256 --threads 1 "$@"
echo "The capital of France is" | timeout $((120 * SLOW)) "$K3_BIN/k3-router" --instance "$INSTANCE" --state-dir "$OUT/state" \
    --raw --max-tokens 12 --json --logits "$OUT/logits" >"$OUT/answer.json"
jq -c .generated_ids "$OUT/answer.json" >"$OUT/ids"
for d in trunkd expertd; do
    "$K3_BIN/k3ctl" --instance "$INSTANCE" info "$d" --json | jq ".[\"k3-$d\"] // ." >"$OUT/$d.json"
    cp "$XDG_RUNTIME_DIR/k3/$INSTANCE/k3-$d.log" "$OUT/$d.log"
done
"$ROOT/run/k3-run" down --instance "$INSTANCE"
trap - EXIT
[ -z "$(find /dev/shm -maxdepth 1 -name "k3.*.$INSTANCE.*")" ]
[ ! -e "$XDG_RUNTIME_DIR/k3" ]
