/* A small Markdown: text -> blocks, plain data without HTML.  Pure; render.js makes nodes of it.
 *
 *   block   {t:"p", c} {t:"h", n, c} {t:"code", lang, text} {t:"hr"} {t:"quote", b} {t:"list", start (null: bullets), items:[blocks]}
 *           {t:"table", head:[c], rows:[[c]]}
 *   c       inline: [string | {t:"b"|"i"|"s", c} | {t:"code", text} | {t:"a", href, c} | {t:"br"}]
 *
 * HTML is text.  Links are http and https; others, and images, are text, so that nothing is loaded and no script is run.
 * Work is linear in the text, but for nesting, which ends at DEPTH; no pattern here can go back over what it has taken. */
const DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ {0,3}\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?$/;

export function parse(text) {
    return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
    const out = [];
    let para = [];
    const flush = () => {
        if (para.length)
            out.push({ t: "p", c: inline(para.join("\n"), 0) });
        para = [];
    };
    for (let i = 0; i < lines.length;) {
        const line = lines[i];
        const block = line.trim() === "" ? null : special(lines, i, depth, para.length > 0);
        if (line.trim() === "") {
            flush();
            i++;
        } else if (block) {
            flush();
            out.push(block.block);
            i = block.next;
        } else {
            para.push(line.trimStart());
            i++;
        }
    }
    flush();
    return out;
}

/* A block that is no paragraph, at line i: {block, next}; or null. */
function special(lines, i, depth, inParagraph) {
    const line = lines[i];
    switch (kind(lines, i, depth, inParagraph)) {
    case "code":
        return code(lines, i, FENCE.exec(line));
    case "h":
        return { block: { t: "h", n: HEADING.exec(line)[1].length, c: inline(headingText(line), 0) }, next: i + 1 };
    case "hr":
        return { block: { t: "hr" }, next: i + 1 };
    case "quote":
        return quote(lines, i, depth);
    case "list":
        return list(lines, i, ITEM.exec(line), depth);
    case "table":
        return table(lines, i);
    default:
        return null;
    }
}

/* What begins at line i, by a look at it and the next. */
function kind(lines, i, depth, inParagraph) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence && !(fence[1][0] === "`" && line.includes("`", fence[0].length)))
        return "code";
    if (HEADING.test(line))
        return "h";
    if (RULE.test(line))
        return "hr";
    if (QUOTE.test(line) && depth < DEPTH)
        return "quote";
    const item = ITEM.exec(line);
    if (item && depth < DEPTH && !(inParagraph && (item[3] === "" || (/\d/.test(item[2]) && parseInt(item[2], 10) !== 1))))
        return "list";
    if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("|") && DIVIDER.test(lines[i + 1]))
        return "table";
    return null;
}

