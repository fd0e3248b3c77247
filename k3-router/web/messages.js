/* The messages of a conversation as nodes. */
import { copyButton, el, showMarkdown } from "./render.js";

const NEAR_PX = 80; /* from the end: what comes is followed */

export class Messages {
    /* log: where they go.  on: retry(), edit(), go_on(), and running(message). */
    constructor(log, on) {
        this.log = log;
        this.on = on;
        this.parts = new Map(); /* assistant message -> its nodes */
    }

    show(messages) {
        const open = new Set([...this.parts].filter(([, p]) => p.details.open).map(([m]) => m));
        const near = this.nearEnd();
        this.parts.clear();
        this.log.replaceChildren(...(messages.length ? messages.map((m, i) => this.node(m, i, messages)) : [welcome()]));
        for (const [m, p] of this.parts) {
            p.details.open = open.has(m);
            this.fill(m);
        }
        if (near)
            this.toEnd();
    }

    nearEnd() {
        return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_PX;
    }

    toEnd() {
        this.log.scrollTop = this.log.scrollHeight;
    }

    /* More of an answer that is being made. */
    update(m) {
        const near = this.nearEnd();
        this.fill(m);
        if (near)
            this.toEnd();
    }

    node(m, i, messages) {
        const last = i === messages.length - 1;
        const last_question = i === messages.findLastIndex((x) => x.role === "user");
        return m.role === "user" ? this.question(m, last_question && !this.on.running(messages.at(-1)), last) : this.answer(m, last);
    }

    question(m, editable, unanswered) {
        const actions = el("div.actions", {}, copyButton("Copy", () => m.content));
        if (editable)
            actions.append(button("Edit", this.on.edit));
        if (editable && unanswered)
            actions.append(button("Retry", this.on.retry));
        return el("article.message.user", { "aria-label": "You" }, el("div.body.plain", {}, m.content), actions);
    }

    answer(m, last) {
        const running = this.on.running(m);
        const summary = el("summary");
        const thinking = el("div.plain.thought");
        const details = el("details.think", { hidden: true }, summary, thinking);
        const body = el("div.body.markdown");
        const node = el("article.message.assistant", { "aria-label": "k3", "aria-busy": running ? "true" : null }, details, body,
                        ending(m, running));
        details.addEventListener("toggle", () => this.fill(m));
        this.parts.set(m, { details, summary, thinking, body });
        if (!running)
            node.append(this.actions(m, last));
        return node;
    }

    fill(m) {
        const p = this.parts.get(m);
        if (!p)
            return;
        p.details.hidden = !m.reasoning;
        p.summary.textContent = this.on.running(m) && !m.content ? "Thinking…" : thoughtFor(m);
        if (p.details.open && p.thinking.textContent !== m.reasoning)
            append(p.thinking, m.reasoning);
        showMarkdown(p.body, m.content);
    }

    actions(m, last) {
        const out = el("div.actions");
        if (m.content)
            out.append(copyButton("Copy", () => m.content));
        if (last && m.state !== "done" && (m.content || m.reasoning))
            out.append(button("Continue", this.on.go_on));
        if (last)
            out.append(button("Retry", this.on.retry));
        const note = usageText(m);
        if (note)
            out.append(el("span.usage", {}, note));
        return out;
    }
}

function button(text, fn) {
    const node = el("button.quiet.small", { type: "button" }, text);
    node.addEventListener("click", () => fn());
    return node;
}

/* Text that grew is added to; the beginning keeps its node, and with it a selection. */
function append(node, text) {
    const shown = node.textContent;
    if (shown && text.startsWith(shown))
        node.append(text.slice(shown.length));
    else
        node.textContent = text;
}

/* Numbers may come out of the storage, where anything may have been put. */
const count = (v) => (Number.isFinite(v) ? v : 0);

function thoughtFor(m) {
    const n = count(m.usage?.completion_tokens_details?.reasoning_tokens);
    return n ? `Thinking, ${n} tokens` : "Thinking";
}

/* How an answer that did not end by itself ended. */
function ending(m, running) {
    if (running || (m.state === "done" && m.content))
        return null;
    const text = { streaming: "Cut off: the page was left while this was being answered.", stopped: "Stopped.",
                   length: "The greatest length was reached.", done: "The answer has no text." }[m.state];
    return text ? el("p.ending", {}, text) : el("p.ending.failed", {}, m.error);
}

function usageText(m) {
    const u = m.usage;
    if (!u)
        return "";
    const out = [`${count(u.prompt_tokens)} prompt tokens, ${count(u.prompt_tokens_details?.cached_tokens)} of them cached`,
                 `${count(u.completion_tokens)} answer tokens`];
    const rate = count(m.timings?.predicted_per_second);
    if (rate > 0)
        out.push(`${rate >= 10 ? rate.toFixed(0) : rate >= 0.1 ? rate.toFixed(1) : rate.toPrecision(2)} tokens/s`);
    return out.join(" · ");
}

function welcome() {
    return el("div.welcome", {}, el("p.big", {}, "What would you like to know?"),
              el("p.note", {}, "The model reads its weights from disk for every word. It answers slowly, and it says how far it is."));
}
