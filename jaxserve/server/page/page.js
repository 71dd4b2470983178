// The page: the shown conversation, the answers that are coming, and the settings.

import * as conversations from "./conversations.js";
import {watchEngine} from "./engine.js";
import {button, copy, edit, element, lengthView, messageView} from "./messages.js";

const $ = (id) => document.getElementById(id);
const answering = new Map(); // {controller, kept} of answers that are coming, by conversation id
const views = new Map(); // of the shown messages, by their index
let shown = null; // the conversation that is shown; null for a new one

function say(text) { $("status").textContent = text; }

function headers() {
  const key = $("key").value;
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
}

// ---- what is shown ----

function save(conversation) {
  try {
    conversations.save(conversation);
  } catch {
    say("the browser has no room for this conversation, which ends with this tab; delete others");
  }
}

function showList() {
  const text = $("search").value;
  $("conversations").replaceChildren(...conversations.search(text).map(({conversation, excerpt}) => {
    const item = element("li"), link = element("a", conversations.title(conversation));
    link.href = "#/c/" + conversation.id;
    if (conversation === shown) link.setAttribute("aria-current", "page");
    if (answering.has(conversation.id)) link.classList.add("busy");
    if (excerpt) link.append(element("small", excerpt));
    const name = conversations.title(conversation);
    item.append(link, button("✕", `Delete ${name}`, () => remove(conversation)));
    return item;
  }));
}

function showMessages() {
  views.clear();
  const system = shown?.system ? [messageView({role: "system", content: shown.system}, [])] : [];
  const indices = shown ? conversations.path(shown) : [];
  for (const index of indices) views.set(index, messageView(shown.messages[index], actions(index)));
  const welcome = element("p", "Conversations are kept in this browser.", "welcome");
  $("messages").replaceChildren(...system, ...views.values(), ...(indices.length ? [] : [welcome]));
  $("messages").scrollTop = $("messages").scrollHeight;
  showState();
}

// Shows what depends on whether an answer is coming.
function showState() {
  const isBusy = answering.has(shown?.id);
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  for (const each of document.querySelectorAll(".actions .change")) each.disabled = isBusy;
  const [call] = shown ? conversations.unanswered(shown) : [];
  $("said").placeholder = $("said").ariaLabel = call ? `Result of ${call.name}` : "Message";
  for (const [index, view] of views) {
    view.classList.toggle("busy", isBusy && shown.messages[index] === answering.get(shown.id).kept);
  }
  document.title = (shown ? conversations.title(shown) + " – " : "") + "jaxserve";
  showList();
}

// Returns the buttons of a message, and those that lead to the other versions of it.
function actions(index) {
  const conversation = shown, message = shown.messages[index];
  const found = [];
  const others = conversations.versions(conversation, index), at = others.indexOf(index);
  const change = (text, label, action) => {
    const made = button(text, label, action);
    made.classList.add("change");
    found.push(made);
  };
  if (others.length > 1) {
    const go = (place) => () => {
      conversations.choose(conversation, others.at(place));
      save(conversation);
      showMessages();
    };
    change("‹", "Version before", go(at - 1));
    found.push(element("span", `${at + 1}/${others.length}`));
    change("›", "Version after", go((at + 1) % others.length));
  }
  if (message.role !== "assistant") {
    change("Edit", "Edit message", () => edit(views.get(index), message.content, (content) => {
      followUp(conversation, message.parent, {...message, content});
    }));
  } else {
    change("Regenerate", "Regenerate answer", () => answer(conversation, message.parent));
    found.push(button("Copy", "Copy answer", (pressed) => {
      copy(message.content, views.get(index).querySelector(".text"), pressed);
    }));
  }
  return found;
}

function open(conversation) {
  shown = conversation;
  say("");
  showMessages();
}

// Shows the list of conversations on a narrow page, where it is hidden otherwise.
function openMenu(isOpen) {
  document.body.classList.toggle("menu", isOpen);
  $("menu").setAttribute("aria-expanded", String(isOpen));
}

// Shows what the address names: #/c/ID, or a new conversation.
function follow() {
  const id = /^#\/c\/(\w+)$/.exec(location.hash)?.[1];
  openMenu(false);
  if (id && id === shown?.id) return;
  const found = id && conversations.find(id);
  open(found || null);
  if (id && !found) say("this browser has no conversation at this address");
}

