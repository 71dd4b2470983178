// The conversations of this browser, kept in its localStorage.
//
// The messages of a conversation are a tree: an edited message, or another answer, is a sibling of
// the one before it. `leaf` is the last message of the branch that is shown. A message has the index
// of the one before it as its `parent` (-1 for the first), `role`, `content`, and what `figures`,
// `error` and `stopped` say of an answer. An answer may have `calls` of tools (`id`, `name` and
// `arguments`), and a message of the role "tool" is the result of its `call`.

const PREFIX = "jaxserve.conversation.";
const conversations = new Map(); // by id

function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    if (Array.isArray(found?.messages)) conversations.set(key.slice(PREFIX.length), found);
  } catch (error) {
    console.warn(`${key} is not a conversation`, error);
  }
}

for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) read(key);

export function find(id) { return conversations.get(id); }

export function begin(system) {
  const id = [...crypto.getRandomValues(new Uint32Array(2))].map((part) => part.toString(36)).join("");
  const begun = {id, system, messages: [], leaf: -1, used: Date.now()};
  conversations.set(id, begun);
  return begun;
}

// Throws QuotaExceededError if the browser has no room for it.
export function save(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  conversations.delete(id);
  localStorage.removeItem(PREFIX + id);
}

// Returns all conversations as the text of a file.
export function exported() { return JSON.stringify([...conversations.values()], null, 1); }

// Keeps the conversations of such a file, unless they are here and were used later; returns how many.
// Throws an error whose message says what is wrong with the file.
export function take(text) {
  const given = JSON.parse(text);
  if (!Array.isArray(given) || !given.every(isConversation)) {
    throw new Error("this is not a file that Export made");
  }
  const newer = given.filter(({id, used}) => !(conversations.get(id)?.used >= used));
  for (const each of newer) {
    save(each);
    conversations.set(each.id, each);
  }
  return newer.length;
}

function isConversation(given) {
  const messages = given?.messages;
  return /^\w+$/.test(given?.id) && isText(given.system) && Number.isFinite(given.used)
    && Array.isArray(messages) && messages.every(isMessage) && messages[given.leaf] !== undefined;
}

// The parent is an earlier message, so that every path ends.
function isMessage(given, index) {
  const isCall = (call) => isText(call?.id) && isText(call.name) && isText(call.arguments);
  const isMissingOr = (value, holds) => value === undefined || holds(value);
  const {tokens, first_s, rate = 0} = given?.figures ?? {tokens: 0, first_s: 0};
  return ["user", "assistant", "tool"].includes(given?.role) && isText(given.content)
    && Number.isInteger(given.parent) && given.parent >= -1 && given.parent < index
    && [given.reasoning, given.finish, given.error].every((each) => isMissingOr(each, isText))
    && isMissingOr(given.calls, (calls) => Array.isArray(calls) && calls.every(isCall))
    && isMissingOr(given.call, isCall) && [tokens, first_s, rate].every(Number.isFinite);
}

function isText(value) { return typeof value === "string"; }

// Calls back with the id of a conversation that another tab has written or removed.
export function onChange(callback) {
  addEventListener("storage", ({key}) => {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    conversations.delete(id);
    read(key);
    callback(id);
  });
}

// Adds a message after the one with index `parent`, shows its branch, and returns its index.
export function add(conversation, parent, message) {
  conversation.used = Date.now();
  conversation.leaf = conversation.messages.push({parent, ...message}) - 1;
  return conversation.leaf;
}

// Returns the indices of the shown messages, the first one first.
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let i = leaf; i >= 0; i = conversation.messages[i].parent) found.unshift(i);
  return found;
}

function following(conversation, parent) {
  return [...conversation.messages.keys()].filter((i) => conversation.messages[i].parent === parent);
}

// Returns the indices of a message and of the others in its place.
export function versions(conversation, index) {
  return following(conversation, conversation.messages[index].parent);
}

// Shows the newest branch through a message.
export function choose(conversation, index) {
  for (let next = index; next !== undefined; next = following(conversation, next).at(-1)) {
    conversation.leaf = next;
  }
}

// Returns the calls of a message, if they are whole.
function calls(message) {
  return message?.finish === "tool_calls" ? message.calls : undefined;
}

// Returns the calls of the last shown answer that have no result yet.
export function unanswered(conversation) {
  const all = path(conversation).map((i) => conversation.messages[i]);
  const last = all.findLastIndex(({role}) => role === "assistant");
  const results = new Set(all.slice(last + 1).map(({call}) => call?.id));
  return (calls(all[last]) ?? []).filter(({id}) => !results.has(id));
}

// Returns what the model reads for the answer after a message. A message whose answer has not begun
// is left out, because chat templates want the roles in turns.
export function prompt(conversation, leaf) {
  const all = path(conversation, leaf).map((i) => conversation.messages[i]);
  const isSaid = (each) => each.content || calls(each);
  const answered = all.filter((each, i) => (
    isSaid(each) && (each.role === "tool" || i === all.length - 1 || isSaid(all[i + 1]))
  ));
  const system = conversation.system ? [{role: "system", content: conversation.system}] : [];
  const sentCall = ({id, name, arguments: given}) => (
    {id, type: "function", function: {name, arguments: given}}
  );
  const sent = (message) => ({
    role: message.role,
    content: message.content,
    ...(message.reasoning && {reasoning_content: message.reasoning}),
    ...(calls(message) && {tool_calls: calls(message).map(sentCall)}),
    ...(message.call && {tool_call_id: message.call.id}),
  });
  return [...system, ...answered.map(sent)];
}

export function title(conversation) {
  const first = conversation.messages[path(conversation)[0] ?? 0]?.content ?? "";
  return first.replace(/\s+/g, " ").trim().slice(0, 100) || "New conversation";
}

// Returns the conversations with a text, the last used first, each with the words around the text.
export function search(text) {
  const wanted = text.trim().toLowerCase();
  const found = [];
  for (const conversation of conversations.values()) {
    const contents = conversation.messages.map((each) => each.content.replace(/\s+/g, " "));
    const hit = contents.find((each) => each.toLowerCase().includes(wanted));
    if (hit === undefined) continue;
    const at = hit.toLowerCase().indexOf(wanted);
    found.push({conversation, excerpt: wanted && hit.slice(Math.max(0, at - 20), at + 60)});
  }
  return found.sort((one, other) => other.conversation.used - one.conversation.used);
}
