"use strict";
// Texts of models are put into the page as text nodes only, never as HTML.

const $ = (id) => document.getElementById(id);
let conversation = null; // its id
let messages = []; // of the conversation, as the server keeps them
let controller = null; // of the answer that is coming

function headers() {
  const key = $("key").value;
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
}

async function call(method, path, body) {
  const answer = await fetch(path, {method, headers: headers(), body: body && JSON.stringify(body)});
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error.message);
  return told;
}

function say(text) { $("status").textContent = text; }

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Returns a link, or null if its address is not one of another page or a mail. It opens in a tab of
// its own, which learns nothing about this page.
function link(text, address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return null;
  const made = element("a", text);
  [made.href, made.title] = [url.href, url.href];
  [made.target, made.rel] = ["_blank", "noopener noreferrer"];
  return made;
}

const INLINE = new RegExp("(" + [
  /`[^`]+`/, /\*\*[^*]+\*\*/, /\*[^*\s][^*]*\*/, // code, bold, emphasis
  /\[[^\[\]]{1,300}\]\((?:[^()\s]|\([^()\s]{0,300}\)){1,2000}\)/, // [text](address)
].map((each) => each.source).join("|") + ")");

// Adds a line with `code`, **bold**, *emphasis* and [links](address).
function addInline(parent, line) {
  for (const part of line.split(INLINE)) {
    const [, text, address] = /^\[(.+)\]\((.+)\)$/s.exec(part) ?? [];
    if (/^`.+`$/s.test(part)) parent.append(element("code", part.slice(1, -1)));
    else if (/^\*\*.+\*\*$/s.test(part)) parent.append(element("strong", part.slice(2, -2)));
    else if (/^\*.+\*$/s.test(part)) parent.append(element("em", part.slice(1, -1)));
    else parent.append((address && link(text, address)) ?? part);
  }
}

// The cells of a line of a table; a cell may have \| for a bar of its own.
function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// Whether a table begins with this line: below its header is a line of dashes for each column.
function isTable(line, below = "") {
  if (!line.includes("|") || !below.includes("|")) return false;
  const columns = cells(below);
  return columns.length === cells(line).length && columns.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines) {
  const made = element("table");
  const numColumns = cells(lines[0]).length;
  for (const [i, line] of lines.entries()) {
    if (i === 1) continue; // the dashes
    const row = made.insertRow();
    for (const text of cells(line).slice(0, numColumns)) {
      const cell = element(i ? "td" : "th");
      addInline(cell, text);
      row.append(cell);
    }
  }
  return made;
}

// The part of Markdown that chats use: fenced code, headings, lists, quotes, tables, paragraphs.
const MAX_DEPTH = 8; // of quotes in quotes
function rendered(text, depth = 0) {
  const found = document.createDocumentFragment();
  const lines = text.split("\n");
  let list = null, paragraph = null, code = null;
  // Returns the lines that follow each other from the i-th on for which this is so.
  const take = (i, isSo) => {
    let end = i;
    while (end < lines.length && isSo(lines[end])) end++;
    return lines.slice(i, end);
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (/^\s*```/.test(line)) {
      if (code) code = null;
      else {
        code = element("code", "");
        const pre = element("pre");
        pre.append(code);
        found.append(pre);
      }
      list = paragraph = null;
      continue;
    }
    if (code) { code.append(line + "\n"); continue; }
    const heading = /^(#{1,4})\s+(.*)/.exec(line);
    const item = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)/.exec(line);
    if (heading) {
      const made = element("h" + (heading[1].length + 2));
      addInline(made, heading[2]);
      found.append(made);
      list = paragraph = null;
    } else if (item) {
      const name = item[1] ? "OL" : "UL";
      if (!list || list.tagName !== name) {
        list = element(name.toLowerCase());
        if (item[1]) list.start = Number(item[1]);
        found.append(list);
      }
      const made = element("li");
      addInline(made, item[2]);
      list.append(made);
      paragraph = null;
    } else if (depth < MAX_DEPTH && /^ {0,3}>/.test(line)) {
      const quoted = take(i, (each) => /^ {0,3}>/.test(each));
      const made = element("blockquote");
      made.append(rendered(quoted.map((each) => each.replace(/^ *> ?/, "")).join("\n"), depth + 1));
      found.append(made);
      i += quoted.length - 1;
      list = paragraph = null;
    } else if (isTable(line, lines[i + 1])) {
      const rows = take(i, (each) => each.includes("|"));
      found.append(table(rows));
      i += rows.length - 1;
      list = paragraph = null;
    } else if (!line.trim()) {
      list = paragraph = null;
    } else {
      if (paragraph) paragraph.append("\n");
      else { paragraph = element("p"); found.append(paragraph); }
      addInline(paragraph, line);
      list = null;
    }
  }
  return found;
}

