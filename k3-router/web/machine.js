/* The machine: asks for the statistics once a second while it is looked at, and shows them. */
import { getJson } from "./api.js";
import { Layers } from "./layers.js";
import { Picture } from "./picture.js";
import { el } from "./render.js";
import { DAEMONS, History, NO_DATA, bytesText, countText, layerHits, memory, rateText, secondsText, shareText, speedText, summarize } from "./rates.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000, RETRY_MS = 2000, RECENT_S = 30;

export function startMachine(page) {
    const view = new Machine(page);
    return { show: (on) => view.show(on) };
}

class Machine {
    constructor({ withKey }) {
        this.withKey = withKey;
        this.history = new History();
        this.picture = new Picture($("picture"));
        this.layers = new Layers($("layers"));
        this.recent = false;
        this.shown = this.asking = false;
        this.timer = 0;
        $("heat-all").addEventListener("click", () => this.heat(false));
        $("heat-now").addEventListener("click", () => this.heat(true));
        document.addEventListener("visibilitychange", () => this.look());
        $("legend").append(...[["trunk", "trunk"], ["expert", "experts"], ["token", "tokens"]].map(([kind, text]) => el(`span.swatch.${kind}`, {}, text)));
    }

    show(on) {
        this.shown = on;
        this.look();
    }

    look() {
        const on = this.shown && document.visibilityState === "visible";
        this.picture.move(on);
        clearTimeout(this.timer);
        if (on)
            this.poll();
    }

    heat(recent) {
        this.recent = recent;
        $("heat-all").setAttribute("aria-pressed", String(!recent));
        $("heat-now").setAttribute("aria-pressed", String(recent));
        this.draw();
    }

    async poll() {
        if (this.asking)
            return;
        this.asking = true;
        let wait = POLL_MS;
        try {
            this.history.push(await this.withKey(() => getJson("/v1/k3/stats")));
            $("no-data").hidden = true;
        } catch (e) {
            this.history = new History();
            $("no-data").textContent = `No data. ${e.message}`;
            $("no-data").hidden = false;
            wait = RETRY_MS;
        }
        this.asking = false;
        this.draw();
        if (this.shown && document.visibilityState === "visible") {
            clearTimeout(this.timer);
            this.timer = setTimeout(() => this.poll(), wait);
        }
    }

    draw() {
        const s = summarize(this.history);
        const hits = layerHits(this.history, this.recent ? RECENT_S : null);
        figures(s);
        this.picture.update(s);
        this.layers.update(s.layers, s.sequences_running ? s.layer : null, hits);
        $("pass-text").textContent = passText(s);
        rows($("picture-table"), ["From", "To", "What", "Now"], flows(s));
        rows($("layers-table"), ["Layer", "Asked for", "In memory", "Share"],
             (hits ?? []).map((h, i) => [String(i), countText(h.demands), countText(h.hits), h.share === null ? "none asked for" : shareText(h.share)]));
        showMemory(memory(this.history), s.promised);
        rows($("drives"), ["Drive", "Reads", "Limit", "Used by"], s.drives.map((d) => [
            `${d.name} (${d.fs})`, rateText(d.rate), d.limit ? `${rateText(d.limit)}, ${d.from}` : "not measured", d.users.join(", ")]));
        rows($("daemons"), ["Daemon", "State", "Generation"], DAEMONS.map((d) => [d, s.life[d].text, s.life[d].generation === null ? NO_DATA : String(s.life[d].generation)]),
             DAEMONS.map((d) => (s.life[d].ok ? "" : "bad")));
        facts($("work"), work(s));
    }
}

function figures(s) {
    const list = [["Tokens a second", speedText(s.tokens_per_s), `${countText(s.tokens)} in all`],
                  ["Read from drives", rateText(s.read), s.trunk_read === null ? "" : `trunk ${rateText(s.trunk_read)}`],
                  ["Expert hits", shareText(s.hit_share), s.demands === null ? "" : `of ${countText(s.demands)}`],
                  ["Time of a pass", secondsText(s.pass_s ?? s.pass_mean_s), s.passes === null ? "" : `${countText(s.passes)} ${s.passes === 1 ? "pass" : "passes"}`],
                  ["Answers", s.running === null ? NO_DATA : `${countText(s.running)} running`, s.queued === null ? "" : `${countText(s.queued)} queued`]];
    const into = $("figures");
    if (into.children.length === 0)
        into.append(...list.map(([name]) => el("div", {}, el("dt", {}, name), el("dd.big"), el("dd.small"))));
    list.forEach(([, big, small], i) => {
        setText(into.children[i].children[1], big);
        setText(into.children[i].children[2], small);
    });
}

