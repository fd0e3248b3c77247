// The modules of the page that need no browser, by node's own test runner.  tests/proc/page.bats copies k3-router/web to ./web.
import assert from 'node:assert/strict';
import test from 'node:test';
import { parse, safeHref } from './web/markdown.js';
import { SseParser, progressText, readProgress } from './web/sse.js';
import { Store, cleanSettings, requestMessages, settingsFields } from './web/store.js';
import { History, bytesText, drives, layerHits, life, memory, speedText, summarize } from './web/rates.js';

// The same numbers each time.
function random(seed) {
    let x = seed;
    return (n) => {
        x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
        return x % n;
    };
}

// ---- server-sent events

const STREAM = ': hello\r\n\r\ndata: {"a":"é😀"}\n\ndata: two\rdata: lines\r\r:no blank\nid: 7\nevent: x\ndata\n\nretry: 9\n\ndata: [DONE]\n\ndata: cut';
const EVENTS = [{ comment: 'hello' }, { data: '{"a":"é😀"}' }, { data: 'two\nlines' }, { comment: 'no blank' }, { data: '' }, { data: '[DONE]' }];

test('a stream is the same however it is cut', () => {
    const bytes = new TextEncoder().encode(STREAM);
    for (let size = 1; size <= bytes.length; size++) {
        const p = new SseParser();
        const out = [];
        for (let i = 0; i < bytes.length; i += size)
            out.push(...p.push(bytes.subarray(i, i + size)));
        assert.deepEqual(out, EVENTS, `pieces of ${size}`);
    }
});
test('a byte order mark, and a long line in many pieces', () => {
    const p = new SseParser();
    assert.deepEqual(p.push(new TextEncoder().encode('\uFEFFdata: x\n\n')), [{ data: 'x' }]);
    const q = new SseParser();
    const out = [...q.text('data: ')];
    for (let i = 0; i < 20000; i++)
        out.push(...q.text('abcdefghij'));
    out.push(...q.text('\n\n'));
    assert.equal(out.length, 1);
    assert.equal(out[0].data.length, 200000);
});
test('comments of the server are understood', () => {
    const all = { phase: 'prefill', layer: 12, layers: 93, tokens: 0, gbPerS: 1.52, etaS: 31, waiting: 'trunk' };
    assert.deepEqual(readProgress('prefill layer 12/93 tokens 0 1.52 GB/s ETA 31 s waiting for trunk'), all);
    assert.equal(progressText(all), 'Reading the prompt · layer 12 of 93 · 1.52 GB/s · about 31 s to the next token · waiting for the trunk');
    assert.deepEqual(readProgress('queued, 2 before it, 1 running'), { phase: 'queued', before: 2 });
    assert.equal(progressText(readProgress('queued, 2 before it, 1 running')), 'Waiting for its turn, 2 before it');
    assert.equal(readProgress('starting tokens 0').phase, 'starting');
    assert.equal(progressText(readProgress('k3-computed was restarted')), 'k3-computed was restarted');
});

// ---- Markdown

const flat = (c) => c.map((x) => (typeof x === 'string' ? x : x.t === 'br' ? '\n' : x.text ?? flat(x.c))).join('');

