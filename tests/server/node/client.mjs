// What OpenAI's client for Node makes of the server named by the environment, as one JSON object for the test to judge.
import OpenAI from "openai";

const [model, prompt, content] = process.argv.slice(2);
const messages = [{ role: "user", content }];
const client = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const greedy = { model, temperature: 0, max_tokens: 24 };
const response = { model, input: content, temperature: 0, max_output_tokens: 24 };
const found = {};

async function joined(stream, piece) {
  let text = "";
  for await (const event of stream) text += piece(event) ?? "";
  return text;
}

async function refusal(call) {
  try {
    await call;
    return null;
  } catch (error) {
    return [error.constructor.name, error.status, error.param ?? null, error.code];
  }
}

found.models = (await client.models.list()).data.map((one) => one.id);

const completion = await client.completions.create({ ...greedy, prompt, logprobs: 1 });
found.completion = completion.choices[0].text;
found.tokens_with_logprobs = completion.choices[0].logprobs.tokens.length;
found.completion_stream = await joined(
  await client.completions.create({ ...greedy, prompt, stream: true }),
  (event) => event.choices[0]?.text,
);

const chat = await client.chat.completions.create({ ...greedy, messages });
found.chat = chat.choices[0].message.content;
found.usage = chat.usage.completion_tokens;
found.seeded = (
  await client.chat.completions.create({ ...greedy, temperature: 1, seed: 7, messages })
).choices[0].message.content;
found.chat_stream = await joined(
  await client.chat.completions.create({ ...greedy, messages, stream: true }),
  (event) => event.choices[0]?.delta?.content,
);

found.response = (await client.responses.create(response)).output_text;
found.response_stream = await joined(
  await client.responses.create({ ...response, stream: true }),
  (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
);

found.error = await refusal(client.completions.create({ ...greedy, prompt, max_tokens: 100_000 }));
found.stranger = await refusal(client.withOptions({ apiKey: "other" }).models.list());

const long = await client.chat.completions.create({ ...greedy, messages, max_tokens: 440, stream: true });
let read = 0;
for await (const _ of long) if (++read === 3) break;
long.controller.abort();
found.cut = read;

console.log(JSON.stringify(found));
