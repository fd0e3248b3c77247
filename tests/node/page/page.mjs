// The page in chromium, against the demo model.  node page.mjs URL KEY SERVER_PID; one line a check, exit 1 when one fails.
// The last check ends the server.
import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { browser, open } from './browser.mjs';
import * as checks from './check.mjs';

const [, , url, key, pid] = process.argv;
const ITALY = 'What is the capital of Italy?', ROME = 'The capital of Italy is Rome.';
const LONG = { temperature: '100', top_p: '1', seed: '8', max_tokens: '1500' }; // noise that does not end by itself
let expected = [];

const check = (name, fn) => checks.check(name, fn, (n) => page.screenshot({ path: `fault-${n}.png` }).catch(() => {}));
async function until(what, fn, seconds = 60) {
    for (const end = Date.now() + 1000 * seconds; Date.now() < end;) {
        if (await fn())
            return;
        await new Promise((r) => setTimeout(r, 50));
    }
    assert.fail(`not within ${seconds} s: ${what}`);
}
const stats = async () => (await fetch(`${url}/v1/k3/stats`, { headers: { Authorization: `Bearer ${key}` } })).json();
const stat = async (daemon, name) => (await stats()).daemons[daemon].stats[name].value;
const idle = () => until('nothing runs', async () => await stat('k3-router', 'answers_running') === 0 && await stat('k3-computed', 'sequences_running') === 0);
// What the server is expected to refuse is no fault of the page.
const refusals = (pattern) => expected.push(pattern);

const b = await browser();
const { context, page, faults } = await open(b, url, { acceptDownloads: true });
const bodies = []; // of the requests for answers
page.on('request', (r) => { if (r.method() === 'POST') bodies.push(JSON.parse(r.postData())); });

const last = () => page.locator('.assistant').last();
const send = async (text) => {
    await page.fill('#text', text);
    await page.press('#text', 'Enter');
};
const answered = () => page.waitForFunction(() => !document.querySelector('#send').hidden && document.querySelector('.assistant:last-child .actions'));
const set = async (values) => {
    await page.click('#settings-open');
    for (const name of ['system', 'temperature', 'top_p', 'max_tokens', 'seed'])
        await page.fill(`#settings [name=${name}]`, values[name] ?? '');
    for (const name of ['thinking', 'effort'])
        await page.selectOption(`#settings [name=${name}]`, values[name] ?? '');
    await page.click('#settings button[type=submit]');
};
const fresh = () => page.click('#new');
const overflow = () => page.evaluate(() => Math.max(document.scrollingElement.scrollWidth - innerWidth,
    ...[...document.querySelectorAll('main, main *')].filter((n) => n.checkVisibility() && !n.closest('.scroll, pre, .vh'))
        .map((n) => n.getBoundingClientRect().right - innerWidth)));

await check('the key is asked for, kept for the tab, and a wrong one is refused', async () => {
    refusals(/status of 401/);
    await page.goto(url);
    await page.waitForSelector('#ask[open]');
    await page.fill('#ask-input', 'a-wrong-key-of-enough-letters');
    await page.press('#ask-input', 'Enter');
    await page.waitForFunction(() => /not one of this server/.test(document.querySelector('#ask-note').textContent));
    await page.fill('#ask-input', key);
    await page.press('#ask-input', 'Enter');
    await page.waitForFunction(() => document.querySelector('#model').textContent === 'demo-model');
    await page.reload();
    await page.waitForFunction(() => document.querySelector('#model').textContent === 'demo-model');
    assert.equal(await page.locator('#ask[open]').count(), 0);
    assert.equal(await page.evaluate(() => Object.values(localStorage).join().includes('abcdefgh')), false);
});

await check('an answer has its tokens and its speed', async () => {
    await send(ITALY);
    await answered();
    assert.equal(await last().locator('.markdown').textContent(), ROME);
    assert.match(await last().locator('.usage').textContent(), /^28 prompt tokens, \d+ of them cached · 15 answer tokens · [\d.]+ tokens\/s$/);
    await page.waitForFunction((rome) => document.querySelector('#say').textContent === `The answer: ${rome}`, ROME);
    assert.equal(await page.textContent('#title'), ITALY);
});

