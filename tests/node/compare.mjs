// compare.mjs PROBE WORKDIR DEMO_RANKS [RELEASED_RANKS]: the ids of PROBE (tests/probe/tokenize_probe.c) against those of the npm
// package tiktoken with K3's split pattern (spec/text.md 1.4, 2.6).
//   lines       10,000 random Unicode lines: demo vocabulary, ranks of cl100k_base, the released ranks when given
//   code points every code point beside characters of each class, with a vocabulary that shows where pieces end
//   corpus      the combinatorial corpus of spec/text.md 2.2 with the ranks of o200k_base and cl100k_base (2.5)
import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';

const require = createRequire(import.meta.url);
const { Tiktoken } = require('tiktoken/lite');
const [probe, workdir, demo, released] = process.argv.slice(2);

const upper = '[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]';
const lower = '[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]';
const prefix = '[^\\r\\n\\p{L}\\p{N}]?';
const contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
const pattern = [
    '[\\p{Han}]+',
    `${prefix}${upper}*${lower}+${contraction}`,
    `${prefix}${upper}+${lower}*${contraction}`,
    '\\p{N}{1,3}',
    ' ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*',
    '\\s*[\\r\\n]+',
    '\\s+(?!\\S)',
    '\\s+',
].join('|');

// A generator with a seed, so that a failure can be seen again.
let state = 20260901n;
function random(n) {
    state = (state * 6364136223846793005n + 1442695040888963407n) & 0xffffffffffffffffn;
    return Number((state >> 33n) % BigInt(n));
}

// The packaged form "! OFFSET token token ..." as lines "base64 rank".
function rankLines(name) {
    const lines = [];
    for (const line of require(`tiktoken/encoders/${name}.json`).bpe_ranks.split('\n')) {
        const [mark, offset, ...tokens] = line.split(' ');
        if (mark !== '!') continue;
        tokens.forEach((token, i) => { lines[Number(offset) + i] = `${token} ${Number(offset) + i}\n`; });
    }
    const text = lines.join('');
    if (text.split('\n').length !== lines.length + 1) throw new Error(`${name}: ranks with a gap`);
    const path = join(workdir, name);
    writeFileSync(path, text);
    return path;
}

const awkward = ['', ' ', '  ', '\t', '\r\n', '\n', '\u00a0', '\u3000', '\u2028', '\u180e', '\u200d', '\ufeff', '\u0000',
    '\u001c', "'s", "'S", "'\u017f", "'ll", "'RE", '\u2019t', '中', '漢字', '〇', '々', '、', '。', '⺀', 'か', 'カ', 'ー',
    '한국', 'हिन्दी', 'العربية', 'שלום', 'é', 'e\u0301', '\u0301', 'ǅ', 'ʰ', 'ß', 'ﬁ', 'Ａ', '1', '12', '1234', '٣', '½', '²', '🙂', '👩‍💻',
    '🇯🇵', '<|open|>', '[BOS]', '<|sep|>', 'the', 'The', 'CAPITAL', 'fooBAR', 'XMLHttp', '!', '...', '/', '//\n', '_', '-', '\\', '"', '#\n'];

function randomLine() {
    let line = '';
    for (let n = 1 + random(30); n > 0; n--) {
        const kind = random(10);
        let c;
        if (kind < 5) line += awkward[random(awkward.length)];
        else if (kind < 7) line += String.fromCharCode(32 + random(95));
        else {
            const top = [0x250, 0x3000, 0x10000, 0x20000, 0x110000][random(5)];
            do c = random(top); while (c >= 0xd800 && c < 0xe000);
            line += String.fromCodePoint(c);
        }
    }
    return line;
}

