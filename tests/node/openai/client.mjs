// Drives k3-router --http on the demo model with the npm package openai: chat, streams, completions, models, errors,
// cancellation.  node client.mjs URL KEY; one line a check, exit 1 when one fails.
import OpenAI from 'openai';
import assert from 'node:assert/strict';
import { check, leave } from './check.mjs';

const [, , url, apiKey] = process.argv;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const model = 'demo-model';
const messages = [{ role: 'user', content: 'What is the capital of Italy?' }];
const ROME = 'The capital of Italy is Rome.';

async function rejects(promise, type, status, param) {
    await assert.rejects(promise, (e) => {
        assert.ok(e instanceof type, `${e?.constructor?.name}: ${e?.message}`);
        assert.equal(e.status, status);
        if (param !== undefined) assert.equal(e.param, param);
        return true;
    });
}

await check('models', async () => {
    const ids = [];
    for await (const m of client.models.list()) ids.push(m.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).owned_by, 'k3');
    await rejects(client.models.retrieve('gpt-4'), OpenAI.NotFoundError, 404);
});
await check('chat', async () => {
    const r = await client.chat.completions.create({ model, messages, temperature: 0, user: 'u', metadata: { a: 'b' }, store: false });
    assert.equal(r.choices[0].message.content, ROME);
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
});
await check('chat with content parts, a system message, an earlier turn and thinking', async () => {
    const r = await client.chat.completions.create({
        model, temperature: 0, reasoning_effort: 'low',
        messages: [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'Hello!' }, { role: 'assistant', content: 'Hello!' },
            { role: 'user', content: [{ type: 'text', text: 'What is the capital of Italy?' }] }],
    });
    assert.equal(typeof r.choices[0].message.content, 'string');
    assert.ok(r.usage.prompt_tokens > 40);
});
await check('chat, streamed by hand', async () => {
    let text = '', usage = null, reason = null, first = null;
    const stream = await client.chat.completions.create({ model, messages, temperature: 0, stream: true, stream_options: { include_usage: true } });
    for await (const c of stream) {
        first ??= c.choices[0].delta;
        text += c.choices[0]?.delta?.content ?? '';
        reason = c.choices[0]?.finish_reason ?? reason;
        usage = c.usage ?? usage;
    }
    assert.deepEqual(first, { role: 'assistant', content: '' });
    assert.equal(text, ROME);
    assert.equal(reason, 'stop');
    assert.equal(usage.prompt_tokens, 28);
});
await check('chat, streamed by the helper, is what the plain reply is', async () => {
    const runner = client.chat.completions.stream({ model, messages, temperature: 0 });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, ROME);
});
await check('completions', async () => {
    const r = await client.completions.create({ model, prompt: 'The capital of France is', temperature: 0 });
    assert.equal(r.choices[0].text, ' Paris.');
    let text = '';
    for await (const c of await client.completions.create({ model, prompt: 'The capital of France is', temperature: 0, stream: true }))
        text += c.choices[0].text;
    assert.equal(text, ' Paris.');
});
await check('errors have their classes and name the field', async () => {
    const ask = (more) => client.chat.completions.create({ model, messages, ...more });
    await rejects(ask({ n: 9 }), OpenAI.BadRequestError, 400, 'n');
    await rejects(ask({ temperature: -1 }), OpenAI.BadRequestError, 400, 'temperature');
    await rejects(ask({ logit_bias: { 5: 101 } }), OpenAI.BadRequestError, 400, 'logit_bias');
    await rejects(ask({ messages: [] }), OpenAI.BadRequestError, 400, 'messages');
    await rejects(ask({ tool_choice: 'required' }), OpenAI.BadRequestError, 400, 'tool_choice');
    await rejects(ask({ max_tokens: 100000 }), OpenAI.BadRequestError, 400, 'max_tokens');
    await rejects(ask({ stream: true, stop: [''] }), OpenAI.BadRequestError, 400, 'stop');
    await rejects(client.embeddings.create({ model, input: 'x' }), OpenAI.NotFoundError, 404);
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'not-the-key-of-this', maxRetries: 0 });
    await rejects(stranger.models.list(), OpenAI.AuthenticationError, 401);
});
await check('logprobs, streamed by the helper, are what the plain reply has', async () => {
    const body = { model, messages, temperature: 0, logprobs: true, top_logprobs: 3, reasoning_effort: 'low' };
    const plain = (await client.chat.completions.create(body)).choices[0];
    const final = (await client.chat.completions.stream(body).finalChatCompletion()).choices[0];
    assert.equal(plain.logprobs.content.map((e) => e.token).join(''), plain.message.content);
    assert.deepEqual(plain.logprobs.content.map((e) => e.top_logprobs.length), plain.logprobs.content.map(() => 3));
    assert.deepEqual(final.logprobs.content, plain.logprobs.content);
    assert.equal(Buffer.from(plain.logprobs.content.flatMap((e) => e.bytes)).toString(), plain.message.content);
});
await check('n answers, bias and penalties', async () => {
    const body = { model, messages, temperature: 2, seed: 5, max_tokens: 12, presence_penalty: 0.5, frequency_penalty: 0.5, logit_bias: { 295: -100 } };
    const three = await client.chat.completions.create({ ...body, n: 3 });
    assert.deepEqual(three.choices.map((c) => c.index), [0, 1, 2]);
    for (let i = 0; i < 3; i++) {
        const one = await client.chat.completions.create({ ...body, seed: 5 + i });
        assert.equal(one.choices[0].message.content, three.choices[i].message.content);
    }
    const text = ['', '', ''];
    for await (const c of await client.chat.completions.create({ ...body, n: 3, stream: true }))
        for (const choice of c.choices) text[choice.index] += choice.delta.content ?? '';
    assert.deepEqual(text, three.choices.map((c) => c.message.content));
    const legacy = await client.completions.create({ model, prompt: 'The capital of France is', temperature: 0, logprobs: 2 });
    assert.equal(legacy.choices[0].logprobs.tokens.join(''), ' Paris.');
    assert.equal(legacy.choices[0].logprobs.text_offset.length, legacy.choices[0].logprobs.token_logprobs.length);
});
await check('tools are taken, and an answer without a call is an answer', async () => {
    const tools = [{ type: 'function', function: { name: 'get_weather', description: 'x', parameters: { type: 'object', properties: { city: { type: 'string' } } } } }];
    const r = await client.chat.completions.create({ model, messages, tools, temperature: 0, max_tokens: 30 });
    assert.ok(['stop', 'length', 'tool_calls'].includes(r.choices[0].finish_reason));
});
await check('an aborted stream ends', async () => {
    const stream = await client.completions.create({ model, prompt: 'Tell me', temperature: 100, top_p: 1, seed: 8, max_tokens: 1500, stream: true });
    let n = 0;
    for await (const c of stream) {
        n += c.choices.length;
        if (n === 5) stream.controller.abort();
    }
    assert.ok(n < 1000, `${n} chunks`);
});
leave();
