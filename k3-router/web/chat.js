/* The chat: conversations, what is asked, and the answers that are being made. */
import { chat as askServer } from "./api.js";
import { ask } from "./dialogs.js";
import { Messages } from "./messages.js";
import { progressText } from "./sse.js";
import { exportText, requestMessages, settingsFields } from "./store.js";

const $ = (id) => document.getElementById(id);
const SAVE_MS = 1000;
const CURRENT = "k3.current";

export function startChat(page) {
    const view = new Chat(page);
    view.open();
    return { show: (on) => { if (on) view.shown(); } };
}

class Chat {
    constructor({ store, say, withKey, banner }) {
        Object.assign(this, { store, say, withKey, banner });
        this.runs = new Map(); /* conversation id -> {abort, message, progress, startMs, etaS, savedMs} */
        this.messages = new Messages($("log"), {
            retry: () => this.retry(), edit: () => this.edit(), go_on: () => this.goOn(),
            running: (m) => this.run()?.message === m,
        });
        this.frame = 0;
        this.leaving = false;
    }

    open() {
        const id = this.remembered();
        this.show((id && this.store.get(id)) || this.store.list()[0] || this.store.create());
        $("composer").addEventListener("submit", (e) => { e.preventDefault(); this.send(); });
        $("text").addEventListener("input", grow);
        $("text").addEventListener("keydown", (e) => this.key(e));
        $("stop").addEventListener("click", () => this.stop());
        $("new").addEventListener("click", () => this.fresh());
        $("rename").addEventListener("click", () => this.rename());
        $("delete").addEventListener("click", () => this.remove());
        $("export").addEventListener("click", () => download([this.c], this.c.title || "conversation"));
        $("export-all").addEventListener("click", () => download(this.store.list(), "conversations"));
        $("side-toggle").textContent = "☰";
        $("side-toggle").addEventListener("click", () => this.side(!$("side").classList.contains("open")));
        for (const id of ["rename", "export", "delete"])
            $(id).addEventListener("click", () => { $("menu").open = false; });
        document.addEventListener("click", (e) => {
            if (!$("menu").contains(e.target))
                $("menu").open = false;
        });
        document.addEventListener("keydown", (e) => {
            if (e.key === "Escape" && $("menu").open) {
                $("menu").open = false;
                $("menu").firstElementChild.focus();
            }
            if (e.key === "Escape" && $("side").classList.contains("open")) {
                this.side(false);
                $("side-toggle").focus();
            }
        });
        window.addEventListener("beforeunload", () => this.leave());
        window.addEventListener("pagehide", () => this.leave());
        window.addEventListener("storage", () => this.otherTab());
        setInterval(() => this.showProgress(), 500);
    }

    shown() {
        grow();
        if (matchMedia("(pointer: fine)").matches && !document.querySelector("dialog[open]"))
            $("text").focus({ preventScroll: true });
    }

    run() {
        return this.runs.get(this.c.id);
    }

    /* ---- conversations ---- */

    remembered() {
        try {
            return sessionStorage.getItem(CURRENT);
        } catch {
            return null;
        }
    }

    show(c) {
        this.c = c;
        try {
            sessionStorage.setItem(CURRENT, c.id);
        } catch {
            /* the latest is shown after a reload */
        }
        this.messages.show(c.messages);
        this.messages.toEnd();
        this.showList();
        this.showState();
    }

    showList() {
        const all = this.store.list();
        if (!all.some((c) => c.id === this.c.id))
            all.unshift(this.c);
        $("list").replaceChildren(...all.map((c) => this.listItem(c)));
        $("title").textContent = nameOf(this.c);
        $("export-all").hidden = all.every((c) => c.messages.length === 0);
    }

    listItem(c) {
        const item = document.createElement("li");
        const button = document.createElement("button");
        button.type = "button";
        button.className = "entry";
        button.textContent = nameOf(c);
        if (c.id === this.c.id)
            button.setAttribute("aria-current", "true");
        button.addEventListener("click", () => {
            this.side(false);
            this.show(this.runs.get(c.id)?.c ?? this.store.get(c.id) ?? c);
            $("text").focus();
        });
        item.append(button);
        return item;
    }

    side(open) {
        $("side").classList.toggle("open", open);
        $("side-toggle").setAttribute("aria-expanded", String(open));
        if (open)
            $("new").focus();
    }

    fresh() {
        this.side(false);
        this.show(this.store.create());
        $("text").focus();
    }

    async rename() {
        const c = this.c;
        const title = await ask({ title: "Rename the conversation", label: "Name", value: nameOf(c), ok: "Rename" });
        if (title === null)
            return;
        c.title = title.trim().slice(0, 200);
        this.store.put(c, c.updated);
        this.showList();
    }

    async remove() {
        const c = this.c;
        if (!await ask({ title: "Delete this conversation?", note: `“${nameOf(c)}” is kept in this browser only.`, ok: "Delete" }))
            return;
        this.runs.get(c.id)?.abort.abort();
        this.runs.delete(c.id);
        this.store.remove(c.id);
        this.show(this.store.list()[0] ?? this.store.create());
        $("text").focus();
    }

    /* Another tab wrote: its conversations come into the list, and this one is read again unless it is being answered here. */
    otherTab() {
        const c = this.store.get(this.c.id);
        if (c && !this.run() && JSON.stringify(c) !== JSON.stringify(this.c)) {
            this.c = c;
            this.messages.show(c.messages);
        }
        this.showList();
        this.showState();
    }

    /* ---- asking ---- */