test('blocks', () => {
    const b = parse('# Head #\n\ntext **bold** and *it* `co*de`\nnext\n\n- one\n- two\n  1. a\n  2. b\n\n3) c\n\n> q\n> r\n\n---\n\n| a | b |\n|---|:-:|\n| 1 | **2** |\n\n```js x\nlet a = "<b>";\n\n# no head\n```\nend');
    assert.deepEqual(b.map((x) => x.t), ['h', 'p', 'list', 'list', 'quote', 'hr', 'table', 'code', 'p']);
    assert.deepEqual(b[0], { t: 'h', n: 1, c: ['Head'] });
    assert.deepEqual(b[1].c, ['text ', { t: 'b', c: ['bold'] }, ' and ', { t: 'i', c: ['it'] }, ' ', { t: 'code', text: 'co*de' }, { t: 'br' }, 'next']);
    assert.equal(b[2].items.length, 2);
    assert.deepEqual(b[2].items[1].map((x) => x.t), ['p', 'list']);
    assert.equal(b[2].items[1][1].start, 1);
    assert.equal(b[3].start, 3);
    assert.deepEqual(b[6].rows[0][1], [{ t: 'b', c: ['2'] }]);
    assert.deepEqual(b[7], { t: 'code', lang: 'js', text: 'let a = "<b>";\n\n# no head' });
});
test('a block of code that has not ended is one already', () => {
    assert.deepEqual(parse('```\nint a;'), [{ t: 'code', lang: '', text: 'int a;' }]);
});
test('only links of http and https are links; HTML and images are text', () => {
    for (const href of ['javascript:alert(1)', 'JaVaScRiPt:alert(1)', 'data:text/html,x', 'vbscript:x', ' https://x', 'https://a b', '//x', 'https://x"y'])
        assert.equal(safeHref(href), null, href);
    const source = '[a](javascript:alert(1)) <img src=x onerror=alert(1)> ![x](https://e.com/i.png) [ok](https://e.com/?a=1&b)';
    const [p] = parse(source);
    const links = p.c.filter((x) => x.t === 'a');
    assert.deepEqual(links, [{ t: 'a', href: 'https://e.com/?a=1&b', c: ['ok'] }]);
    assert.ok(flat(p.c).startsWith('[a](javascript:alert(1)) <img src=x onerror=alert(1)> ![x](https://e.com/i.png) '));
});
test('marks that are no marks stay', () => {
    for (const text of ['2 * 3 * 4', 'snake_case_name', 'a ** b', '`', '**', '_', '[x]', '[x](', '\\', 'a | b', '5 > 4', '~~'])
        assert.equal(flat(parse(text)[0].c), text);
});
test('any text is parsed, in time that grows as it does', () => {
    const pieces = ['*', '**', '_', '`', '```\n', '[', '](', ')', '\n', '- ', '1. ', '> ', '#', '|', '|-|', ' ', '    ', '<b>', 'a', 'é', '\\', '~', '\n\n', '!'];
    const next = random(7);
    for (let i = 0; i < 3000; i++) {
        let text = '';
        for (let k = next(60); k >= 0; k--)
            text += pieces[next(pieces.length)];
        for (const b of parse(text))
            assert.ok(['p', 'h', 'code', 'hr', 'quote', 'list', 'table'].includes(b.t));
    }
    for (const piece of ['*a ', '**a', '[', '[a](', '`a', '``', '> ', '- ', '- - ', '# #', '    ', '~~~~ ', '|', '1. ', '_a_', '*a*b_', '](', '|-', ' `', '#'])
        for (const text of [piece.repeat(40000), `${piece}\n`.repeat(20000)]) {
            const start = process.cpuUsage();
            parse(text);
            const used = process.cpuUsage(start);
            assert.ok(used.user + used.system < 3e6, `${JSON.stringify(piece)}: ${(used.user + used.system) / 1e6} s`);
        }
});

// ---- conversations

class Memory {
    constructor(room) {
        this.room = room;
        this.map = new Map();
    }
    get length() { return this.map.size; }
    key(i) { return [...this.map.keys()][i] ?? null; }
    getItem(k) { return this.map.get(k) ?? null; }
    removeItem(k) { this.map.delete(k); }
    setItem(k, v) {
        if (v.length > this.room)
            throw Object.assign(new Error('full'), { name: 'QuotaExceededError' });
        this.map.set(k, v);
    }
}

