#!/usr/bin/python3
"""A second implementation of the Kimi K3 forward pass, written only from spec/model.md, in numpy float64.

It shares nothing with the C code: its own safetensors reader, the expanded form of MLA (the program uses the absorbed one),
whole-matrix products, experts decoded to float64.  Slow and plain on purpose.

    k3ref.py --model DIR --ids 1,2,3 [--steps N] [--recompute]

prints one JSON object: logits of every prompt position, the greedy continuation, the smallest top-1 margin over the steps and
the smallest routing margin (distance between the last chosen and the first rejected biased score).
"""
import argparse
import glob
import json
import os
import struct

import numpy as np


class Checkpoint:
    def __init__(self, directory):
        self.where = {}
        for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
            with open(path, "rb") as f:
                (n,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(n))
            for name, entry in header.items():
                if name != "__metadata__":
                    self.where[name] = (path, 8 + n, entry)

    def raw(self, name):
        path, base, entry = self.where[name]
        begin, end = entry["data_offsets"]
        with open(path, "rb") as f:
            f.seek(base + begin)
            return entry["dtype"], entry["shape"], f.read(end - begin)

    def __contains__(self, name):
        return name in self.where

    def get(self, name):
        dtype, shape, data = self.raw(name)
        if dtype == "BF16":
            u = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            return u.view(np.float32).astype(np.float64).reshape(shape)
        return np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "U8": "u1"}[dtype]).reshape(shape).astype(np.float64)

    def mxfp4(self, name):
        _, shape, data = self.raw(name + ".weight_packed")
        packed = np.frombuffer(data, np.uint8).reshape(shape)
        _, sshape, sdata = self.raw(name + ".weight_scale")
        scale = np.frombuffer(sdata, np.uint8).reshape(sshape).astype(np.int64)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        w = np.empty((shape[0], shape[1] * 2))
        w[:, 0::2] = table[packed & 15]
        w[:, 1::2] = table[packed >> 4]
        factor = np.where(scale == 255, 0.0, np.ldexp(1.0, scale - 127))
        return w * np.repeat(factor, 32, axis=1)


def read_config(directory):
    with open(os.path.join(directory, "config.json")) as f:
        c = json.load(f)
    if "text_config" in c:
        t = c["text_config"]
        la = t["linear_attn_config"]
        t = dict(t, kda_heads=la["num_heads"], kda_dim=la["head_dim"], taps=la["short_conv_kernel_size"],
                 bound=la["gate_lower_bound"], full=la["full_attn_layers"], b1=t["activation_situ_beta"],
                 b2=t["activation_situ_linear_beta"])
    else:
        t = dict(c, kda_heads=c["kda_num_heads"], kda_dim=c["kda_head_dim"], taps=c["short_conv_kernel_size"],
                 bound=c["gate_lower_bound"], full=c["full_attn_layers"], b1=c["situ_beta"], b2=c["situ_linear_beta"])
    return t


def sigmoid(x):
    out = np.empty_like(x)
    pos = x >= 0
    out[pos] = 1 / (1 + np.exp(-x[pos]))
    e = np.exp(x[~pos])
    out[~pos] = e / (1 + e)
    return out


def rmsnorm(x, w, eps):
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