    key(e) {
        if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
            e.preventDefault();
            this.send();
        } else if (e.key === "Escape" && this.run()) {
            this.stop();
        }
    }

    send() {
        const text = $("text").value;
        if (!text.trim() || this.run())
            return;
        $("text").value = "";
        grow();
        this.c.title ||= text.trim().split("\n", 1)[0].slice(0, 60);
        this.c.messages.push({ role: "user", content: text });
        this.answer();
    }

    /* The last answer once more. */
    retry() {
        if (this.run())
            return;
        if (this.c.messages.at(-1)?.role === "assistant")
            this.c.messages.pop();
        this.answer();
    }

    /* The last question goes back to where it was written. */
    edit() {
        const i = this.c.messages.findLastIndex((m) => m.role === "user");
        if (i < 0 || this.run())
            return;
        $("text").value = this.c.messages[i].content;
        this.c.messages.length = i;
        this.store.put(this.c);
        this.messages.show(this.c.messages);
        grow();
        $("text").focus();
    }

    /* The last answer goes on where it ended. */
    goOn() {
        const last = this.c.messages.at(-1);
        if (!this.run() && last?.role === "assistant" && (last.content || last.reasoning))
            this.answer(last);
    }

    /* A new answer to the last message; or `message`, which is continued. */
    async answer(message) {
        const c = this.c;
        const goes_on = message !== undefined;
        const settings = this.store.settings();
        const body = { model: $("model").textContent || "k3", ...settingsFields(settings).fields,
                       messages: requestMessages(c.messages, settings.system, goes_on) };
        if (!goes_on) {
            message = { role: "assistant", content: "", reasoning: "", state: "streaming", error: "", usage: null, timings: null };
            c.messages.push(message);
        }
        Object.assign(message, { state: "streaming", error: "", usage: null, timings: null });
        const run = { c, message, abort: new AbortController(), progress: null, startMs: Date.now(), etaS: null, savedMs: Date.now() };
        this.runs.set(c.id, run);
        this.store.put(c);
        this.messages.show(c.messages);
        this.messages.toEnd();
        this.showList();
        this.showState();
        this.say("Waiting for the answer");
        await this.follow(run, body);
    }

    async follow(run, body) {
        const { message: m, abort, c } = run;
        try {
            const reason = await this.withKey(() => askServer(body, abort.signal, {
                delta: (d) => this.delta(run, d),
                progress: (p) => { run.progress = p; run.progressMs = Date.now(); },
                usage: (usage, timings) => Object.assign(m, { usage, timings }),
                eta: (s) => { run.etaS = s; },
            }));
            m.state = reason === "length" ? "length" : "done";
        } catch (e) {
            m.state = e.name === "AbortError" ? "stopped" : this.leaving ? "streaming" : "failed";
            m.error = m.state === "failed" ? e.message : "";
        }
        if (this.runs.get(c.id) !== run) /* deleted in between */
            return;
        this.runs.delete(c.id);
        this.store.put(c);
        if (this.c === c) {
            this.messages.show(c.messages);
            this.showState();
            this.say({ done: "The answer is complete", length: "The answer reached its greatest length", stopped: "Stopped" }[m.state] ??
                     `The answer failed: ${m.error}`);
        }
        this.showList();
    }

    delta(run, d) {
        if (!run.message.content && !run.message.reasoning && this.c === run.c)
            this.say("The answer begins");
        run.message.content += d.content;
        run.message.reasoning += d.reasoning;
        if (Date.now() - run.savedMs > SAVE_MS) {
            run.savedMs = Date.now();
            this.store.put(run.c);
        }
        if (this.c === run.c && !this.frame)
            this.frame = requestAnimationFrame(() => {
                this.frame = 0;
                this.messages.update(run.message);
            });
    }

    stop() {
        this.run()?.abort.abort();
        $("text").focus();
    }

    /* What is shown now is what a reload shows.  The browser ends the streams of a page that is left; that is no failure. */
    leave() {
        this.leaving = true;
        setTimeout(() => { this.leaving = false; }, 3000); /* it was not left after all */
        for (const run of this.runs.values())
            this.store.put(run.c);
    }

    /* ---- what is going on ---- */

    showState() {
        const running = Boolean(this.run());
        $("send").hidden = running;
        $("stop").hidden = !running;
        this.showProgress();
    }

    showProgress() {
        const run = this.run();
        $("progress").hidden = !run;
        if (!run)
            return;
        const p = run.progress;
        const seconds = Math.round((Date.now() - run.startMs) / 1000);
        const fresh = p && Date.now() - run.progressMs < 15000;
        const text = fresh ? progressText(p) : run.message.content || run.message.reasoning ? "Answering"
            : run.etaS ? `Waiting, the first word in about ${Math.max(0, Math.round(run.etaS - seconds))} s` : "Waiting";
        $("progress-text").textContent = `${text} · ${seconds} s`;
        $("progress-bar").style.inlineSize = fresh && p.layers ? `${100 * p.layer / p.layers}%` : "0";
        $("progress").classList.toggle("busy", !(fresh && p.layers));
    }
}

function nameOf(c) {
    return c.title || "New conversation";
}

/* The box is as high as its text, up to a third of the window. */
function grow() {
    const text = $("text");
    text.style.blockSize = "auto";
    text.style.blockSize = `${Math.min(text.scrollHeight + 2, window.innerHeight / 3)}px`;
}

function download(conversations, name) {
    const a = document.createElement("a");
    const file = name.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
    a.href = URL.createObjectURL(new Blob([exportText(conversations)], { type: "application/json" }));
    a.download = `k3-${file}.json`;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 10000);
}
