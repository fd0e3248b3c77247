/* Blocks of markdown.js become nodes, by the DOM alone: no text is ever read as HTML. */
import { parse } from "./markdown.js";

function addAll(node, children) {
    for (const child of children.flat()) /* one by one: there may be more than a call can have arguments */
        if (child !== null && child !== undefined)
            node.append(child);
}

/* el("p.note", {id: "x"}, "text", node, [nodes], ...).  Attributes false and null are left out. */
export function el(spec, attributes, ...children) {
    const [tag, ...classes] = spec.split(".");
    const node = document.createElement(tag);
    if (classes.length)
        node.className = classes.join(" ");
    for (const [name, value] of Object.entries(attributes ?? {}))
        if (value !== false && value !== null && value !== undefined)
            node.setAttribute(name, value === true ? "" : value);
    addAll(node, children);
    return node;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes ?? {}))
        if (value !== null && value !== undefined)
            node.setAttribute(name, value);
    addAll(node, children);
    return node;
}

/* A button that copies what text() gives, and says so. */
export function copyButton(label, text) {
    const button = el("button.quiet.small", { type: "button" }, label);
    button.addEventListener("click", async () => {
        const done = await copy(text());
        button.textContent = done ? "Copied" : "Not copied";
        setTimeout(() => { button.textContent = label; }, 1500);
    });
    return button;
}

/* The clipboard is there for https and loopback only. */
async function copy(text) {
    try {
        await navigator.clipboard.writeText(text);
        return true;
    } catch {
        const area = el("textarea.vh", { "aria-hidden": "true" });
        const before = document.activeElement;
        area.value = text;
        document.body.append(area);
        area.select();
        const done = document.execCommand("copy");
        area.remove();
        before?.focus();
        return done;
    }
}

function inlineNodes(c) {
    return c.map((x) => {
        if (typeof x === "string")
            return document.createTextNode(x);
        switch (x.t) {
        case "b": return el("strong", {}, inlineNodes(x.c));
        case "i": return el("em", {}, inlineNodes(x.c));
        case "s": return el("s", {}, inlineNodes(x.c));
        case "code": return el("code", {}, x.text);
        case "br": return el("br");
        default: return el("a", { href: x.href, target: "_blank", rel: "noopener noreferrer", title: x.href }, inlineNodes(x.c));
        }
    });
}

function codeBlock(b) {
    return el("div.code", {},
              el("div.code-head", {}, el("span", {}, b.lang || "text"), copyButton("Copy", () => b.text)),
              el("pre", { tabindex: "0" }, el("code", {}, b.text)));
}

function tableNode(b) {
    const row = (tag, cells) => el("tr", {}, cells.map((c) => el(tag, {}, inlineNodes(c))));
    return el("div.scroll", { tabindex: "0" }, el("table", {}, el("thead", {}, row("th", b.head)),
                                                 el("tbody", {}, b.rows.map((r) => row("td", r)))));
}

function blockNode(b) {
    switch (b.t) {
    case "h": return el(`h${Math.min(b.n + 2, 6)}`, {}, inlineNodes(b.c));
    case "code": return codeBlock(b);
    case "hr": return el("hr");
    case "quote": return el("blockquote", {}, b.b.map(blockNode));
    case "list": return el(b.start === null ? "ul" : "ol", { start: b.start !== null && b.start !== 1 ? b.start : null },
                           b.items.map((i) => el("li", {}, itemNodes(i))));
    case "table": return tableNode(b);
    default: return el("p", {}, inlineNodes(b.c));
    }
}

/* A paragraph alone in an item needs no space around it. */
function itemNodes(blocks) {
    return blocks.length && blocks[0].t === "p" ? [...inlineNodes(blocks[0].c), ...blocks.slice(1).map(blockNode)] : blocks.map(blockNode);
}

/* Shows text in `into`; blocks that have not changed keep their nodes, so that a selection and a copy button stay. */
export function showMarkdown(into, text) {
    const blocks = parse(text);
    const keys = blocks.map((b) => JSON.stringify(b));
    const before = into.k3Keys ?? [];
    let same = 0;
    while (same < keys.length && same < before.length && keys[same] === before[same])
        same++;
    while (into.children.length > same)
        into.lastElementChild.remove();
    addAll(into, blocks.slice(same).map(blockNode));
    into.k3Keys = keys;
}
