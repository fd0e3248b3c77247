/* The page: two views, the colours, the key, what is said to a screen reader. */
import { ApiError, getJson, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { ask, startDialogs } from "./dialogs.js";
import { startMachine } from "./machine.js";
import { Store } from "./store.js";

const $ = (id) => document.getElementById(id);

function storage() {
    try {
        return window.localStorage;
    } catch {
        return null;
    }
}

const store = new Store(storage(), (why) => banner(why === "full"
    ? "The browser's storage is full: what is new is kept only until this page is closed. Export or delete conversations."
    : "This browser keeps nothing for this page: conversations are gone when it is closed."));

function banner(text) {
    $("banner").textContent = text;
    $("banner").hidden = !text;
}

/* One sentence for a screen reader; the same one twice is said twice. */
function say(text) {
    $("say").textContent = "";
    setTimeout(() => { $("say").textContent = text; }, 50);
}

/* ---- the key ---- */

let asking = null;

/* Resolves to true when a key was given.  Several callers share one question. */
function askKey(message) {
    asking ??= ask({ title: "This server needs a key", note: message, label: "API key", ok: "Use it", secret: true }).then((key) => {
        asking = null;
        if (!key?.trim())
            return false;
        setKey(key.trim());
        return true;
    });
    return asking;
}

/* fn(), and once more for each key that was asked for. */
async function withKey(fn) {
    for (;;) {
        try {
            return await fn();
        } catch (e) {
            if (!(e instanceof ApiError) || e.status !== 401 || !await askKey(e.message))
                throw e;
        }
    }
}

/* ---- colours ---- */

const THEMES = { "": ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };

function showTheme(name) {
    const [sign, words] = THEMES[name];
    if (name)
        document.documentElement.dataset.theme = name;
    else
        delete document.documentElement.dataset.theme;
    $("theme").textContent = sign;
    $("theme").setAttribute("aria-label", `Colours: ${words}`);
    $("theme").title = `Colours: ${words}`;
}

function startTheme() {
    const names = Object.keys(THEMES);
    let name = document.documentElement.dataset.theme ?? "";
    showTheme(name);
    $("theme").addEventListener("click", () => {
        name = names[(names.indexOf(name) + 1) % names.length];
        showTheme(name);
        try {
            storage()?.setItem("k3.theme", name);
        } catch {
            /* for this page, then */
        }
    });
}

/* ---- views ---- */

function showView(views) {
    const name = location.hash === "#/machine" ? "machine" : "chat";
    for (const v of ["chat", "machine"]) {
        $(v).hidden = v !== name;
        if (v === name)
            $(`to-${v}`).setAttribute("aria-current", "page");
        else
            $(`to-${v}`).removeAttribute("aria-current");
    }
    document.title = name === "machine" ? "k3: the machine" : "k3: chat";
    views.machine.show(name === "machine");
    views.chat.show(name === "chat");
}

async function nameModel() {
    try {
        const models = await withKey(() => getJson("/v1/models"));
        $("model").textContent = models.data?.[0]?.id ?? "";
        $("model").title = models.data?.[0]?.context_length ? `context of ${models.data[0].context_length} tokens` : "";
    } catch (e) {
        $("model").textContent = e.status === 401 ? "no key" : "no server";
    }
}

startTheme();
startDialogs(store);
const views = { chat: startChat({ store, say, withKey, banner }), machine: startMachine({ withKey }) };
window.addEventListener("hashchange", () => showView(views));
$("skip").addEventListener("click", (e) => {
    e.preventDefault();
    ($("chat").hidden ? $("machine") : $("text")).focus();
});
showView(views);
nameModel();