function addMessage(message) {
  const made = element("article", undefined, message.role);
  made.setAttribute("aria-label", message.role);
  made.append(rendered(message.content));
  $("messages").append(made);
  made.scrollIntoView({block: "end"});
  return made;
}

function show() {
  $("messages").replaceChildren();
  messages.forEach(addMessage);
  const isBusy = controller !== null;
  $("send").disabled = isBusy;
  $("stop").disabled = !isBusy;
  for (const id of ["again", "fork", "delete"]) $(id).disabled = isBusy || !messages.length;
  for (const button of document.querySelectorAll("#new, #conversations button")) {
    button.disabled = isBusy; // another conversation would be shown while this one is answered
  }
}

async function list() {
  const found = await call("GET", "conversations");
  $("conversations").replaceChildren(...found.data.map((each) => {
    const button = element("button", `${each.id} (${each.num_turns})`);
    button.type = "button";
    button.disabled = controller !== null;
    button.setAttribute("aria-current", String(each.id === conversation));
    button.addEventListener("click", () => attempt(() => open(each.id)));
    const item = element("li");
    item.append(button);
    return item;
  }));
}

async function open(id) {
  conversation = id;
  messages = id ? (await call("GET", "conversations/" + encodeURIComponent(id))).messages : [];
  show();
  await list();
}

function attempt(action) {
  say("");
  return action().catch((error) => say(error.name === "AbortError" ? "stopped" : error.message));
}