let compared = 0, different = 0;
function compare(label, ranks, lines) {
    const oracle = new Tiktoken(readFileSync(ranks, 'utf8'), {}, pattern);
    const ran = spawnSync(probe, [ranks], { input: lines.map((l) => JSON.stringify(l) + '\n').join(''), maxBuffer: 1 << 30 });
    if (ran.status !== 0) throw new Error(`${label}: the probe left with ${ran.status}: ${ran.stderr}`);
    const got = ran.stdout.toString().trimEnd().split('\n');
    if (got.length !== lines.length) throw new Error(`${label}: ${got.length} answers for ${lines.length} lines`);
    let bad = 0, ids = 0;
    const h = { n: 0, fnv: 0xcbf29ce484222325n };
    const add = (v) => {
        for (let i = 0; i < 4; i++) h.fnv = ((h.fnv ^ BigInt((v >>> (8 * i)) & 0xff)) * 0x100000001b3n) & 0xffffffffffffffffn;
    };
    lines.forEach((line, i) => {
        const want = Array.from(oracle.encode_ordinary(line));
        compared++;
        ids += want.length;
        if (got[i] !== JSON.stringify(want)) {
            if (bad++ < 5) console.log(`${label}: ${JSON.stringify(line)}: ${got[i]} where ${JSON.stringify(want)} is right`);
        }
        if (lines.length === 21952) {
            add(want.length);
            want.forEach(add);
        }
    });
    oracle.free();
    different += bad;
    console.log(`${label}: ${lines.length} lines, ${ids} ids, ${bad} different`);
    return { ids, fnv: h.fnv };
}

const lines = Array.from({ length: 10000 }, randomLine);
const cl100k = rankLines('cl100k_base'), o200k = rankLines('o200k_base');
compare('demo vocabulary', demo, lines);
compare('cl100k_base', cl100k, lines);
if (released) compare('released vocabulary', released, lines);

// Tokens of two bytes that only arise where two characters lie in one piece.
{
    const b64 = (...b) => Buffer.from(b).toString('base64');
    const text = [];
    for (let i = 0; i < 256; i++) text.push(b64(i));
    for (const left of [0x21, 0x31, 0x61, 0x41, 0xad, 0x09, 0x20]) for (let lead = 0xc2; lead < 0xf5; lead++) text.push(b64(left, lead));
    for (let last = 0x80; last < 0xc0; last++) for (const right of [0x41, 0x0a, 0x31]) text.push(b64(last, right));
    const path = join(workdir, 'borders');
    writeFileSync(path, text.map((t, i) => `${t} ${i}\n`).join(''));
    const all = [];
    for (let c = 0x80; c < 0x110000; c++) {
        if (c >= 0xd800 && c < 0xe000) continue;
        if (c >= 0x40000 && c < 0xe0000) continue; // nothing is assigned there, nor beyond in the private planes
        if (c >= 0xf0000) break;
        const s = String.fromCodePoint(c);
        all.push(`!!${s}\n1${s}1\n中${s}\na${s}\n${s}Aa\nA${s}A\n\t${s}\n ${s}  ${s}x`);
    }
    compare('code points', path, all);
}

// The corpus whose hashes spec/text.md 2.5 gives: so the pattern of this file is right, too.
{
    const f = ['', 'a', 'A', 'Ab', 'ABCd', '\u00e9', 'e\u0301', '\u6c49', '\u6f22\u5b57', '\ud55c', '\u0939', '\u0627', '0', '12', '1234', ' ', '  ',
        '\t', '\n', '\r\n', '\u00a0', '!', '...', '\ud83d\ude42', '\ud83d\udc69\u200d\ud83d\udcbb', "'s", '<|open|>', '[BOS]'];
    const corpus = [];
    for (const a of f) for (const b of f) for (const c of f) corpus.push(a + b + c);
    for (const [label, ranks, ids, fnv] of [['corpus, o200k_base', o200k, 93340, 0xf7e5367f43326bebn],
        ['corpus, cl100k_base', cl100k, 105029, 0x29a59d1eabed5e37n]]) {
        const got = compare(label, ranks, corpus);
        if (got.ids !== ids || got.fnv !== fnv) {
            console.log(`${label}: ${got.ids} ids, hash ${got.fnv.toString(16)}; published are ${ids} and ${fnv.toString(16)}`);
            different++;
        }
    }
}
console.log(`${compared} compared, ${different} different`);
process.exit(different ? 1 : 0);
