/* Before the first paint: the colours that were chosen by hand. */
"use strict";
try {
    const chosen = localStorage.getItem("k3.theme");
    if (chosen === "dark" || chosen === "light")
        document.documentElement.dataset.theme = chosen;
} catch {
    /* no storage: as the system has them */
}