test('conversations are kept, listed by age, and deleted', () => {
    const s = new Store(new Memory(1e6));
    const a = s.create(1000), b = s.create(2000);
    a.messages.push({ role: 'user', content: 'x' }, { role: 'assistant', content: 'y', reasoning: 'z', state: 'done', error: '', usage: null, timings: null });
    assert.ok(s.put(a, 1000) && s.put(b, 2000));
    assert.deepEqual(s.list().map((c) => c.id), [b.id, a.id]);
    assert.deepEqual(s.get(a.id), a);
    s.remove(b.id);
    assert.deepEqual(s.list().map((c) => c.id), [a.id]);
});
test('a full storage, none, and a damaged one', () => {
    const told = [];
    const s = new Store(new Memory(300), (why) => told.push(why));
    const c = s.create(1);
    c.messages.push({ role: 'user', content: 'x'.repeat(1000) });
    assert.equal(s.put(c, 1), false);
    assert.deepEqual(told, ['full']);
    assert.equal(s.get(c.id), c);
    assert.equal(s.list().length, 1);
    const none = new Store(null, (why) => told.push(why));
    assert.equal(none.put(none.create(1), 1), false);
    assert.equal(told[1], 'none');
    const m = new Memory(1e6);
    for (const [k, v] of [['k3.chat.a', '{'], ['k3.chat.b', '[]'], ['k3.chat.c', 'null'], ['other', '{}'], ['k3.settings', 'x'],
                          ['k3.chat.d', '{"messages":[{"role":"assistant","content":{},"state":"x"},{"role":"evil"},7,null]}']])
        m.setItem(k, v);
    const d = new Store(m);
    assert.deepEqual(d.list().map((x) => x.id), ['d']);
    assert.deepEqual(d.get('d').messages, [{ role: 'assistant', content: '', reasoning: '', error: '', state: 'done', usage: null, timings: null }]);
    assert.equal(d.settings().system, '');
});
test('settings become fields, or are refused by name', () => {
    const s = (o) => settingsFields(cleanSettings(o));
    assert.deepEqual(s({}), { fields: {} });
    assert.deepEqual(s({ temperature: '0.5', top_p: '0.9', max_tokens: '10', seed: '0', thinking: 'on', effort: 'low' }).fields,
                     { temperature: 0.5, top_p: 0.9, max_completion_tokens: 10, seed: 0, reasoning_effort: 'low' });
    assert.deepEqual(s({ thinking: 'off', effort: 'low' }).fields, { thinking: { type: 'disabled' } });
    assert.deepEqual(s({ thinking: 'on' }).fields, { thinking: { type: 'enabled' } });
    for (const [key, value, name] of [['temperature', 'warm', 'Temperature'], ['top_p', '2', 'Top-p'], ['max_tokens', '1.5', 'Longest answer'], ['seed', '-1', 'Seed']])
        assert.match(s({ [key]: value }).error, new RegExp(`^${name}: must be`));
});
test('thinking goes back as it came; failed answers do not', () => {
    const messages = [{ role: 'user', content: 'a' }, { role: 'assistant', content: '', reasoning: '', state: 'failed' }, { role: 'user', content: 'b' },
                      { role: 'assistant', content: 'c', reasoning: ' t\n', state: 'stopped' }];
    assert.deepEqual(requestMessages(messages, ' ', false), [{ role: 'user', content: 'a' }, { role: 'user', content: 'b' },
                                                             { role: 'assistant', content: 'c', reasoning_content: ' t\n' }]);
    assert.equal(requestMessages(messages, 'sys', true)[0].role, 'system');
    assert.equal(requestMessages(messages, '', true).at(-1).partial, true);
});

// ---- rates

