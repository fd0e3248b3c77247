/* The server: one key for this tab, errors with the server's own words, and the stream of an answer. */
import { SseParser, readProgress } from "./sse.js";

const KEY = "k3.key";
let memoryKey = "";

export class ApiError extends Error {
    constructor(message, status = 0, retryAfterS = 0) {
        super(message);
        this.status = status; /* 0: no reply */
        this.retryAfterS = retryAfterS;
    }
}

/* For this tab only; where nothing can be kept, until it is reloaded. */
export function setKey(key) {
    memoryKey = key;
    try {
        sessionStorage.setItem(KEY, key);
    } catch {
        /* memory must do */
    }
}

function key() {
    try {
        return memoryKey || sessionStorage.getItem(KEY) || "";
    } catch {
        return memoryKey;
    }
}

async function failure(reply) {
    let text = `The server answers ${reply.status} ${reply.statusText}`.trim();
    try {
        const body = await reply.json();
        if (typeof body?.error?.message === "string")
            text = body.error.message;
    } catch {
        /* no JSON: the status says it */
    }
    return new ApiError(text, reply.status, Number(reply.headers.get("Retry-After")) || 0);
}

async function request(path, options) {
    const headers = { ...options.headers };
    if (key())
        headers.Authorization = `Bearer ${key()}`;
    let reply;
    try {
        reply = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store", redirect: "error" });
    } catch (e) {
        if (e.name === "AbortError")
            throw e;
        throw new ApiError("The server does not answer. Is it running?");
    }
    if (!reply.ok)
        throw await failure(reply);
    return reply;
}

export async function getJson(path, signal) {
    const reply = await request(path, { signal });
    try {
        return await reply.json();
    } catch (e) {
        if (e.name === "AbortError")
            throw e;
        throw new ApiError("The server's reply is not JSON.", reply.status);
    }
}

/* Asks for an answer.  on.delta({content, reasoning}), on.progress(of readProgress), on.usage(usage, timings),
 * on.eta(seconds).  Resolves to the finish reason when the stream is whole; throws ApiError, or AbortError. */
export async function chat(body, signal, on) {
    const reply = await request("/v1/chat/completions", {
        method: "POST", signal, headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    });
    const eta = Number(reply.headers.get("X-K3-ETA"));
    if (reply.headers.has("X-K3-ETA") && Number.isFinite(eta))
        on.eta(eta);
    const state = { finish: null, done: false };
    const reader = reply.body.getReader();
    const parser = new SseParser();
    for (;;) {
        let piece;
        try {
            piece = await reader.read();
        } catch (e) {
            if (e.name === "AbortError")
                throw e;
            throw new ApiError("The connection to the server was lost.");
        }
        if (piece.done)
            break;
        for (const event of parser.push(piece.value))
            take(event, state, on);
    }
    if (!state.done)
        throw new ApiError("The connection to the server ended before the answer did.");
    return state.finish ?? "stop";
}

function take(event, state, on) {
    if (event.comment !== undefined) {
        on.progress(readProgress(event.comment));
        return;
    }
    if (event.data === "[DONE]") {
        state.done = true;
        return;
    }
    let o;
    try {
        o = JSON.parse(event.data);
    } catch {
        throw new ApiError("The server sent an event that is not JSON.");
    }
    if (o.error)
        throw new ApiError(o.error.message ?? "The server reports an error.");
    const choice = o.choices?.[0];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content)
        on.delta({ content: delta.content ?? "", reasoning: delta.reasoning_content ?? "" });
    if (choice?.finish_reason)
        state.finish = choice.finish_reason;
    if (o.usage)
        on.usage(o.usage, o.timings ?? null);
}
