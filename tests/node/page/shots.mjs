// Pictures of the page for docs/images: two views, phone and desktop, light and dark.
// node shots.mjs OUT CHAT_URL [MACHINE_URL]   servers without a key; docs/user/page.md says how they are started
import { browser, open } from './browser.mjs';

const [, , out, chatUrl, machineUrl = chatUrl] = process.argv;
const SIZES = { desktop: { viewport: { width: 1280, height: 800 } }, phone: { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true } };
const QUESTIONS = [['What does k3-trunkd do?'], ['Which language do they speak in Brazil?'], ['What is the currency of Japan?'],
                   ['What is the capital of Italy?', 'What is the capital of Portugal?']]; // the first of a conversation with thinking

async function chat(b, size, colorScheme) {
    const { context, page } = await open(b, chatUrl, { ...SIZES[size], colorScheme });
    await page.goto(chatUrl);
    for (const conversation of QUESTIONS) {
        await page.evaluate(() => document.querySelector('#new').click());
        for (const question of conversation) {
            await page.evaluate((t) => localStorage.setItem('k3.settings', JSON.stringify({ thinking: t })), question === conversation[0] ? 'on' : 'off');
            await page.fill('#text', question);
            await page.press('#text', 'Enter');
            await page.waitForSelector('.assistant:last-child .usage');
        }
    }
    await page.locator('details.think').first().evaluate((d) => { d.open = true; });
    await page.mouse.move(0, 0);
    await page.screenshot({ path: `${out}/chat-${size}-${colorScheme}.png` });
    await context.close();
}

async function machine(b, size, colorScheme) {
    const { context, page } = await open(b, machineUrl, { ...SIZES[size], colorScheme });
    await page.goto(`${machineUrl}/#/machine`);
    await page.waitForFunction(() => /^layer [1-9]\d* of/.test(document.querySelectorAll('#picture .computed .value')[0]?.textContent) &&
        /B\/s/.test(document.querySelector('#drives td')?.textContent) && document.querySelector('#picture .dots.token')?.getAttribute('visibility') === 'visible' &&
        Number(document.querySelectorAll('#figures .small')[3].textContent.split(' ')[0]) >= 12); // passes
    await page.screenshot({ path: `${out}/machine-${size}-${colorScheme}.png` });
    await context.close();
}

const b = await browser();
const end = new AbortController();
// Something to be seen at work.
fetch(`${machineUrl}/v1/completions`, { method: 'POST', signal: end.signal,
    body: JSON.stringify({ prompt: 'Tell me', temperature: 100, top_p: 1, seed: 8, max_tokens: 1500, stream: true }) })
    .then(async (r) => { for await (const _ of r.body); }).catch(() => {});
for (const size of Object.keys(SIZES))
    for (const colorScheme of ['light', 'dark']) {
        await machine(b, size, colorScheme);
        await chat(b, size, colorScheme);
    }
end.abort();
await b.close();