async function* events(body, signal) {
  const answer = await fetch(
    "v1/chat/completions",
    {method: "POST", headers: headers(), body: JSON.stringify(body), signal},
  );
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the connection was closed before the answer was complete");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith(": {")) yield {expected: JSON.parse(line.slice(2))};
      if (!line.startsWith("data: ")) continue;
      const told = JSON.parse(line.slice(6));
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}

// Shows how long an answer is expected to be: its likely lengths, and the tokens that have come.
function addLength(shown) {
  const made = element("p", undefined, "length");
  const bar = element("span", undefined, "lengths");
  const parts = ["likely", "likelier", "now"].map((name) => element("span", undefined, name));
  const text = element("span");
  bar.setAttribute("aria-hidden", "true");
  bar.append(...parts);
  made.append(bar, text);
  let longest = 1; // the scale, which does not change while the range shrinks
  return ({predicted_tokens, percentiles, num_tokens, ends_in_s}) => {
    const [p10, p25, , p75, p90] = percentiles;
    longest = Math.max(longest, p90);
    [[p10, p90], [p25, p75], [num_tokens, num_tokens]].forEach(([low, high], i) => {
      parts[i].style.left = `${100 * Math.min(1, low / longest)}%`;
      parts[i].style.width = `${100 * Math.min(1, (high - low) / longest)}%`;
    });
    const rest = ends_in_s === undefined ? "" : `, ${ends_in_s.toFixed(1)} s left`;
    text.textContent = `${num_tokens} of about ${predicted_tokens} tokens (${p10} to ${p90})${rest}`;
    if (!made.isConnected) shown.after(made);
  };
}

// Sends the messages of a turn, and shows the answer as it comes.
async function ask(said) {
  conversation ??= crypto.getRandomValues(new Uint32Array(2)).join("-");
  controller = new AbortController();
  $("announced").textContent = "";
  const before = messages;
  messages = [...messages, ...said];
  show();
  const shown = addMessage({role: "assistant", content: ""});
  const begun = performance.now(), showLength = addLength(shown);
  let answer = "", numEvents = 0;
  try {
    const body = {
      messages: said, conversation_id: conversation, stream: true,
      temperature: Number($("temperature").value), top_p: Number($("top_p").value),
      max_tokens: Number($("max_tokens").value), stream_options: {include_usage: true},
    };
    for await (const told of events(body, controller.signal)) {
      if (told.expected) { showLength(told.expected); continue; }
      answer += told.choices[0]?.delta.content ?? "";
      if (numEvents++ % 4 === 0) shown.replaceChildren(rendered(answer));
      shown.scrollIntoView({block: "end"});
      const seconds = (performance.now() - begun) / 1000;
      if (told.usage) {
        const {completion_tokens, prompt_tokens} = told.usage;
        say(`${completion_tokens} tokens in ${seconds.toFixed(1)} s after ${prompt_tokens}`);
      }
    }
    messages = [...messages, {role: "assistant", content: answer}];
    shown.replaceChildren(rendered(answer));
    $("announced").textContent = shown.textContent;
  } catch (error) {
    messages = before; // the server keeps no part of a turn that failed
    throw error;
  } finally {
    controller = null;
    show();
    await list();
  }
}

async function send() {
  const said = [{role: "user", content: $("said").value}];
  const system = $("system").value.trim();
  if (!messages.length && system) said.unshift({role: "system", content: system});
  await ask(said);
  $("said").value = "";
}

// Answers the last turn again, in a fork that keeps the turns before it. A turn may have several
// messages: the first one has those that began the conversation, a system prompt or examples.
async function regenerate() {
  const asked = messages.slice(0, -1);
  const {data} = await call("GET", "conversations");
  const numKept = data.find((each) => each.id === conversation).num_turns - 1;
  if (numKept > 0) {
    const path = `conversations/${encodeURIComponent(conversation)}/fork`;
    const forked = await call("POST", path, {num_turns: numKept});
    [conversation, messages] = [forked.id, forked.messages];
  } else {
    [conversation, messages] = [null, []];
  }
  await ask(asked.slice(messages.length));
}

async function fork() {
  const path = `conversations/${encodeURIComponent(conversation)}/fork`;
  await open((await call("POST", path, {})).id);
}

async function remove() {
  await call("DELETE", "conversations/" + encodeURIComponent(conversation));
  await open(null);
}

const MEAN_S = 60;
let scrapes = []; // of the last minute: seconds, and the sums and counts from which rates follow
async function scrape() {
  const answer = await fetch("metrics");
  if (!answer.ok) throw new Error(answer.statusText);
  const text = await answer.text();
  const value = (name, labels = "") => {
    const found = new RegExp(`^\\w+:${name}\\{.*${labels}\\} (\\S+)$`, "m").exec(text);
    return found ? Number(found[1]) : NaN;
  };
  const put = (id, number, digits = 0, unit = "") => {
    $(id).textContent = Number.isFinite(number) ? number.toFixed(digits) + unit : "–";
  };
  put("running", value("num_requests_running"));
  put("waiting", value("num_requests_waiting"));
  put("kv", 100 * value("kv_cache_usage_perc"), 1, " %");
  const pages = (tier, states) => {
    const counts = states.map((state) => value("kv_pages", `state="${state}",tier="${tier}"`));
    const told = states.map((state, i) => `${counts[i]} ${state}`).join(", ");
    $(tier).textContent = counts.every(Number.isFinite) ? told : "–";
  };
  pages("device", ["owned", "reserved", "cached", "free"]);
  pages("host", ["used", "free"]);
  pages("disk", ["used"]);
  const now = {
    time: performance.now() / 1000,
    tokens: value("computed_tokens_total"),
    first: ["sum", "count"].map((what) => value(`time_to_first_token_seconds_${what}`)),
    between: ["sum", "count"].map((what) => value(`inter_token_latency_seconds_${what}`)),
  };
  const last = scrapes.at(-1);
  if (last && now.tokens < last.tokens) scrapes = []; // the server was started again
  scrapes = [...scrapes.filter((each) => now.time - each.time <= MEAN_S), now];
  if (scrapes.length < 2) return;
  put("rate", (now.tokens - scrapes.at(-2).tokens) / (now.time - scrapes.at(-2).time));
  // A mean of nothing is NaN, which is shown as a dash.
  const mean = (name) => {
    const [sum, count] = now[name].map((each, i) => each - scrapes[0][name][i]);
    return 1000 * sum / count;
  };
  put("first", mean("first"), 0, " ms");
  put("between", mean("between"), 1, " ms");
}

async function watch() {
  await scrape().catch(() => { $("running").textContent = "–"; });
  setTimeout(watch, 1000); // after the answer, so that no two are asked for at once
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (controller === null) attempt(send);
});
$("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => controller?.abort());
$("new").addEventListener("click", () => attempt(() => open(null)));
$("again").addEventListener("click", () => attempt(regenerate));
$("fork").addEventListener("click", () => attempt(fork));
$("delete").addEventListener("click", () => attempt(remove));
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  attempt(start);
});

async function start() {
  $("model").textContent = (await call("GET", "v1/models")).data[0].id;
  await list();
}

attempt(start);
watch();