await check('thinking is folded, can be opened, and goes back with the next question', async () => {
    await fresh();
    await set({ thinking: 'on' });
    await send(ITALY);
    await answered();
    const details = last().locator('details');
    assert.equal(await details.evaluate((d) => d.open), false);
    assert.match(await details.locator('summary').textContent(), /^Thinking, \d+ tokens$/);
    await details.locator('summary').click();
    assert.equal(await details.locator('.thought').textContent(), 'Italy: Rome.');
    assert.equal(await last().locator('.markdown').textContent(), ROME);
    await send('What is the currency of Japan?');
    await answered();
    const { messages, thinking } = bodies.at(-1);
    assert.deepEqual(messages[1], { role: 'assistant', content: ROME, reasoning_content: 'Italy: Rome.' });
    assert.deepEqual(thinking, { type: 'enabled' });
});

await check('an answer streams; Escape stops it and the work behind it; it can go on', async () => {
    await fresh();
    await set(LONG);
    await send('Tell me');
    await page.waitForFunction(() => document.querySelector('.assistant .markdown')?.textContent.length > 20);
    const some = await last().locator('.markdown').evaluate((n) => n.textContent.length);
    await page.waitForFunction((n) => document.querySelector('.assistant .markdown').textContent.length > n, some); // while it goes on
    assert.equal(await page.isVisible('#stop'), true);
    await page.press('#text', 'Escape');
    await answered();
    await idle();
    assert.equal(await last().locator('.ending').textContent(), 'Stopped.');
    const before = await last().locator('.markdown').evaluate((n) => n.textContent.length);
    await set({ ...LONG, max_tokens: '5' });
    await last().locator('button', { hasText: 'Continue' }).click();
    await answered();
    assert.equal(bodies.at(-1).messages.at(-1).partial, true);
    assert.ok(await last().locator('.markdown').evaluate((n) => n.textContent.length) > before);
    assert.equal(await last().locator('.ending').textContent(), 'The greatest length was reached.');
});

await check('a reload in the middle keeps what was shown, ends the work, and the conversation goes on', async () => {
    await fresh();
    await set(LONG);
    await send('Tell me');
    await page.waitForFunction(() => document.querySelector('.assistant .markdown')?.textContent.length > 20);
    const shown = await last().locator('.markdown').textContent();
    await page.reload();
    assert.match(await last().locator('.ending').textContent(), /^Cut off/);
    const text = await last().locator('.markdown').textContent();
    assert.equal(text.slice(0, 20), shown.slice(0, 20));
    assert.ok(text.length >= shown.length);
    await idle();
    await set({});
    await send(ITALY);
    await answered();
    assert.equal(bodies.at(-1).messages.length, 3);
    assert.equal(bodies.at(-1).messages[1].role, 'assistant');
    assert.equal(await page.locator('.message').count(), 4);
});

await check('a question is edited, an answer is made again', async () => {
    await fresh();
    await send('What is the capital of Spain?');
    await answered();
    const n = bodies.length;
    await last().locator('button', { hasText: 'Retry' }).click();
    await until('asked again', () => bodies.length === n + 1);
    await answered();
    assert.deepEqual(bodies[n], bodies[n - 1]);
    await page.hover('.user');
    await page.locator('.user button', { hasText: 'Edit' }).click();
    assert.equal(await page.inputValue('#text'), 'What is the capital of Spain?');
    assert.equal(await page.locator('.message').count(), 0);
    await send(ITALY);
    await answered();
    assert.equal(await last().locator('.markdown').textContent(), ROME);
});

