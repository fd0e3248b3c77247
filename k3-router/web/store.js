/* Conversations and settings in the browser's storage.  Pure but for the storage that is handed in.
 *
 * One entry a conversation, "k3.chat.<id>", so that two tabs do not undo each other's:
 *   {id, title, created, updated, messages}
 *   message  {role: "user", content}
 *            {role: "assistant", content, reasoning, state, error, usage, timings}
 *            state "streaming" (being made; after a reload: cut off), "done", "stopped", "length", "failed"
 * What does not fit is kept in memory until the page is closed, and onFull is told. */
const PREFIX = "k3.chat.";
const SETTINGS = "k3.settings";
const STATES = ["streaming", "done", "stopped", "length", "failed"];

export class Store {
    constructor(storage, onFull = () => {}) {
        this.storage = storage; /* null: there is none */
        this.onFull = onFull;
        this.unsaved = new Map(); /* id -> conversation */
    }

    keys() {
        const out = [];
        try {
            for (let i = 0; i < (this.storage?.length ?? 0); i++) {
                const key = this.storage.key(i);
                if (key?.startsWith(PREFIX))
                    out.push(key.slice(PREFIX.length));
            }
        } catch {
            /* the storage was taken away: what is in memory is left */
        }
        return out;
    }

    /* The latest first. */
    list() {
        const ids = new Set([...this.keys(), ...this.unsaved.keys()]);
        const all = [...ids].map((id) => this.get(id)).filter(Boolean);
        return all.sort((a, b) => b.updated - a.updated || (a.id < b.id ? 1 : -1));
    }

    get(id) {
        if (this.unsaved.has(id))
            return this.unsaved.get(id);
        try {
            return readConversation(JSON.parse(this.storage?.getItem(PREFIX + id) ?? "null"), id);
        } catch {
            return null; /* damaged: as if it were not there */
        }
    }

    create(now = Date.now()) {
        const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
        return { id, title: "", created: now, updated: now, messages: [] };
    }

    /* True when it is in the storage. */
    put(c, now = Date.now()) {
        c.updated = now;
        const failed = this.write(PREFIX + c.id, c);
        if (failed)
            this.unsaved.set(c.id, c);
        else
            this.unsaved.delete(c.id);
        if (failed)
            this.onFull(failed);
        return !failed;
    }

    remove(id) {
        this.unsaved.delete(id);
        try {
            this.storage?.removeItem(PREFIX + id);
        } catch {
            /* nothing was kept */
        }
    }

    settings() {
        try {
            return cleanSettings(JSON.parse(this.storage?.getItem(SETTINGS) ?? "null"));
        } catch {
            return cleanSettings(null);
        }
    }

    putSettings(s) {
        const failed = this.write(SETTINGS, cleanSettings(s));
        if (failed)
            this.onFull(failed);
        return !failed;
    }

    /* null, or why it could not be written. */
    write(key, value) {
        try {
            if (!this.storage)
                return "none";
            this.storage.setItem(key, JSON.stringify(value));
            return null;
        } catch (e) {
            return e?.name === "QuotaExceededError" ? "full" : "none";
        }
    }
}

const text = (v) => (typeof v === "string" ? v : "");

function readMessage(m) {
    if (m?.role === "user")
        return { role: "user", content: text(m.content) };
    if (m?.role !== "assistant")
        return null;
    return { role: "assistant", content: text(m.content), reasoning: text(m.reasoning), error: text(m.error),
             state: STATES.includes(m.state) ? m.state : "done", usage: m.usage ?? null, timings: m.timings ?? null };
}

/* What came out of the storage is input: another version of this page may have written it. */
function readConversation(c, id) {
    if (!c || !Array.isArray(c.messages))
        return null;
    return { id, title: text(c.title), created: Number(c.created) || 0, updated: Number(c.updated) || 0,
             messages: c.messages.map(readMessage).filter(Boolean) };
}

export function cleanSettings(s) {
    const out = {};
    for (const key of ["system", "thinking", "effort", "temperature", "top_p", "max_tokens", "seed"])
        out[key] = text(s?.[key]);
    return out;
}

/* The fields of a request, or an error: {fields} or {error}. */
export function settingsFields(s) {
    const fields = {};
    const number = (key, name, min, max, whole) => {
        const t = s[key].trim();
        if (t === "")
            return null;
        const v = Number(t);
        if (!Number.isFinite(v) || v < min || v > max || (whole && !Number.isSafeInteger(v)))
            return `${name}: must be ${whole ? "a whole number" : "a number"} from ${min} to ${max}`;
        fields[key === "max_tokens" ? "max_completion_tokens" : key] = v;
        return null;
    };
    const error = number("temperature", "Temperature", 0, 100) ?? number("top_p", "Top-p", 0, 1) ??
        number("max_tokens", "Longest answer", 1, 1e9, true) ?? number("seed", "Seed", 0, Number.MAX_SAFE_INTEGER, true);
    if (error)
        return { error };
    if (s.thinking === "off")
        fields.thinking = { type: "disabled" };
    else if (s.effort)
        fields.reasoning_effort = s.effort;
    else if (s.thinking === "on")
        fields.thinking = { type: "enabled" };
    return { fields };
}

/* The messages of a request.  Thinking goes back as it came; an answer that failed before its first word is left out.
 * partial: the last message, which is an answer, is to be continued. */
export function requestMessages(messages, system, partial) {
    const out = system.trim() ? [{ role: "system", content: system }] : [];
    for (const m of messages) {
        if (m.role === "user")
            out.push({ role: "user", content: m.content });
        else if (m.content || m.reasoning)
            out.push({ role: "assistant", content: m.content, reasoning_content: m.reasoning });
    }
    if (partial)
        out[out.length - 1].partial = true;
    return out;
}

export function exportText(conversations, now = Date.now()) {
    return JSON.stringify({ format: "k3-chat", version: 1, exported: new Date(now).toISOString(), conversations }, null, 2);
}