function setText(node, text) {
    if (node.textContent !== text)
        node.textContent = text;
}

function passText(s) {
    const waits = [null, "waits for the trunk", "waits for an expert"][s.waiting];
    if (s.layer === null)
        return NO_DATA;
    const part = s.layers < s.layers_model ? ` (of ${s.layers_model} in the model)` : "";
    return !s.sequences_running ? `Nothing is being computed. ${s.layers} layers${part}.`
        : `Pass ${countText(s.passes + 1)}: layer ${s.layer} of ${s.layers}${part}${waits ? `, ${waits}` : ""}.`;
}

function flows(s) {
    return [["drives", "k3-trunkd", "reads of the trunk", rateText(s.trunk_read)],
            ["drives", "k3-expertd", "reads of experts", rateText(s.expert_read)],
            ["k3-trunkd", "trunk ring", "filled", s.ring === null ? NO_DATA : `${bytesText(s.ring_filled)} of ${bytesText(s.ring)}`],
            ["k3-trunkd", "pinned trunk", "loaded", s.pinned === null ? NO_DATA : `${bytesText(s.pinned_loaded)} of ${bytesText(s.pinned)}`],
            ["k3-expertd", "experts", "slots in use", s.slots === null ? NO_DATA : `${countText(s.slots_ready)} of ${countText(s.slots)}, ${countText(s.slots_lent)} lent`],
            ["trunk ring", "k3-computed", "rows", rateText(s.ring_rows)],
            ["pinned trunk", "k3-computed", "rows", rateText(s.pinned_rows)],
            ["experts", "k3-computed", "experts", rateText(s.expert_rows)],
            ["k3-computed", "k3-router", "tokens", s.tokens_per_s === null ? NO_DATA : `${speedText(s.tokens_per_s)} a second`]];
}

function work(s) {
    return [["Answers running, queued", `${countText(s.running)}, ${countText(s.queued)}`],
            ["Sequences with state", s.sequences_running === null ? NO_DATA : `${countText(s.sequences_running)} of ${countText(s.sequences)}`],
            ["Waiting for state", countText(s.sequences_queued)],
            ["Positions held", s.positions === null ? NO_DATA : `${countText(s.positions)}; a sequence has up to ${countText(s.ctx)}`],
            ["Prompt tokens computed", countText(s.prompt_tokens)],
            ["Tokens drawn", countText(s.tokens)],
            ["Arithmetic", s.kernels ? `${s.kernels}, ${s.threads} ${s.threads === 1 ? "thread" : "threads"}` : NO_DATA]];
}

function facts(into, list) {
    if (into.children.length === 0)
        into.append(...list.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
    list.forEach(([, text], i) => setText(into.children[i].children[1], text));
}

/* A table whose cells are kept, so that what is selected or read aloud is not torn away every second. */
function rows(into, head, body, classes = []) {
    let table = into.querySelector("table");
    if (!table) {
        table = el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))), el("tbody"));
        into.append(el("div.scroll", {}, table));
    }
    const tbody = table.tBodies[0];
    while (tbody.rows.length > body.length)
        tbody.lastElementChild.remove();
    body.forEach((cells, i) => {
        const row = tbody.rows[i] ?? tbody.appendChild(el("tr", {}, cells.map((_, k) => el(k ? "td" : "th", k ? {} : { scope: "row" }))));
        row.className = classes[i] ?? "";
        cells.forEach((c, k) => setText(row.children[k], c));
    });
}

function showMemory(parts, promised) {
    const sum = parts.reduce((a, p) => a + (p.bytes ?? 0), 0);
    const whole = Math.max(sum, promised ?? 0) || 1;
    setText($("memory-sum"), sum ? `${bytesText(sum)}${promised ? ` of ${bytesText(promised)} promised` : ""}` : NO_DATA);
    if (!$("memory").firstElementChild)
        $("memory").append(el("div.stack", { "aria-hidden": "true" }, parts.map((_, i) => el(`span.part.p${i}`))));
    parts.forEach((p, i) => {
        $("memory").firstElementChild.children[i].style.inlineSize = `${100 * (p.bytes ?? 0) / whole}%`;
    });
    rows($("memory"), ["Part", "In memory"], parts.map((p) => [p.part, p.of === null || p.of === p.bytes ? bytesText(p.bytes) : `${bytesText(p.bytes)} of ${bytesText(p.of)}`]),
         parts.map((_, i) => `part p${i}`));
}
