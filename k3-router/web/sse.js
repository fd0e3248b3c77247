/* Server-sent events: bytes in any pieces become events and comments.  Pure.
 *
 * Lines end with LF, CR or CRLF; a line that begins with a colon is a comment; an empty line ends an event; data lines of
 * one event are joined by LF.  What a cut stream leaves of an event is no event. */
export class SseParser {
    constructor() {
        this.decoder = new TextDecoder();
        this.line = [];          /* pieces of a line without its end */
        this.data = null;        /* of the event so far */
        this.afterCr = false;    /* the next LF belongs to a CR that ended a line */
        this.first = true;
    }

    /* A Uint8Array -> [{data}] and [{comment}] in order. */
    push(bytes) {
        return this.text(this.decoder.decode(bytes, { stream: true }));
    }

    text(text) {
        const out = [];
        let at = 0;
        for (let i = 0; i < text.length; i++) {
            const c = text.charCodeAt(i);
            if (c === 10 && this.afterCr) {
                this.afterCr = false;
                at = i + 1;
            } else if (c === 10 || c === 13) {
                this.line.push(text.slice(at, i));
                this.end(this.line.join(""), out);
                this.line = [];
                this.afterCr = c === 13;
                at = i + 1;
            } else {
                this.afterCr = false;
            }
        }
        if (at < text.length)
            this.line.push(text.slice(at));
        return out;
    }

    end(line, out) {
        if (this.first && line.startsWith("\uFEFF"))
            line = line.slice(1);
        this.first = false;
        if (line === "") {
            if (this.data !== null)
                out.push({ data: this.data });
            this.data = null;
            return;
        }
        const colon = line.indexOf(":");
        if (colon === 0) {
            out.push({ comment: line.slice(line[1] === " " ? 2 : 1) });
            return;
        }
        const name = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
        if (name === "data")
            this.data = this.data === null ? value : `${this.data}\n${value}`;
    }
}

/* "prefill layer 12/93 tokens 0 1.52 GB/s ETA 31 s waiting for trunk" or "queued, 2 before it, 1 running" -> what it
 * says; a notice of another form -> {notice}. */
export function readProgress(comment) {
    const queued = /^queued, (\d+) before it/.exec(comment);
    if (queued)
        return { phase: "queued", before: Number(queued[1]) };
    const m = /^(\w+)(?: layer (\d+)\/(\d+))? tokens (\d+)(?: ([\d.]+) GB\/s)?(?: ETA (\d+) s)?(?: waiting for (\w+))?$/.exec(comment);
    if (!m)
        return { notice: comment };
    const number = (s) => (s === undefined ? null : Number(s));
    return { phase: m[1], layer: number(m[2]), layers: number(m[3]), tokens: number(m[4]), gbPerS: number(m[5]),
             etaS: number(m[6]), waiting: m[7] ?? null };
}

export function progressText(p) {
    if (p.notice !== undefined)
        return p.notice;
    if (p.phase === "queued")
        return p.before ? `Waiting for its turn, ${p.before} before it` : "Waiting for its turn";
    const out = [{ starting: "Starting", prefill: "Reading the prompt", decode: "Answering", queued: "Waiting for its turn" }[p.phase] ?? p.phase];
    if (p.layers)
        out.push(`layer ${p.layer} of ${p.layers}`);
    if (p.gbPerS)
        out.push(`${p.gbPerS.toFixed(2)} GB/s`);
    if (p.etaS)
        out.push(`about ${p.etaS} s to the next token`);
    if (p.waiting)
        out.push(`waiting for the ${p.waiting === "expert" ? "experts" : p.waiting}`);
    return out.join(" · ");
}