class Reference:
    def __init__(self, directory):
        self.c = read_config(directory)
        self.ck = Checkpoint(directory)
        self.cache = {}
        self.experts = {}
        self.p = "language_model.model."
        self.route_margin = np.inf

    def w(self, name):
        if name not in self.cache:
            self.cache[name] = self.ck.get(name)
        return self.cache[name]

    def layer_w(self, layer, name):
        return self.w(f"{self.p}layers.{layer}.{name}")

    def expert(self, layer, e):
        if (layer, e) not in self.experts:
            base = f"{self.p}layers.{layer}.block_sparse_moe.experts.{e}."
            self.experts[layer, e] = [self.ck.mxfp4(base + k) for k in ("w1", "w2", "w3")]
        return self.experts[layer, e]

    def situ(self, g, u):
        b1, b2 = self.c["b1"], self.c["b2"]
        return b1 * np.tanh(g / b1) * sigmoid(g) * b2 * np.tanh(u / b2)

    def attnres(self, sources, norm, proj):
        eps = self.c["rms_norm_eps"]
        f = self.w(norm) * self.w(proj).reshape(-1)
        x = np.stack(sources)                                    # [n][T][H]
        score = (x @ f) / np.sqrt(np.mean(x * x, axis=-1) + eps)  # [n][T]
        a = np.exp(score - score.max(axis=0))
        a /= a.sum(axis=0)
        return np.einsum("nt,nth->th", a, x)

    def kda(self, layer, x, state):
        c = self.c
        heads, dim, taps = c["kda_heads"], c["kda_dim"], c["taps"]
        T = x.shape[0]
        got = {}
        for name in "qkv":
            u = x @ self.layer_w(layer, f"self_attn.{name}_proj.weight").T
            full = np.concatenate([state["hist"].get(name, np.zeros((taps - 1, heads * dim))), u])
            w = self.layer_w(layer, f"self_attn.{name}_conv1d.weight").reshape(heads * dim, taps)
            y = sum(w[:, j] * full[j:j + T] for j in range(taps))
            state["hist"][name] = full[len(full) - (taps - 1):]
            got[name] = (y * sigmoid(y)).reshape(T, heads, dim)
        l2 = lambda v: v / np.sqrt(np.sum(v * v, axis=-1, keepdims=True) + 1e-6)
        q, k, v = l2(got["q"]) * dim ** -0.5, l2(got["k"]), got["v"]
        beta = sigmoid(x @ self.layer_w(layer, "self_attn.b_proj.weight").T)
        z = x @ self.layer_w(layer, "self_attn.f_a_proj.weight").T @ self.layer_w(layer, "self_attn.f_b_proj.weight").T
        a = np.exp(self.layer_w(layer, "self_attn.A_log")[:heads])[None, :, None]
        g = c["bound"] * sigmoid(a * (z + self.layer_w(layer, "self_attn.dt_bias")).reshape(T, heads, dim))
        alpha = np.exp(g)
        S = state["S"] if state["S"] is not None else np.zeros((heads, dim, dim))
        o = np.empty((T, heads, dim))
        for t in range(T):
            S = alpha[t][:, :, None] * S
            predicted = np.einsum("hi,hij->hj", k[t], S)
            S = S + k[t][:, :, None] * (beta[t][:, None] * (v[t] - predicted))[:, None, :]
            o[t] = np.einsum("hi,hij->hj", q[t], S)
        state["S"] = S
        gate = (x @ self.layer_w(layer, "self_attn.g_proj.weight").T).reshape(T, heads, dim)
        y = rmsnorm(o, self.layer_w(layer, "self_attn.o_norm.weight"), c["rms_norm_eps"]) * sigmoid(gate)
        return y.reshape(T, -1) @ self.layer_w(layer, "self_attn.o_proj.weight").T

    def mla(self, layer, x, state):
        c = self.c
        heads, nope, rope, vd, lat = (c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"],
                                      c["v_head_dim"], c["kv_lora_rank"])
        T, eps = x.shape[0], c["rms_norm_eps"]
        a = rmsnorm(x @ self.layer_w(layer, "self_attn.q_a_proj.weight").T,
                    self.layer_w(layer, "self_attn.q_a_layernorm.weight"), eps)
        q = (a @ self.layer_w(layer, "self_attn.q_b_proj.weight").T).reshape(T, heads, nope + rope)
        kva = x @ self.layer_w(layer, "self_attn.kv_a_proj_with_mqa.weight").T
        latent = rmsnorm(kva[:, :lat], self.layer_w(layer, "self_attn.kv_a_layernorm.weight"), eps)
        shared = kva[:, lat:]
        if state["latent"] is not None:
            latent = np.concatenate([state["latent"], latent])
            shared = np.concatenate([state["shared"], shared])
        state["latent"], state["shared"] = latent, shared
        kv = (latent @ self.layer_w(layer, "self_attn.kv_b_proj.weight").T).reshape(len(latent), heads, nope + vd)
        before = len(latent) - T
        o = np.empty((T, heads, vd))
        for t in range(T):
            n = before + t + 1
            s = np.einsum("hd,shd->hs", q[t][:, :nope], kv[:n, :, :nope]) + q[t][:, nope:] @ shared[:n].T
            s *= (nope + rope) ** -0.5
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            o[t] = np.einsum("hs,shd->hd", p, kv[:n, :, nope:])
        y = o.reshape(T, -1)
        if c.get("mla_use_output_gate", True):
            y = y * sigmoid(x @ self.layer_w(layer, "self_attn.g_proj.weight").T)
        return y @ self.layer_w(layer, "self_attn.o_proj.weight").T

    def mlp(self, layer, x, prefix):
        g = x @ self.layer_w(layer, prefix + "gate_proj.weight").T
        u = x @ self.layer_w(layer, prefix + "up_proj.weight").T
        return self.situ(g, u) @ self.layer_w(layer, prefix + "down_proj.weight").T

    def moe(self, layer, x):
        c, b = self.c, "block_sparse_moe."
        s = sigmoid(x @ self.layer_w(layer, b + "gate.weight").T)
        biased = s + self.layer_w(layer, b + "gate.e_score_correction_bias")
        k = c["num_experts_per_token"]
        z = x @ self.layer_w(layer, b + "routed_expert_down_proj.weight").T
        acc = np.zeros_like(z)
        for t in range(len(x)):
            order = np.lexsort((np.arange(len(biased[t])), -biased[t]))
            chosen = order[:k]
            if k < len(order):
                self.route_margin = min(self.route_margin, biased[t][order[k - 1]] - biased[t][order[k]])
            weights = s[t][chosen]
            if c.get("moe_renormalize", True):
                weights = weights / (weights.sum() + 1e-20)
            weights = weights * c.get("routed_scaling_factor", 1.0)
            for e, weight in zip(chosen, weights):
                w1, w2, w3 = self.expert(layer, int(e))
                acc[t] += weight * (w2 @ self.situ(w1 @ z[t], w3 @ z[t]))
        if c.get("latent_moe_use_norm", True):
            acc = rmsnorm(acc, self.layer_w(layer, b + "routed_expert_norm.weight"), c["rms_norm_eps"])
        routed = acc @ self.layer_w(layer, b + "routed_expert_up_proj.weight").T
        return routed + self.mlp(layer, x, b + "shared_experts.")

    def new_state(self):
        return [{"hist": {}, "S": None, "latent": None, "shared": None} for _ in range(self.c["num_hidden_layers"])]

    def forward(self, ids, state):
        c, eps = self.c, self.c["rms_norm_eps"]
        h = self.w(self.p + "embed_tokens.weight")[ids]
        snapshots = []
        for layer in range(c["num_hidden_layers"]):
            lp = f"{self.p}layers.{layer}."
            p = h
            if snapshots:
                h = self.attnres(snapshots + [p], lp + "self_attention_res_norm.weight",
                                 lp + "self_attention_res_proj.weight")
            if layer % c["attn_res_block_size"] == 0:
                snapshots.append(p)
                p = None
            x = rmsnorm(h, self.w(lp + "input_layernorm.weight"), eps)
            a = (self.mla if layer + 1 in c["full"] else self.kda)(layer, x, state[layer])
            p = a if p is None else p + a
            h = self.attnres(snapshots + [p], lp + "mlp_res_norm.weight", lp + "mlp_res_proj.weight")
            x = rmsnorm(h, self.w(lp + "post_attention_layernorm.weight"), eps)
            m = self.mlp(layer, x, "mlp.") if layer < c["first_k_dense_replace"] else self.moe(layer, x)
            h = p + m
        h = self.attnres(snapshots + [h], self.p + "output_attn_res_norm.weight", self.p + "output_attn_res_proj.weight")
        return rmsnorm(h, self.w(self.p + "norm.weight"), eps) @ self.w("language_model.lm_head.weight").T

    def greedy(self, ids, steps, recompute=False):
        state = self.new_state()
        prompt_logits = self.forward(np.array(ids), state)
        logits, out, margin, last = prompt_logits[-1], [], np.inf, []
        for step in range(steps):
            best = int(np.argmax(logits))
            ordered = np.sort(logits)
            margin = min(margin, (ordered[-1] - ordered[-2]) if len(ordered) > 1 else np.inf)
            out.append(best)
            last.append(logits)
            if step + 1 < steps:
                if recompute:
                    logits = self.forward(np.array(list(ids) + out), self.new_state())[-1]
                else:
                    logits = self.forward(np.array([best]), state)[-1]
        return prompt_logits, out, margin, last


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True)
    a.add_argument("--ids", required=True)
    a.add_argument("--steps", type=int, default=1)
    a.add_argument("--recompute", action="store_true")
    o = a.parse_args()
    ids = [int(x) for x in o.ids.split(",")]
    r = Reference(o.model)
    prompt_logits, out, margin, _ = r.greedy(ids, o.steps, o.recompute)
    print(json.dumps({"logits": prompt_logits.tolist(), "generated_ids": out, "top1_margin": float(margin),
                      "route_margin": float(r.route_margin)}))


if __name__ == "__main__":
    main()