function remove(conversation) {
  if (!confirm(`Delete “${conversations.title(conversation)}”?`)) return;
  answering.get(conversation.id)?.controller.abort();
  conversations.remove(conversation.id);
  if (conversation === shown) location.hash = "#/";
  else showList();
}

// ---- answers ----

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

function tools() {
  const text = $("tools").value.trim();
  try {
    return text ? JSON.parse(text) : null;
  } catch (error) {
    throw new Error(`the tools in Settings are not JSON: ${error.message}`);
  }
}

function requestOf(conversation, parent) {
  const number = (id) => $(id).value === "" ? null : Number($(id).value);
  return {
    messages: conversations.prompt(conversation, parent), model: $("model").value || null,
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"),
    tools: tools(), stream: true, return_token_ids: true, // so that tokens are counted as they come
  };
}

// Answers the message `parent`, in a version of its own, and keeps what has come however it ends.
async function answer(conversation, parent) {
  const controller = new AbortController();
  const index = conversations.add(conversation, parent, {role: "assistant", content: ""});
  const kept = conversation.messages[index];
  answering.set(conversation.id, {controller, kept});
  save(conversation);
  say("");
  showMessages();
  $("announced").textContent = "";
  const length = lengthView();
  const begun = performance.now();
  let first = 0, numFirst = 0, painting = null;
  const paint = () => {
    painting = null;
    if (conversation !== shown || !views.has(index)) return;
    const box = $("messages");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    views.get(index).update();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  };
  try {
    for await (const told of events(requestOf(conversation, parent), controller.signal)) {
      if (told.expected) {
        length.update(told.expected);
        if (conversation === shown && !length.isConnected) views.get(index)?.append(length);
        continue;
      }
      const choice = told.choices[0];
      if (!choice) continue;
      kept.content += choice.delta.content ?? "";
      const thought = choice.delta.reasoning_content;
      if (thought) kept.reasoning = (kept.reasoning ?? "") + thought;
      for (const {index: place, id, function: {name, arguments: more}} of choice.delta.tool_calls ?? []) {
        kept.calls ??= [];
        kept.calls[place] ??= {id, name, arguments: ""};
        kept.calls[place].arguments += more;
      }
      if (choice.finish_reason) kept.finish = choice.finish_reason;
      const num = choice.token_ids?.length ?? 0, now = performance.now();
      if (num && !kept.figures) {
        [first, numFirst] = [now, num];
        kept.figures = {tokens: num, first_s: (now - begun) / 1000};
      } else if (num) {
        kept.figures.tokens += num;
        if (now > first) kept.figures.rate = 1000 * (kept.figures.tokens - numFirst) / (now - first);
      }
      painting ??= setTimeout(paint, 60);
    }
  } catch (error) {
    if (error.name === "AbortError") kept.stopped = true;
    else kept.error = error.message;
  } finally {
    clearTimeout(painting);
    answering.delete(conversation.id);
    length.remove();
    if (conversations.find(conversation.id)) save(conversation);
    paint();
    if (conversation === shown) {
      const text = views.get(index)?.querySelector(".text").textContent;
      const calls = (kept.calls ?? []).map(({name}) => `Calls ${name}`).join(", ");
      $("announced").textContent = kept.error ?? (kept.stopped ? "stopped" : text || calls);
    }
    showState();
  }
}

// Adds a message, and has it answered once all calls before it have results.
function followUp(conversation, parent, message) {
  const index = conversations.add(conversation, parent, message);
  if (conversations.unanswered(conversation).length === 0) {
    answer(conversation, index);
    return;
  }
  save(conversation);
  showMessages();
}

function send() {
  const content = $("said").value;
  if (answering.has(shown?.id)) {
    say("the answer is still being written; stop it, or wait for its end");
    return;
  }
  if (!content.trim()) return;
  const conversation = shown ?? conversations.begin($("system").value.trim());
  $("said").value = "";
  $("said").focus(); // the button for it is hidden while the answer comes
  shown = conversation;
  location.hash = "#/c/" + conversation.id;
  const [call] = conversations.unanswered(conversation);
  const message = call ? {role: "tool", content, call} : {role: "user", content};
  followUp(conversation, conversation.leaf, message);
}

// ---- files ----

