/* The family as a picture: boxes, and lines along which dots move as fast as bytes do. */
import { svg } from "./render.js";
import { bytesText, countText, rateText, shareText, speedText, NO_DATA } from "./rates.js";

/* x, y, w, h in px of the view box.  shared is a frame around three. */
const WIDE = { view: [1120, 322], drive: { x: 0, y: 0, w: 178, h: 322 },
    trunkd: { x: 238, y: 78, w: 178, h: 88 }, expertd: { x: 238, y: 222, w: 178, h: 88 },
    shared: { x: 476, y: 0, w: 226, h: 322 }, pinned: { x: 488, y: 30, w: 202, h: 88 }, ring: { x: 488, y: 126, w: 202, h: 88 },
    arena: { x: 488, y: 222, w: 202, h: 88 }, computed: { x: 762, y: 117, w: 166, h: 88 }, router: { x: 988, y: 117, w: 132, h: 88 } };
const NARROW = { view: [340, 574], drive: { x: 0, y: 0, w: 340, h: 88 },
    trunkd: { x: 0, y: 120, w: 164, h: 80 }, expertd: { x: 176, y: 120, w: 164, h: 80 },
    shared: { x: 0, y: 232, w: 340, h: 222 }, pinned: { x: 14, y: 260, w: 148, h: 88 }, ring: { x: 14, y: 356, w: 148, h: 88 },
    arena: { x: 178, y: 260, w: 152, h: 184 }, computed: { x: 0, y: 486, w: 196, h: 88 }, router: { x: 228, y: 486, w: 112, h: 88 } };
/* Where boxes lie above one another the lines go around them. */
const AROUND = { "trunkd ring": "M24 200C24 222 6 216 6 240V384Q6 400 14 400", "pinned computed": "M162 304Q170 304 170 316V448C170 470 98 464 98 486",
    "ring computed": "M88 444C88 468 60 464 60 486", "arena computed": "M254 444C254 472 136 460 136 486" };
const LINE = 18;
const GAP = 12;

export class Picture {
    constructor(into) {
        this.into = into;
        this.key = "";
        this.flows = [];
        this.frame = 0;
        this.last = 0;
        this.still = matchMedia("(prefers-reduced-motion: reduce)");
        this.resized = new ResizeObserver(() => this.summary && this.update(this.summary));
        this.resized.observe(into);
    }

    /* Starts or ends the movement. */
    move(on) {
        cancelAnimationFrame(this.frame);
        this.frame = 0;
        this.last = 0;
        if (on)
            this.frame = requestAnimationFrame((t) => this.step(t));
    }

    step(t) {
        const dt = this.last ? Math.min(0.1, (t - this.last) / 1000) : 0;
        this.last = t;
        if (!this.still.matches)
            for (const f of this.flows) {
                f.offset = (f.offset - f.speed * dt) % 1200;
                f.dots.setAttribute("stroke-dashoffset", f.offset.toFixed(1));
            }
        this.frame = requestAnimationFrame((x) => this.step(x));
    }

    update(s) {
        this.summary = s;
        const wide = this.into.clientWidth >= 760;
        const names = s.drives.map((d) => d.name).slice(0, 4);
        const key = `${wide} ${names.join(" ")} ${s.drives.map((d) => d.users.join()).join()}`;
        if (key !== this.key)
            this.build(wide ? WIDE : NARROW, wide, s.drives.slice(0, 4));
        this.key = key;
        this.fill(s);
    }

    build(at, wide, drives) {
        const [w, h] = at.view;
        this.nodes = {};
        this.flows = [];
        this.lines = svg("g", { class: "lines" });
        this.boxes = svg("g", { class: "boxes" });
        const f = at.shared;
        this.root = svg("svg", { viewBox: `-2 -2 ${w + 4} ${h + 4}`, role: "img", class: wide ? "family wide" : "family" },
                        svg("rect", { x: f.x, y: f.y, width: f.w, height: f.h, rx: 14, class: "frame" }), this.lines, this.boxes,
                        svg("text", { x: f.x + 14, y: f.y + 19, class: "caption" }, "shared memory"));
        this.drives(at.drive, wide, drives);
        for (const [id, title] of [["trunkd", "k3-trunkd"], ["expertd", "k3-expertd"], ["pinned", "pinned trunk"], ["ring", "trunk ring"],
                                   ["arena", "experts"], ["computed", "k3-computed"], ["router", "k3-router"]])
            this.node(id, at[id], title);
        this.connect(wide, drives);
        this.into.replaceChildren(this.root);
    }

