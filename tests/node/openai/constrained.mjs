// Structured output and forced calls by the npm package openai against k3-router --http on the demo model, at temperature 1.
// node constrained.mjs URL KEY; one line a check, exit 1 when one fails.
import OpenAI from 'openai';
import assert from 'node:assert/strict';
import { check, leave } from './check.mjs';

const [, , url, apiKey] = process.argv;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const base = { model: 'demo-model', messages: [{ role: 'user', content: 'What is the capital of Italy?' }], max_tokens: 300, temperature: 1 };

const schema = {
    type: 'object', additionalProperties: false, required: ['city', 'sure'],
    properties: { city: { type: 'string', maxLength: 8 }, sure: { type: 'boolean' }, why: { anyOf: [{ type: 'null' }, { enum: ['known', 'guessed'] }] } },
};
const response_format = { type: 'json_schema', json_schema: { name: 'answer', strict: true, schema } };
const isAnswer = (text) => {
    const o = JSON.parse(text);
    assert.equal(typeof o.city, 'string');
    assert.ok([...o.city].length <= 8, o.city);
    assert.equal(typeof o.sure, 'boolean');
    assert.ok([undefined, null, 'known', 'guessed'].includes(o.why));
    assert.deepEqual(Object.keys(o).filter((k) => !['city', 'sure', 'why'].includes(k)), []);
};

await check('json_schema, by several seeds', async () => {
    const replies = await Promise.all([1, 2, 3].map((seed) => client.chat.completions.create({ ...base, seed, response_format })));
    for (const r of replies) {
        assert.equal(r.choices[0].finish_reason, 'stop');
        isAnswer(r.choices[0].message.content);
    }
});
await check('json_schema, streamed by the helper, with tools that need not be called', async () => {
    const tools = [{ type: 'function', function: { name: 'get_weather' } }];
    const final = await client.chat.completions.stream({ ...base, seed: 4, response_format, tools, top_p: 0.8 }).finalChatCompletion();
    const { message, finish_reason } = final.choices[0];
    if (message.content) isAnswer(message.content);
    else assert.ok(finish_reason === 'length' || message.tool_calls.every((c) => c.function.name === 'get_weather'));
});
await check('a schema with an unknown keyword is refused, with its name', async () => {
    const bad = { type: 'json_schema', json_schema: { name: 'n', schema: { type: 'object', properties: { n: { type: 'integer', minimum: 1 } } } } };
    await assert.rejects(client.chat.completions.create({ ...base, response_format: bad }), (e) => {
        assert.ok(e instanceof OpenAI.BadRequestError);
        assert.equal(e.param, 'response_format.json_schema.schema');
        assert.match(e.message, /"minimum" at \/properties\/n is not supported; supported: type, /);
        return true;
    });
});
await check('a call that is asked for by name', async () => {
    const tools = ['get_weather', 'get_time'].map((name) => ({ type: 'function', function: { name } }));
    const r = await client.chat.completions.create({ ...base, temperature: 0, tools, tool_choice: { type: 'function', function: { name: 'get_time' } } });
    assert.equal(r.choices[0].finish_reason, 'tool_calls');
    for (const c of r.choices[0].message.tool_calls) {
        assert.equal(c.function.name, 'get_time');
        assert.equal(typeof JSON.parse(c.function.arguments), 'object');
    }
});
leave();
