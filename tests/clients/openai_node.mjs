// OpenAI's client for Node: chat, stream, tools, structured output, responses.
// Arguments: the address and the name of the model. Run where the package openai is installed.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const schema = {
  type: "object",
  properties: { place: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["place"],
  additionalProperties: false,
};
const short = { model, messages, max_completion_tokens: 9, temperature: 0 };

const whole = await client.chat.completions.create(short);
assert.equal(whole.usage.completion_tokens, 9);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...short, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const must = { tools, tool_choice: "required", parallel_tool_calls: false };
const asked = { model, messages, max_completion_tokens: 200 };
const call = (await client.chat.completions.create({ ...asked, ...must })).choices[0];
assert.equal(call.finish_reason, "tool_calls");
const [made] = call.message.tool_calls;
assert.ok(["Rome", "Oslo"].includes(JSON.parse(made.function.arguments).place));
const result = { role: "tool", tool_call_id: made.id, content: "7" };
const again = { ...short, messages: [...messages, call.message, result], tools };
await client.chat.completions.create(again);
const final = await client.chat.completions.stream({ ...asked, ...must }).finalChatCompletion();
const [streamed] = final.choices[0].message.tool_calls;
assert.ok(["Rome", "Oslo"].includes(JSON.parse(streamed.function.arguments).place));

const json_schema = { name: "place", schema, strict: true };
const response_format = { type: "json_schema", json_schema };
const parsed = await client.chat.completions.parse({ ...asked, response_format });
assert.ok(["Rome", "Oslo"].includes(parsed.choices[0].message.parsed.place));

const input = { model, input: "hi", max_output_tokens: 9, temperature: 0 };
const response = await client.responses.create(input);
const events = client.responses.stream(input);
assert.equal((await events.finalResponse()).output_text, response.output_text);
await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