    drives(at, wide, drives) {
        const n = Math.max(1, drives.length);
        const h = wide ? Math.min(88, (at.h - GAP * (n - 1)) / n) : at.h, w = wide ? at.w : (at.w - GAP * (n - 1)) / n;
        const top = wide ? at.y + (at.h - n * h - (n - 1) * GAP) / 2 : at.y;
        for (let i = 0; i < n; i++)
            this.node(`drive${i}`, { x: wide ? at.x : at.x + i * (w + GAP), y: wide ? top + i * (h + GAP) : at.y, w, h }, drives[i]?.name ?? "drive");
    }

    node(id, at, title) {
        const lines = [0, 1].map((i) => svg("text", { x: at.x + 14, y: at.y + 44 + i * LINE, class: "value" }));
        const bar = svg("rect", { x: at.x + 14, y: at.y + at.h - 13, width: 0, height: 5, rx: 2.5, class: `fill ${id.replace(/\d/, "")}` });
        const track = svg("rect", { x: at.x + 14, y: at.y + at.h - 13, width: at.w - 28, height: 5, rx: 2.5, class: "track" });
        const mark = svg("circle", { cx: at.x + at.w - 16, cy: at.y + 20, r: 4.5, class: "mark" });
        const name = svg("text", { x: at.x + 14, y: at.y + 25, class: "title" }, title);
        this.boxes.append(svg("g", { class: `box ${id.replace(/\d/, "")}` },
                              svg("rect", { x: at.x, y: at.y, width: at.w, height: at.h, rx: 11, class: "plate" }), name, ...lines, track, bar, mark));
        this.nodes[id] = { at, lines, bar, track, mark, name };
    }

    connect(wide, drives) {
        const users = (i, d) => !drives[i] || drives[i].users.includes(d);
        for (let i = 0; i < Math.max(1, drives.length); i++) {
            if (users(i, "k3-trunkd"))
                this.flow(`drive${i}`, "trunkd", "trunk_read", "trunk", wide);
            if (users(i, "k3-expertd"))
                this.flow(`drive${i}`, "expertd", "expert_read", "expert", wide);
        }
        this.flow("trunkd", "pinned", "to_pinned", "trunk", wide);
        this.flow("trunkd", "ring", "to_ring", "trunk", wide);
        this.flow("expertd", "arena", "expert_read", "expert", wide);
        this.flow("pinned", "computed", "pinned_rows", "trunk", wide);
        this.flow("ring", "computed", "ring_rows", "trunk", wide);
        this.flow("arena", "computed", "expert_rows", "expert", wide);
        this.flow("computed", "router", "tokens", "token", true);
    }

    flow(from, to, rate, kind, wide) {
        const a = this.nodes[from].at, b = this.nodes[to].at;
        const d = wide ? across(a, b) : AROUND[`${from} ${to}`] ?? down(a, b);
        const dots = svg("path", { d, class: `dots ${kind}`, "stroke-dasharray": "0.1 11.9", "stroke-dashoffset": 0 });
        this.lines.append(svg("path", { d, class: "wire" }), dots);
        this.flows.push({ rate, dots, speed: 0, offset: 0 });
    }

    /* ---- values ---- */

    put(id, lines, share, life) {
        const n = this.nodes[id];
        n.lines.forEach((t, i) => { t.textContent = lines[i] ?? ""; });
        const has = share !== null && share !== undefined;
        n.track.setAttribute("visibility", has ? "visible" : "hidden");
        n.bar.setAttribute("visibility", has ? "visible" : "hidden");
        n.bar.setAttribute("width", has ? Math.max(0, Math.min(1, share)) * (n.at.w - 28) : 0);
        n.mark.setAttribute("class", life ? `mark ${life.ok ? "good" : "bad"}` : "mark none");
    }

