/* What the statistics say: values, and rates as differences of counters.  Pure.
 *
 * A sample is a reply of /v1/k3/stats.  A daemon that is not alive has no data, whatever its page still says; a counter of
 * another generation, or one that fell, begins anew. */
const SECOND = 1e9;

export class History {
    constructor(keep_s = 200) {
        this.keep_ns = keep_s * SECOND;
        this.samples = [];
    }

    push(sample) {
        const last = this.samples.at(-1);
        if (last && sample.now_ns <= last.now_ns) /* the machine was started again */
            this.samples = [];
        this.samples.push(sample);
        while (this.samples.length > 2 && sample.now_ns - this.samples[1].now_ns > this.keep_ns)
            this.samples.shift();
    }

    get latest() {
        return this.samples.at(-1) ?? null;
    }

    /* The newest that is at least span_s old, else the oldest. */
    before(span_s) {
        const now = this.latest?.now_ns;
        return this.samples.findLast((s) => now - s.now_ns >= span_s * SECOND * 0.9) ?? this.samples[0] ?? null;
    }

    /* The same of those that have `part` of the machine. */
    flowBefore(part, span_s) {
        const now = this.latest?.now_ns;
        const with_part = this.samples.filter((s) => s.machine?.[part]);
        return (with_part.findLast((s) => now - s.now_ns >= span_s * SECOND * 0.9) ?? with_part[0])?.machine[part] ?? null;
    }

    value(daemon, name) {
        return valueIn(this.latest, daemon, name);
    }

    /* {delta, seconds} since about span_s ago, or null. */
    change(daemon, name, span_s) {
        const a = this.before(span_s), b = this.latest;
        if (!a || a === b || !same(a, b, daemon))
            return null;
        const from = valueIn(a, daemon, name), to = valueIn(b, daemon, name);
        return from === null || to === null || to < from ? null : { delta: to - from, seconds: (b.now_ns - a.now_ns) / SECOND };
    }

    rate(daemon, name, span_s = 3) {
        const c = this.change(daemon, name, span_s);
        return c && c.seconds > 0 ? c.delta / c.seconds : null;
    }
}

function valueIn(sample, daemon, name) {
    const d = sample?.daemons?.[daemon];
    const v = d?.alive ? d.stats?.[name]?.value : undefined;
    return typeof v === "number" ? v : null;
}

function same(a, b, daemon) {
    const x = a.daemons?.[daemon], y = b.daemons?.[daemon];
    return Boolean(x && y && x.pid === y.pid && x.generation === y.generation);
}

/* ---- drives ---- */

/* [{name, fs, users, rate (null: not known yet), limit (0: not measured), from, bytes}], each drive once. */
export function drives(history, span_s = 4) {
    const now = history.latest;
    const out = new Map();
    for (const part of ["trunk", "experts"]) {
        for (const d of now?.machine?.[part]?.drives ?? []) {
            const o = out.get(d.name) ?? { name: d.name, fs: d.fs, users: [], rate: null, limit: 0, from: d.rate_from, bytes: 0 };
            out.set(d.name, o);
            o.users.push(part === "trunk" ? "k3-trunkd" : "k3-expertd");
            o.limit = Math.max(o.limit, d.bytes_per_s);
            o.bytes += d.read_bytes;
            const rate = driveRate(history.flowBefore(part, span_s), now.machine[part], d);
            if (rate !== null)
                o.rate = (o.rate ?? 0) + rate;
        }
    }
    return [...out.values()];
}

function driveRate(before, now, d) {
    const old = before?.drives?.find((x) => x.name === d.name);
    const seconds = before ? (now.at_ns - before.at_ns) / SECOND : 0;
    return old && seconds > 0 && d.read_bytes >= old.read_bytes ? (d.read_bytes - old.read_bytes) / seconds : null;
}

/* ---- experts by layer ---- */

/* [{demands, hits, share (null: none demanded)}] by layer, since the start or in the last span_s; null: no data. */
export function layerHits(history, span_s = null) {
    const now = history.latest?.machine?.experts;
    if (!now?.layer_demands)
        return null;
    const old = span_s === null ? null : history.flowBefore("experts", span_s);
    if (span_s !== null && !old?.layer_demands)
        return null;
    return now.layer_demands.map((n, i) => {
        const demands = n - (old?.layer_demands[i] ?? 0), hits = now.layer_hits[i] - (old?.layer_hits[i] ?? 0);
        return demands < 0 ? { demands: n, hits: now.layer_hits[i], share: n ? now.layer_hits[i] / n : null }
            : { demands, hits, share: demands ? hits / demands : null };
    });
}

/* ---- the state of a daemon ---- */

export const DAEMONS = ["k3-trunkd", "k3-expertd", "k3-computed", "k3-router"];
const SILENT_NS = 5e9;

/* {ok, word, text, generation}.  word is short; text may have the reason. */
export function life(sample, daemon) {
    const m = sample?.machine?.members?.[daemon], d = sample?.daemons?.[daemon];
    const generation = d?.generation ?? null;
    if (!m)
        return { ok: false, word: "no data", text: "no data", generation: null };
    if (m.failed)
        return { ok: false, word: "failed", text: m.reason ? `failed: ${m.reason}` : "failed", generation };
    if (!m.alive)
        return { ok: false, word: "not running", text: "not running; it is being started again, or was stopped", generation };
    if (d && d.heartbeat_age_ns > SILENT_NS)
        return { ok: false, silent: true, word: "does not respond", text: `does not respond: last heartbeat ${Math.round(d.heartbeat_age_ns / SECOND)} s ago`, generation };
    return { ok: d?.state === "ready", word: d?.state ?? "no data", text: d?.state ?? "no data", generation };
}