await check("the server's own words are shown when it refuses, with a button to try again", async () => {
    refusals(/status of 503/);
    await fresh();
    await page.route('**/v1/chat/completions', (r) => r.fulfill({ status: 503, contentType: 'application/json',
        body: JSON.stringify({ error: { message: 'k3-trunkd is not running; it is being started', type: 'x', param: null, code: null } }) }));
    await send(ITALY);
    await answered();
    assert.equal(await last().locator('.failed').textContent(), 'k3-trunkd is not running; it is being started');
    await page.unroute('**/v1/chat/completions');
    await last().locator('button', { hasText: 'Retry' }).click();
    await page.waitForFunction((rome) => document.querySelector('.assistant .markdown')?.textContent === rome, ROME);
    await answered();
    await page.route('**/v1/chat/completions', (r) => r.fulfill({ status: 200, contentType: 'text/event-stream',
        body: 'data: {"choices":[{"index":0,"delta":{"content":"Half"}}]}\n\ndata: {"error":{"message":"the drive is gone"}}\n\ndata: [DONE]\n\n' }));
    await send(ITALY);
    await answered();
    assert.equal(await last().locator('.markdown').textContent(), 'Half');
    assert.equal(await last().locator('.failed').textContent(), 'the drive is gone');
    await page.unroute('**/v1/chat/completions');
});

await check('text of the model and of the person stays text', async () => {
    const evil = '<img src=x onerror="window.bad=1"><script>window.bad=2</script> [go](javascript:window.bad=3) ![p](https://example.com/p.png)\n\n' +
        '```html\n<img src=x onerror="window.bad=4">\n```\n\n**bold** [site](https://example.com/a)';
    await fresh();
    await page.route('**/v1/chat/completions', (r) => r.fulfill({ status: 200, contentType: 'text/event-stream',
        body: `: prefill layer 1/9 tokens 0\n\ndata: ${JSON.stringify({ choices: [{ index: 0, delta: { reasoning_content: evil } }] })}\n\n` +
            `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content: evil }, finish_reason: 'stop' }] })}\n\ndata: [DONE]\n\n` }));
    await send(evil);
    await answered();
    await page.unroute('**/v1/chat/completions');
    assert.equal(await page.locator('.user .body').textContent(), evil);
    assert.ok((await last().locator('.markdown p').first().textContent()).startsWith(evil.slice(0, 100)));
    assert.equal(await page.locator('#log img, #log script').count(), 0);
    assert.deepEqual(await last().locator('a').evaluateAll((all) => all.map((a) => a.href)), ['https://example.com/a']);
    assert.equal(await last().locator('strong').textContent(), 'bold');
    assert.equal(await last().locator('pre code').textContent(), '<img src=x onerror="window.bad=4">');
    await context.grantPermissions(['clipboard-read', 'clipboard-write']);
    await last().locator('.code button').click();
    await page.waitForFunction(() => document.querySelector('.code button').textContent === 'Copied');
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), '<img src=x onerror="window.bad=4">');
    await page.reload();
    assert.equal(await page.locator('#list .entry[aria-current]').textContent(), evil.split('\n')[0].slice(0, 60));
    assert.equal(await page.evaluate(() => window.bad), undefined);
});

await check('what anybody has put into the storage is shown as far as it makes sense', async () => {
    await page.evaluate(() => {
        const odd = { id: 'odd', title: {}, created: 'x', updated: 9e15, __proto__x: 1, messages: [
            { role: 'user', content: 'odd <i>one</i>' },
            { role: 'assistant', content: 'an answer', state: 'done', usage: { prompt_tokens: {}, completion_tokens: '7', prompt_tokens_details: 5 },
              timings: { predicted_per_second: '3' } }] };
        localStorage.setItem('k3.chat.odd', JSON.stringify(odd).replace('__proto__x', '__proto__'));
        sessionStorage.setItem('k3.current', 'odd');
    });
    await page.reload();
    assert.equal(await last().locator('.markdown').textContent(), 'an answer');
    assert.equal(await page.locator('.user .body').textContent(), 'odd <i>one</i>');
    assert.equal(await last().locator('.usage').textContent(), '0 prompt tokens, 0 of them cached · 0 answer tokens');
    await page.click('#menu summary');
    await page.click('#delete');
    await page.click('#ask-ok');
    await until('it is gone', async () => await page.evaluate(() => localStorage.getItem('k3.chat.odd')) === null);
});

