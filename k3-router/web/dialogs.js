/* Questions to the person: one dialog for all, and the settings. */
import { cleanSettings, settingsFields } from "./store.js";

const $ = (id) => document.getElementById(id);
let answer = null; /* of the question that is open */

function close(value) {
    const resolve = answer;
    answer = null;
    if ($("ask").open)
        $("ask").close();
    $("ask-input").value = ""; /* it may have been a key */
    resolve?.(value);
}

/* {title, note, label, value, ok, secret} -> the text, or null.  Without a label it is a yes (true) or no (null). */
export function ask(q) {
    close(null);
    $("ask-title").textContent = q.title;
    $("ask-note").textContent = q.note ?? "";
    $("ask-note").hidden = !q.note;
    $("ask-row").hidden = !q.label;
    $("ask-label").textContent = q.label ?? "";
    $("ask-input").type = q.secret ? "password" : "text";
    $("ask-input").value = q.value ?? "";
    $("ask-ok").textContent = q.ok;
    $("ask").showModal();
    (q.label ? $("ask-input") : $("ask-ok")).focus();
    $("ask-input").select();
    return new Promise((resolve) => {
        answer = resolve;
    });
}

function openSettings(store) {
    const s = store.settings();
    const form = $("settings-form");
    for (const [name, value] of Object.entries(s))
        form.elements[name].value = value;
    $("settings-error").textContent = "";
    $("settings").showModal();
}

function saveSettings(store) {
    const form = $("settings-form");
    const s = cleanSettings(Object.fromEntries(new FormData(form)));
    const { error } = settingsFields(s);
    $("settings-error").textContent = error ?? "";
    if (error)
        return;
    store.putSettings(s);
    $("settings").close();
}

export function startDialogs(store) {
    $("ask-form").addEventListener("submit", (e) => {
        e.preventDefault();
        close($("ask-row").hidden ? true : $("ask-input").value);
    });
    $("ask-cancel").addEventListener("click", () => close(null));
    $("ask").addEventListener("close", () => close(null));
    $("settings-open").addEventListener("click", () => openSettings(store));
    $("settings-cancel").addEventListener("click", () => $("settings").close());
    $("settings-form").addEventListener("submit", (e) => {
        e.preventDefault();
        saveSettings(store);
    });
}
