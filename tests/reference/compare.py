#!/usr/bin/python3
"""Compares the program's forward pass (tests/probe/pass_probe) with the float64 reference on one checkpoint.

    compare.py PROBE MODEL IDS STEPS [BATCH_ROWS]

Same greedy tokens over STEPS steps, and for every prompt position max|d logit| <= 1e-4 * max|logit|.  The comparison is only
meaningful where nothing is decided by rounding: the top-1 and routing margins of the reference must exceed 1e-5, otherwise
the seed was badly chosen and this fails, too.
"""
import json
import subprocess
import sys

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import k3ref  # noqa: E402

probe, model, ids, steps = sys.argv[1:5]
rows = sys.argv[5] if len(sys.argv) > 5 else "64"
steps = int(steps)
prompt = [int(x) for x in ids.split(",")]
out = json.loads(subprocess.run([probe, "--model", model, "--ids", ids, "--steps", str(steps), "--batch-rows", rows,
                                 "--logits", "all"], check=True, capture_output=True, text=True).stdout)
reference = k3ref.Reference(model)
logits, tokens, margin, _ = reference.greedy(prompt, steps)
mine = np.array([row["logits"] if isinstance(row, dict) else row for row in out["logits"]])[:len(prompt)]
assert mine.shape == logits.shape, (mine.shape, logits.shape)
worst = np.abs(mine - logits).max() / np.abs(logits).max()
top1 = margin / np.abs(logits).max()
print("worst %.2e of the largest logit; top-1 margin %.2e, routing margin %.2e" % (worst, margin, reference.route_margin))
assert margin > 1e-5 and reference.route_margin > 1e-5, "a margin is too small: choose another seed"
assert out["generated_ids"] == tokens, (out["generated_ids"], tokens)
assert worst <= 1e-4, worst
assert np.isfinite(mine).all()
again, tokens2, _, _ = reference.greedy(prompt, min(steps, 8), recompute=True)
assert tokens2 == tokens[:min(steps, 8)], "carried state and recomputation of the reference differ"