await check('conversations: renamed, exported, deleted; a full storage is said', async () => {
    await page.click('#menu summary');
    await page.click('#rename');
    await page.fill('#ask-input', 'Of <b>names</b>');
    await page.click('#ask-ok');
    await page.waitForFunction(() => document.querySelector('#title').textContent === 'Of <b>names</b>');
    await page.click('#menu summary');
    const [download] = await Promise.all([page.waitForEvent('download'), page.click('#export')]);
    assert.equal(download.suggestedFilename(), 'k3-of-b-names-b.json');
    const saved = JSON.parse(await readFile(await download.path(), 'utf8'));
    assert.equal(saved.conversations[0].title, 'Of <b>names</b>');
    assert.equal(saved.conversations[0].messages.length, 2);
    const n = await page.locator('#list .entry').count();
    await page.click('#menu summary');
    await page.click('#delete');
    await page.click('#ask-ok');
    await until('one less', async () => await page.locator('#list .entry').count() === n - 1);
    await fresh();
    await page.evaluate(() => {
        for (let size = 1 << 22; size >= 1; size >>= 1)
            for (;;)
                try {
                    localStorage.setItem(`fill-${size}-${Object.keys(localStorage).length}`, 'x'.repeat(size));
                } catch {
                    break;
                }
    });
    await send(ITALY);
    await answered();
    assert.equal(await last().locator('.markdown').textContent(), ROME);
    assert.match(await page.textContent('#banner'), /storage is full/);
    await page.evaluate(() => Object.keys(localStorage).filter((k) => k.startsWith('fill')).forEach((k) => localStorage.removeItem(k)));
});

await check('the machine: its numbers move, and all of them are text', async () => {
    await page.click('#to-machine');
    const layers = (await stats()).machine.layers;
    await until('layers in the table', async () => await page.locator('#layers-table tbody tr').count() === layers);
    assert.equal(await page.locator('#layers rect.heat').count(), layers);
    const tokens = () => page.evaluate(() => Number([...document.querySelectorAll('#work div')].find((d) => d.firstChild.textContent === 'Tokens drawn').lastChild.textContent.replace(/\D/g, '')));
    await until('tokens are known', async () => await tokens() > 0);
    const before = await tokens();
    await fetch(`${url}/v1/completions`, { method: 'POST', headers: { Authorization: `Bearer ${key}` }, body: '{"prompt":"The capital of France is","max_tokens":8}' });
    await until('more tokens', async () => await tokens() > before);
    const rows = await page.locator('#daemons tbody tr').allTextContents();
    assert.deepEqual(rows, ['k3-trunkdready1', 'k3-expertdready1', 'k3-computedready1', 'k3-routerready1']);
    await until('drives are known', async () => await page.locator('#drives tbody tr').count() >= 1);
    for (const text of ['k3-trunkd', 'k3-expertd', 'pinned trunk', 'trunk ring', 'experts', 'k3-computed', 'k3-router'])
        assert.ok((await page.locator('#picture svg text').allTextContents()).includes(text), text);
    assert.match(await page.getAttribute('#picture svg', 'aria-label'), /^The family: drives read/);
    assert.equal(await page.locator('#picture-table tbody tr').count(), 9);
    assert.equal(await page.locator('#memory tbody tr').count(), 8);
    process.kill((await stats()).daemons['k3-expertd'].pid, 'SIGKILL');
    await until('the next generation', async () => (await page.locator('#daemons tbody tr').nth(1).textContent()) === 'k3-expertdready2');
    const asked = (await stats()).daemons['k3-router'].stats.requests.value;
    await page.click('#to-chat');
    assert.equal(await page.isVisible('#machine'), false);
    await new Promise((r) => setTimeout(r, 2500)); // nobody looks: nobody asks
    assert.ok((await stats()).daemons['k3-router'].stats.requests.value - asked <= 3);
});