function headingText(line) {
    const text = line.trim().replace(/^#+/, "").trim();
    let end = text.length;
    while (end > 0 && text[end - 1] === "#")
        end--;
    return end === 0 || text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

/* Without its end it goes to the end of the text: the answer is still coming. */
function code(lines, i, fence) {
    const mark = fence[1];
    const body = [];
    let k = i + 1;
    for (; k < lines.length; k++) {
        const end = lines[k].trim();
        if (end.length >= mark.length && end[0] === mark[0] && end === mark[0].repeat(end.length))
            break;
        body.push(lines[k]);
    }
    const lang = lines[i].slice(fence[0].length).trim().split(/\s/, 1)[0].slice(0, 30);
    return { block: { t: "code", lang, text: body.join("\n") }, next: k + 1 };
}

function quote(lines, i, depth) {
    const body = [];
    for (; i < lines.length && QUOTE.test(lines[i]); i++)
        body.push(lines[i].replace(QUOTE, ""));
    return { block: { t: "quote", b: blocks(body, depth + 1) }, next: i };
}

function list(lines, i, first, depth) {
    const ordered = /\d/.test(first[2]);
    const items = [];
    while (i < lines.length) {
        const m = ITEM.exec(lines[i]);
        if (!m || /\d/.test(m[2]) !== ordered || RULE.test(lines[i]))
            break;
        const indent = Math.min(m[0].length, m[1].length + m[2].length + 4);
        const body = [lines[i].slice(m[0].length)];
        for (i++; i < lines.length; i++) {
            const own = lines[i].length - lines[i].trimStart().length;
            if (lines[i].trim() === "") {
                const next = lines[i + 1] ?? "";
                const further = next.length - next.trimStart().length;
                if (next.trim() === "" || (further < 2 && !ITEM.test(next)))
                    break;
                if (further < 2)
                    continue;
                body.push("");
            } else if (own >= Math.min(indent, 2)) {
                body.push(lines[i].slice(Math.min(own, indent)));
            } else if (ITEM.test(lines[i]) || kind(lines, i, depth, true)) {
                break;
            } else {
                body.push(lines[i]);
            }
        }
        items.push(blocks(body, depth + 1));
    }
    return { block: { t: "list", start: ordered ? parseInt(first[2], 10) : null, items }, next: i };
}

function cells(line) {
    const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
    return text.split("|").map((c) => inline(c.trim(), 0));
}

function table(lines, i) {
    const head = cells(lines[i]);
    const rows = [];
    for (i += 2; i < lines.length && lines[i].includes("|"); i++)
        rows.push(cells(lines[i]).slice(0, head.length));
    return { block: { t: "table", head, rows }, next: i };
}

/* ---- inside a block ---- */

const MARKS = [["**", "b"], ["__", "b"], ["~~", "s"], ["*", "i"], ["_", "i"]];
const WORD = /[\p{L}\p{N}]/u;

/* The position of `mark` from `from` on, or -1.  `from` only grows, so what was found, or was not, is remembered. */
function finder(text) {
    const memo = new Map();
    return (mark, from) => {
        let i = memo.get(mark);
        if (i === undefined || (i >= 0 && i < from)) {
            i = text.indexOf(mark, from);
            memo.set(mark, i);
        }
        return i;
    };
}

export function safeHref(text) {
    if (!/^https?:\/\/[^\s<>"]+$/i.test(text))
        return null;
    try {
        const url = new URL(text);
        return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
    } catch {
        return null;
    }
}

function inline(text, depth) {
    const out = [];
    const find = finder(text);
    let plain = "";
    const put = (node) => {
        if (plain)
            out.push(plain);
        plain = "";
        out.push(node);
    };
    for (let i = 0; i < text.length;) {
        const found = at(text, i, depth, find);
        if (found) {
            put(found.node);
            i = found.next;
        } else if (text[i] === "\\" && i + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
            plain += text[i + 1];
            i += 2;
        } else {
            plain += text[i++];
        }
    }
    if (plain)
        out.push(plain);
    return out;
}

/* What begins at i: {node, next}, or null for a character of its own. */
function at(text, i, depth, find) {
    const c = text[i];
    if (c === "\n")
        return { node: { t: "br" }, next: i + 1 };
    if (c === "`")
        return span(text, i, find);
    if (c === "[" && text[i - 1] !== "!" && depth < DEPTH)
        return link(text, i, depth, find);
    if ((c === "*" || c === "_" || c === "~") && depth < DEPTH)
        return emphasis(text, i, depth, find);
    return null;
}

function span(text, i, find) {
    let n = 1;
    while (text[i + n] === "`")
        n++;
    const mark = "`".repeat(n);
    const end = n > 8 ? -1 : find(mark, i + n);
    if (end < 0 || text[end + n] === "`")
        return { node: mark, next: i + n };
    const body = text.slice(i + n, end).replace(/\n/g, " ");
    const padded = body.length > 2 && body[0] === " " && body.endsWith(" ") && body.trim() !== "";
    return { node: { t: "code", text: padded ? body.slice(1, -1) : body }, next: end + n };
}

function link(text, i, depth, find) {
    const middle = find("](", i + 1);
    const end = middle < 0 ? -1 : find(")", middle);
    if (end < 0 || middle - i > 2000 || end - middle > 4000 || text.slice(i + 1, middle).includes("["))
        return null;
    const href = safeHref(text.slice(middle + 2, end));
    if (!href)
        return null;
    return { node: { t: "a", href, c: inline(text.slice(i + 1, middle), depth + 1) }, next: end + 1 };
}

function emphasis(text, i, depth, find) {
    for (const [mark, t] of MARKS) {
        if (!text.startsWith(mark, i))
            continue;
        const from = i + mark.length;
        if (!text[from] || /\s/.test(text[from]) || text[from] === mark[0])
            return null;
        if (mark[0] === "_" && i > 0 && WORD.test(text[i - 1]))
            return null;
        const end = find(mark, from);
        if (end < 0 || /\s/.test(text[end - 1]) || end - from > 20000)
            return null;
        if (mark[0] === "_" && text[end + mark.length] && WORD.test(text[end + mark.length]))
            return null;
        if (mark.length === 1 && text[end + 1] === mark) /* it is the mark of two that ends further on */
            return null;
        return { node: { t, c: inline(text.slice(from, end), depth + 1) }, next: end + mark.length };
    }
    return null;
}