/* ---- memory ---- */

/* [{part, bytes, of}] of: what it grows to, or null; bytes null: no data. */
export function memory(history) {
    const v = (d, n) => history.value(d, n);
    const times = (a, b) => (a === null || b === null ? null : a * b);
    const members = history.latest?.machine?.members ?? {};
    const slot = v("k3-expertd", "slot_bytes");
    const out = [
        { part: "trunk ring", bytes: v("k3-trunkd", "ring_bytes"), of: null },
        { part: "pinned trunk", bytes: v("k3-trunkd", "pinned_loaded_bytes"), of: v("k3-trunkd", "pinned_bytes") },
        { part: "resident tensors", bytes: v("k3-trunkd", "resident_bytes"), of: null },
        { part: "experts", bytes: times(v("k3-expertd", "slots_ready"), slot), of: times(v("k3-expertd", "slots"), slot) },
    ];
    for (const name of [...DAEMONS].reverse())
        out.push({ part: `${name} itself`, bytes: members[name]?.private_bytes ?? null, of: null });
    return out;
}

/* ---- all of it, for the view ---- */

/* A token of the real model takes many seconds: while one is being made, all that is remembered counts. */
function tokenRate(history) {
    const recent = history.rate("k3-computed", "tokens_generated", 5);
    return recent === 0 && history.value("k3-computed", "sequences_running") ? history.rate("k3-computed", "tokens_generated", 200) : recent;
}

export function summarize(history) {
    const v = (d, n) => history.value(d, n), r = (d, n) => history.rate(d, n);
    const m = history.latest?.machine ?? {};
    const passes = history.change("k3-computed", "passes", 10), pass_ns = history.change("k3-computed", "pass_ns", 10);
    const demands = v("k3-expertd", "demands"), hits = v("k3-expertd", "hits");
    const expert_rate = r("k3-expertd", "demands"), slot = v("k3-expertd", "slot_bytes");
    const trunk_read = r("k3-trunkd", "read_bytes"), expert_read = r("k3-expertd", "read_bytes");
    return {
        layers: m.layers ?? 0, layers_model: m.layers_model ?? 0, model: m.model ?? "", ctx: m.ctx ?? 0, sequences: m.sequences ?? 0,
        threads: m.threads ?? 0, kernels: m.kernels ?? "", promised: m.promised_bytes || null,
        layer: v("k3-computed", "layer"), waiting: v("k3-computed", "waiting"),
        tokens_per_s: tokenRate(history),
        tokens: v("k3-computed", "tokens_generated"), prompt_tokens: v("k3-computed", "prompt_tokens"),
        passes: v("k3-computed", "passes"),
        pass_s: passes?.delta && pass_ns ? pass_ns.delta / passes.delta / SECOND : null,
        pass_mean_s: v("k3-computed", "passes") ? v("k3-computed", "pass_ns") / v("k3-computed", "passes") / SECOND : null,
        hit_share: demands ? hits / demands : null, demands, hits,
        running: v("k3-router", "answers_running"), queued: v("k3-router", "answers_queued"),
        sequences_running: v("k3-computed", "sequences_running"), sequences_queued: v("k3-computed", "sequences_queued"),
        positions: v("k3-computed", "positions"),
        trunk_read, expert_read, read: trunk_read === null && expert_read === null ? null : (trunk_read ?? 0) + (expert_read ?? 0),
        ring_rows: r("k3-computed", "ring_row_bytes"), pinned_rows: r("k3-computed", "pinned_row_bytes"),
        expert_rows: expert_rate === null || slot === null ? null : expert_rate * slot,
        ring: v("k3-trunkd", "ring_bytes"), ring_filled: m.trunk?.ring_filled_bytes ?? null,
        pinned: v("k3-trunkd", "pinned_bytes"), pinned_loaded: v("k3-trunkd", "pinned_loaded_bytes"),
        slots: v("k3-expertd", "slots"), slots_ready: v("k3-expertd", "slots_ready"), slots_lent: v("k3-expertd", "slots_lent"), slot,
        trunk_flight: v("k3-trunkd", "in_flight"), expert_flight: v("k3-expertd", "in_flight"),
        drives: drives(history),
        life: Object.fromEntries(DAEMONS.map((d) => [d, life(history.latest, d)])),
    };
}

/* ---- numbers as text ---- */

export const NO_DATA = "no data";

export function bytesText(v) {
    if (v === null)
        return NO_DATA;
    const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
    for (const [size, unit] of units)
        if (v >= size)
            return `${(v / size).toFixed(v / size < 10 ? 2 : v / size < 100 ? 1 : 0)} ${unit}`;
    return `${Math.round(v)} B`;
}

export const rateText = (v) => (v === null ? NO_DATA : `${bytesText(v)}/s`);
export const countText = (v) => (v === null ? NO_DATA : Math.round(v).toLocaleString("en"));
export const shareText = (v) => (v === null ? NO_DATA : `${(100 * v).toFixed(v > 0 && v < 0.1 ? 1 : 0)} %`);

/* Of tokens: a real model makes a few a minute. */
export function speedText(v) {
    return v === null ? NO_DATA : v === 0 ? "0" : v >= 100 ? v.toFixed(0) : v >= 1 ? v.toFixed(1) : v.toPrecision(2);
}

export function secondsText(v) {
    return v === null ? NO_DATA : v >= 10 ? `${v.toFixed(0)} s` : v >= 1 ? `${v.toFixed(1)} s` : v >= 0.01 ? `${(1000 * v).toFixed(0)} ms` : `${(1000 * v).toFixed(1)} ms`;
}