    fill(s) {
        const daemon = (id, name, lines, share) => {
            const l = s.life[name];
            this.put(id, l.ok ? lines : l.silent ? [l.word, lines[0]] : [l.word], l.ok ? share : null, l);
        };
        for (let i = 0; this.nodes[`drive${i}`]; i++) {
            const d = s.drives[i];
            const limit = !d ? "" : d.limit ? `of ${rateText(d.limit)}` : "limit not measured";
            this.put(`drive${i}`, [d ? rateText(d.rate) : NO_DATA, limit], d?.limit && d.rate !== null ? d.rate / d.limit : null, null);
        }
        daemon("trunkd", "k3-trunkd", [`reads ${rateText(s.trunk_read)}`, `${countText(s.trunk_flight)} in flight`], null);
        daemon("expertd", "k3-expertd", [`reads ${rateText(s.expert_read)}`, `hits ${shareText(s.hit_share)}`], null);
        this.put("pinned", s.pinned === null ? [NO_DATA] : [bytesText(s.pinned_loaded), `used ${rateText(s.pinned_rows)}`], ratio(s.pinned_loaded, s.pinned), null);
        this.put("ring", s.ring === null ? [NO_DATA] : [`${s.ring_filled === null ? "?" : bytesText(s.ring_filled)} of ${bytesText(s.ring)}`, `used ${rateText(s.ring_rows)}`],
                 ratio(s.ring_filled, s.ring), null);
        this.put("arena", s.slots === null ? [NO_DATA] : [`${countText(s.slots_ready)} of ${countText(s.slots)} slots`, `used ${rateText(s.expert_rows)}`],
                 ratio(s.slots_ready, s.slots), null);
        daemon("computed", "k3-computed", [this.doing(s), `${speedText(s.tokens_per_s)} tokens/s`], s.sequences_running && s.layers ? s.layer / s.layers : 0);
        daemon("router", "k3-router", [`${countText(s.running)} running`, `${countText(s.queued)} queued`], null);
        for (const f of this.flows)
            this.pace(f, s);
        this.root.setAttribute("aria-label", spoken(s));
    }

    doing(s) {
        return !s.sequences_running ? "idle" : `layer ${s.layer} of ${s.layers}${["", ", waits", ", waits"][s.waiting] ?? ""}`;
    }

    pace(f, s) {
        const pinning = s.pinned_loaded !== null && s.pinned_loaded < s.pinned;
        const rate = { to_ring: pinning && !s.ring_rows ? 0 : s.trunk_read, to_pinned: pinning ? s.trunk_read : 0,
                       tokens: (s.tokens_per_s ?? 0) * 1e6 }[f.rate] ?? s[f.rate] ?? 0;
        f.speed = rate > 0 ? 14 + 22 * Math.log10(1 + rate / 1e5) : 0;
        f.dots.setAttribute("visibility", rate > 0 ? "visible" : "hidden");
    }
}

function ratio(a, b) {
    return a === null || !b ? null : a / b;
}

/* From the right side of a to the left side of b; from the bottom to the top. */
function across(a, b) {
    const x1 = a.x + a.w, y1 = a.y + a.h / 2, x2 = b.x, y2 = b.y + b.h / 2, m = (x1 + x2) / 2;
    return `M${x1} ${y1}C${m} ${y1} ${m} ${y2} ${x2} ${y2}`;
}
function down(a, b) {
    const x1 = a.x + a.w / 2, y1 = a.y + a.h, x2 = b.x + b.w / 2, y2 = b.y, m = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${m} ${x2} ${m} ${x2} ${y2}`;
}

function spoken(s) {
    return `The family: drives read ${rateText(s.read)}; the ring holds ${bytesText(s.ring_filled)} of ${bytesText(s.ring)}; ` +
        `${countText(s.slots_ready)} of ${countText(s.slots)} expert slots are in use; ${speedText(s.tokens_per_s)} tokens a second. The table below has all of it.`;
}