await check('by keyboard alone', async () => {
    await page.reload();
    await fresh();
    await page.evaluate(() => { // where a person is who has just come
        document.body.tabIndex = -1;
        document.body.focus();
        document.body.removeAttribute('tabindex');
    });
    const focused = () => page.evaluate(() => document.activeElement.id);
    await page.keyboard.press('Tab');
    assert.equal(await focused(), 'skip');
    assert.ok(await page.evaluate(() => document.activeElement.getBoundingClientRect().top >= 0), 'it is seen');
    await page.keyboard.press('Enter');
    assert.equal(await focused(), 'text');
    await page.keyboard.type('What is the');
    await page.keyboard.press('Shift+Enter');
    await page.keyboard.type('capital of Italy?');
    assert.equal(await page.inputValue('#text'), 'What is the\ncapital of Italy?');
    await page.keyboard.press('Enter');
    await answered();
    assert.equal(await focused(), 'text');
    const order = [];
    for (let i = 0; i < 40 && order.at(-1) !== 'to-machine'; i++) {
        await page.keyboard.press('Shift+Tab');
        order.push(await page.evaluate(() => document.activeElement.id || document.activeElement.textContent));
        assert.ok(await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle !== 'none'), `${order.at(-1)}: focus is seen`);
    }
    assert.deepEqual(order.filter((x) => ['Retry', 'log', 'settings-open', 'new', 'theme', 'to-machine'].includes(x)),
                     ['Retry', 'log', 'settings-open', 'new', 'theme', 'to-machine']);
    await page.keyboard.press('Enter');
    await page.waitForSelector('#machine:not([hidden])');
    await page.goBack();
    await page.waitForSelector('#chat:not([hidden])');
});

await check('colours follow the system, or the switch', async () => {
    const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    await page.emulateMedia({ colorScheme: 'light' });
    const light = await paper();
    await page.emulateMedia({ colorScheme: 'dark' });
    const dark = await paper();
    assert.notEqual(light, dark);
    await page.click('#theme');
    assert.equal(await paper(), light);
    await page.reload();
    assert.equal(await paper(), light);
    await page.click('#theme');
    await page.emulateMedia({ colorScheme: 'light' });
    assert.equal(await paper(), dark);
    await page.click('#theme');
    assert.equal(await paper(), light);
});

await check('nothing sticks out at 360 px', async () => {
    await page.setViewportSize({ width: 360, height: 640 });
    assert.ok(await overflow() <= 0.5, `chat: ${await overflow()} px`);
    await page.click('#side-toggle');
    await page.waitForSelector('#side.open');
    assert.ok(await overflow() <= 0.5, `conversations: ${await overflow()} px`);
    await page.keyboard.press('Escape');
    assert.equal(await page.isVisible('#side'), false);
    await page.click('#to-machine');
    await page.waitForSelector('#picture svg:not(.wide)');
    await until('a picture of the layers', async () => await page.locator('#layers svg').count() === 1);
    assert.ok(await overflow() <= 0.5, `machine: ${await overflow()} px`);
});

await check('a server that has gone is said in both views', async () => {
    refusals(/ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET|ERR_SOCKET_NOT_CONNECTED/);
    process.kill(Number(pid), 'SIGTERM');
    await page.waitForSelector('#no-data:not([hidden])');
    assert.match(await page.textContent('#no-data'), /^No data\. The server does not answer/);
    assert.equal(await page.locator('#figures dd.big').first().textContent(), 'no data');
    assert.deepEqual(await page.locator('#daemons tbody td:nth-child(2)').allTextContents(), Array(4).fill('no data'));
    await page.click('#to-chat');
    await send(ITALY);
    await answered();
    assert.match(await last().locator('.failed').textContent(), /^The server does not answer/);
    assert.equal(await last().locator('button', { hasText: 'Retry' }).count(), 1);
});

await check('nothing went wrong in the console, and nothing was asked for elsewhere', async () => {
    assert.deepEqual(faults.filter((f) => !expected.some((p) => p.test(f))), []);
});
await b.close();
checks.leave();