function exportAll() {
  const link = element("a");
  link.download = "conversations.json";
  link.href = URL.createObjectURL(new Blob([conversations.exported()], {type: "application/json"}));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importAll(file) {
  try {
    say(`${conversations.take(await file.text())} conversations are new here`);
  } catch (error) {
    say(`${file.name}: ${error.message}`);
  }
  if (shown && conversations.find(shown.id) !== shown) shown = conversations.find(shown.id);
  showMessages();
}

// Adds text files to the message, each in a fence that is longer than any in it.
async function attach(files) {
  for (const file of files) {
    try {
      const decoder = new TextDecoder("utf-8", {fatal: true});
      const text = decoder.decode(await file.arrayBuffer()).trimEnd();
      const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
      const fence = "`".repeat(longest + 1), before = $("said").value;
      $("said").value = `${before && before + "\n"}${file.name}:\n${fence}\n${text}\n${fence}\n`;
    } catch {
      say(`${file.name} is not text in UTF-8, and messages here are text`);
    }
  }
  $("said").focus();
}

// Calls `take` with the files that are chosen in an input, which then may be chosen again.
function onFiles(input, take) {
  input.addEventListener("change", async () => {
    await take([...input.files]);
    input.value = "";
  });
}

// ---- settings ----

const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "tools"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function loadSettings() {
  const kept = JSON.parse(localStorage.getItem("jaxserve.settings") ?? "{}");
  for (const id of SETTINGS) {
    if (id in kept) $(id).value = kept[id];
    $(id).addEventListener("change", () => {
      const all = Object.fromEntries(SETTINGS.map((each) => [each, $(each).value]));
      localStorage.setItem("jaxserve.settings", JSON.stringify(all));
    });
  }
}

// Without a theme of its own the page follows the system.
function showTheme() {
  const theme = localStorage.getItem("jaxserve.theme");
  const isDark = theme ? theme === "dark" : systemIsDark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(isDark));
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  if ((theme === "dark") === systemIsDark.matches) localStorage.removeItem("jaxserve.theme");
  else localStorage.setItem("jaxserve.theme", theme);
  showTheme();
}

async function listModels() {
  const answer = await fetch("v1/models", {headers: headers()});
  const told = await answer.json();
  if (!answer.ok) {
    say(told.error.message);
    return;
  }
  say("");
  $("model").replaceChildren(...told.data.map(({id}) => element("option", id)));
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => answering.get(shown?.id)?.controller.abort());
function startNew() {
  location.hash = "#/";
  follow();
  $("said").focus();
}

$("new").addEventListener("click", startNew);
$("export").addEventListener("click", exportAll);
$("import").addEventListener("click", () => $("imported").click());
onFiles($("imported"), ([file]) => importAll(file));
$("attach").addEventListener("click", () => $("attached").click());
onFiles($("attached"), attach);
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  attach(event.dataTransfer.files);
});
$("said").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length === 0) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
document.addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || $("settings").open) return;
  const key = event.key.toLowerCase();
  if (key === "k") {
    openMenu(true);
    $("search").focus();
  } else if (key === "o" && event.shiftKey) startNew();
  else return;
  event.preventDefault();
});
$("search").addEventListener("input", showList);
$("menu").addEventListener("click", () => openMenu(!document.body.classList.contains("menu")));
$("watch").addEventListener("click", () => {
  $("engine").hidden = !$("engine").hidden;
  $("watch").setAttribute("aria-expanded", String(!$("engine").hidden));
});
$("configure").addEventListener("click", () => $("settings").showModal());
$("tools").addEventListener("input", () => {
  let problem = "";
  try {
    tools();
  } catch (error) {
    problem = error.message;
  }
  $("tools").setCustomValidity(problem);
});
$("theme").addEventListener("click", switchTheme);
systemIsDark.addEventListener("change", showTheme);
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  listModels();
});
addEventListener("hashchange", follow);
addEventListener("pagehide", () => {
  for (const [id, {kept}] of answering) {
    kept.stopped = true;
    if (conversations.find(id)) save(conversations.find(id));
  }
});
conversations.onChange((id) => {
  if (answering.has(id)) return;
  if (shown?.id === id) open(conversations.find(id) ?? null);
  else showList();
});

loadSettings();
showTheme();
follow();
listModels().catch(() => say("the server cannot be reached"));
watchEngine($("plots"), (id, text) => { $(id).textContent = text; });