function sample(s, o = {}) {
    const page = (stats, more) => ({ alive: true, pid: 1, generation: 1, state: 'ready', heartbeat_age_ns: 1e6, ...more,
                                     stats: Object.fromEntries(Object.entries(stats).map(([k, value]) => [k, { value }])) });
    const member = { alive: true, failed: false, reason: '', private_bytes: 1000 };
    return { now_ns: s * 1e9,
             daemons: { 'k3-trunkd': page({ read_bytes: 1e9 * s, ring_bytes: 100, pinned_bytes: 50, pinned_loaded_bytes: 20, resident_bytes: 5 }, o.trunkd),
                        'k3-expertd': page({ demands: 100 * s, hits: 50 * s, slots: 10, slots_ready: 4, slot_bytes: 7 }),
                        'k3-computed': page({ tokens_generated: 2 * s, passes: 2 * s, pass_ns: 1e9 * s, layer: 3, sequences_running: 1 }) },
             machine: { layers: 3, members: { 'k3-trunkd': { ...member, ...o.member }, 'k3-expertd': member, 'k3-computed': member, 'k3-router': member },
                        trunk: { at_ns: s * 1e9, drives: [{ name: 'a', fs: 'ext4', bytes_per_s: 5e9, rate_from: 'measured', read_bytes: 3e9 * s }], ring_filled_bytes: 60 },
                        experts: { at_ns: s * 1e9, drives: [{ name: 'a', fs: 'ext4', bytes_per_s: 4e9, rate_from: 'measured', read_bytes: 1e9 * s }],
                                   layer_demands: [0, 10 * s, 20 * s], layer_hits: [0, 5 * s, 20 * s] } } };
}

test('rates are differences of counters', () => {
    const h = new History();
    assert.equal(summarize(h).read, null);
    h.push(sample(10));
    assert.equal(h.rate('k3-trunkd', 'read_bytes'), null);
    for (const s of [11, 12, 13, 14, 15])
        h.push(sample(s));
    const s = summarize(h);
    assert.equal(s.trunk_read, 1e9);
    assert.equal(s.tokens_per_s, 2);
    assert.equal(s.pass_s, 0.5);
    assert.equal(s.hit_share, 0.5);
    assert.equal(s.expert_rows, 700);
    assert.deepEqual(drives(h).map((d) => [d.name, d.rate, d.limit, d.users.length]), [['a', 4e9, 5e9, 2]]);
    assert.deepEqual(layerHits(h).map((l) => l.share), [null, 0.5, 1]);
    assert.deepEqual(layerHits(h, 3).map((l) => l.demands), [0, 30, 60]);
    assert.deepEqual(memory(h).map((m) => m.bytes), [100, 20, 5, 28, 1000, 1000, 1000, 1000]);
});
test('what is gone has no data, and a new generation begins anew', () => {
    const h = new History();
    h.push(sample(10));
    h.push(sample(13, { trunkd: { alive: false }, member: { alive: false } }));
    assert.equal(h.value('k3-trunkd', 'ring_bytes'), null);
    assert.equal(summarize(h).trunk_read, null);
    assert.equal(life(h.latest, 'k3-trunkd').word, 'not running');
    h.push(sample(14, { trunkd: { generation: 2, pid: 9 } }));
    assert.equal(h.rate('k3-trunkd', 'read_bytes'), null);
    assert.equal(life(h.latest, 'k3-trunkd').generation, 2);
    assert.match(life(sample(1, { trunkd: { heartbeat_age_ns: 9e9 } }), 'k3-trunkd').text, /last heartbeat 9 s/);
    assert.match(life(sample(1, { member: { alive: false, failed: true, reason: 'no drive' } }), 'k3-trunkd').text, /failed: no drive/);
    h.push(sample(2)); // the machine was started again
    assert.equal(h.samples.length, 1);
});
test('numbers as text', () => {
    assert.deepEqual([0, 999, 1500, 25.1e6, 512e9, 1.56e12].map(bytesText), ['0 B', '999 B', '1.50 kB', '25.1 MB', '512 GB', '1.56 TB']);
    assert.deepEqual([null, 0, 0.0312, 5.25, 300].map(speedText), ['no data', '0', '0.031', '5.3', '300']);
});
