// Chromium for the checks and the pictures: whatever the page does wrong is collected.
import { chromium } from 'playwright-core';

export async function browser() {
    return chromium.launch({
        executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
        args: ['--disable-gpu', '--disable-dev-shm-usage', ...(process.getuid() === 0 ? ['--no-sandbox'] : [])],
    });
}

// A context with one page.  faults: console errors, exceptions, violations of the policy, requests to elsewhere.
export async function open(b, url, options = {}) {
    const faults = [];
    const context = await b.newContext({ viewport: { width: 1280, height: 800 }, ...options });
    await context.addInitScript(() => {
        document.addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`));
    });
    context.on('console', (m) => {
        if (m.type() === 'error' || m.type() === 'warning')
            faults.push(`console: ${m.text()} ${m.location().url}`);
    });
    context.on('weberror', (e) => faults.push(`exception: ${e.error().stack}`));
    context.on('request', (r) => {
        if (!r.url().startsWith(`${url}/`) && !/^(blob|data):/.test(r.url()))
            faults.push(`elsewhere: ${r.url()}`);
    });
    const page = await context.newPage();
    page.setDefaultTimeout(60000);
    return { context, page, faults };
}
