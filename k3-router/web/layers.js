/* The layers in a row: where the pass is, and how often the experts of each were in memory. */
import { svg } from "./render.js";
import { shareText } from "./rates.js";

const PASS_H = 10, GAP = 5, HEAT_H = 46, AXIS_H = 18, CELL_MAX = 56;

export class Layers {
    constructor(into) {
        this.into = into;
        this.key = "";
        this.resized = new ResizeObserver(() => this.state && this.update(...this.state));
        this.resized.observe(into);
    }

    /* n layers; layer: the current one, null when nothing runs; hits: of layerHits(), or null. */
    update(n, layer, hits) {
        this.state = [n, layer, hits];
        const width = this.into.clientWidth;
        if (!n || !width) {
            this.into.replaceChildren();
            this.key = "";
            return;
        }
        if (this.key !== `${n} ${width}`)
            this.build(n, width);
        this.key = `${n} ${width}`;
        for (let i = 0; i < n; i++) {
            this.pass[i].setAttribute("class", layer === null ? "pass" : i < layer ? "pass past" : i === layer ? "pass now" : "pass");
            this.paint(i, hits?.[i]);
        }
        this.root.setAttribute("aria-label", `${n} layers; ${layer === null ? "nothing is being computed" : `layer ${layer} is being computed`}. The table below has the expert hits.`);
    }

    build(n, width) {
        const cell = Math.min(CELL_MAX, width / n), pad = cell > 8 ? 2 : cell > 4 ? 1 : 0.5;
        const rect = (i, y, h, rx) => svg("rect", { x: (i * cell + pad / 2).toFixed(2), y, width: Math.max(0.5, cell - pad).toFixed(2), height: h, rx: Math.min(rx, cell / 4) });
        this.root = svg("svg", { width, height: PASS_H + GAP + HEAT_H + AXIS_H, role: "img", class: "layers" });
        this.pass = Array.from({ length: n }, (_, i) => rect(i, 0, PASS_H, 3));
        this.heat = Array.from({ length: n }, (_, i) => rect(i, PASS_H + GAP, HEAT_H, 4));
        this.titles = this.heat.map((r) => {
            const title = svg("title", {});
            r.append(title);
            return title;
        });
        this.root.append(...this.pass, ...this.heat);
        const step = [1, 2, 5, 10, 20, 50, 100].find((s) => s * cell >= 26) ?? 100;
        for (let i = 0; i < n; i += step)
            this.root.append(svg("text", { x: i || cell > 10 ? ((i + 0.5) * cell).toFixed(1) : 0, class: i || cell > 10 ? "axis" : "axis first", y: PASS_H + GAP + HEAT_H + 14, }, String(i)));
        this.into.replaceChildren(this.root);
    }

    paint(i, h) {
        const none = !h || h.share === null;
        this.heat[i].setAttribute("class", none ? "heat none" : "heat");
        this.heat[i].style.fill = none ? "" : `color-mix(in oklab, var(--heat-1) ${(100 * h.share).toFixed(0)}%, var(--heat-0))`;
        this.titles[i].textContent = none ? `layer ${i}: no expert was asked for` : `layer ${i}: ${shareText(h.share)} of ${h.demands.toLocaleString("en")}`;
    }
}
