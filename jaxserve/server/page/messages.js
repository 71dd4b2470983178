// Messages as elements of the page. Only here does the text of a model become HTML: markdown-it
// escapes all HTML in it, and DOMPurify lets through only the elements and attributes below.

/* global markdownit, DOMPurify, hljs */

const markdown = markdownit({linkify: true, breaks: true, highlight: highlighted}).disable("image");
markdown.linkify.set({fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false});
markdown.validateLink = (address) => /^(https?:\/\/|mailto:)/i.test(address);
for (const cell of ["th_open", "td_open"]) {
  markdown.renderer.rules[cell] = (tokens, i, options, _, renderer) => {
    const align = /right|center/.exec(tokens[i].attrGet("style")); // the policy allows no styles
    tokens[i].attrs = align && [["class", align[0]]];
    return renderer.renderToken(tokens, i, options);
  };
}

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["href", "class", "start"],
  ADD_URI_SAFE_ATTR: ["start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function highlighted(code, language) {
  if (!hljs.getLanguage(language)) return "";
  return hljs.highlight(code, {language, ignoreIllegals: true}).value;
}

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function button(text, label, action) {
  const made = element("button", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", () => action(made));
  return made;
}

// Without a secure context (https or this machine) there is no clipboard: the text is selected.
export function copy(text, source, pressed) {
  if (!navigator.clipboard) {
    getSelection().selectAllChildren(source);
    return;
  }
  navigator.clipboard.writeText(text).then(() => {
    const before = pressed.textContent;
    pressed.textContent = "Copied";
    setTimeout(() => { pressed.textContent = before; }, 1500);
  });
}

// Links open in a tab of their own, which learns nothing about this page.
function formatted(text) {
  const found = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const link of found.querySelectorAll("a")) {
    link.title = link.href;
    [link.target, link.rel] = ["_blank", "noopener noreferrer"];
  }
  for (const pre of found.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const block = element("div", undefined, "code");
    const head = element("p", /language-(\S+)/.exec(code.className)?.[1] ?? "");
    head.append(button("Copy", "Copy code", (pressed) => copy(code.textContent, code, pressed)));
    pre.replaceWith(block);
    block.append(head, pre);
  }
  return found;
}

// Replaces the children that differ, so that a selection in the others stays while text arrives.
function replaceChanged(parent, fragment) {
  const made = [...fragment.childNodes];
  made.forEach((node, i) => {
    const old = parent.childNodes[i];
    if (!old) parent.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (parent.childNodes.length > made.length) parent.lastChild.remove();
}

function told({figures, stopped, error, finish}) {
  const parts = [];
  if (figures?.tokens) {
    parts.push(`${figures.tokens} tokens`);
    if (figures.rate) parts.push(`${figures.rate.toFixed(1)} tokens/s`);
    parts.push(`first after ${figures.first_s.toFixed(2)} s`);
  }
  if (finish === "length") parts.push("cut off at its limit");
  if (stopped) parts.push("stopped");
  if (error) parts.push(error);
  return parts.join(" · ");
}

// Returns the calls of tools in an answer, each folded like thinking; `update` shows more of them.
function callsView() {
  const made = element("div", undefined, "calls");
  made.update = (calls = []) => calls.forEach(({name, arguments: given}, i) => {
    if (!made.children[i]) {
      const call = element("details", undefined, "thinking");
      call.append(element("summary", `Calls ${name}`), element("div"));
      made.append(call);
    }
    const shown = document.createDocumentFragment();
    try {
      const whole = JSON.stringify(JSON.parse(given || "{}"), null, 2);
      shown.append(formatted("```json\n" + whole + "\n```"));
    } catch { // not whole yet
      shown.append(element("pre", given));
    }
    replaceChanged(made.children[i].lastChild, shown);
  });
  return made;
}

// Returns the element of a message, with buttons below it; the `update` of an answer shows what it
// is by then.
export function messageView(message, actions) {
  const view = element("article", undefined, message.role);
  view.setAttribute("aria-label", message.role);
  const text = element("div", undefined, "text");
  if (message.role !== "assistant") {
    if (message.call) view.append(element("p", `Result of ${message.call.name}`));
    text.textContent = message.content;
    view.append(text);
  } else {
    const thoughts = element("details", undefined, "thinking");
    const summary = element("summary"), thinking = element("div");
    const calls = callsView(), figures = element("p", undefined, "figures");
    thoughts.append(summary, thinking);
    view.append(thoughts, text, calls, figures);
    view.update = () => {
      thoughts.hidden = !message.reasoning;
      summary.textContent = message.content || message.calls ? "Thoughts" : "Thinking …";
      replaceChanged(thinking, formatted(message.reasoning ?? ""));
      replaceChanged(text, formatted(message.content));
      calls.update(message.calls);
      figures.textContent = told(message);
      figures.classList.toggle("error", Boolean(message.error));
    };
    view.update();
  }
  const row = element("div", undefined, "actions");
  row.append(...actions);
  view.append(row);
  return view;
}

// Replaces the text of a message by a box in which it can be changed.
export function edit(view, content, onSend) {
  const form = element("form"), box = element("textarea", undefined, "editor");
  const send = element("button", "Send");
  const before = [...view.childNodes];
  send.type = "submit";
  box.value = content;
  box.setAttribute("aria-label", "Edited message");
  const cancel = button("Cancel", "Cancel", () => view.replaceChildren(...before));
  form.append(box, send, cancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) onSend(box.value);
  });
  view.replaceChildren(form);
  box.focus();
}

// Shows how long an answer is expected to be: its likely lengths, and the tokens that have come.
export function lengthView() {
  const made = element("p", undefined, "length");
  const bar = element("span", undefined, "lengths");
  const parts = ["likely", "likelier", "now"].map((name) => element("span", undefined, name));
  const text = element("span");
  bar.setAttribute("aria-hidden", "true");
  bar.append(...parts);
  made.append(bar, text);
  let longest = 1; // the scale, which does not change while the range shrinks
  made.update = ({predicted_tokens, percentiles, num_tokens, ends_in_s}) => {
    const [p10, p25, , p75, p90] = percentiles;
    longest = Math.max(longest, p90);
    [[p10, p90], [p25, p75], [num_tokens, num_tokens]].forEach(([low, high], i) => {
      parts[i].style.left = `${100 * Math.min(1, low / longest)}%`;
      parts[i].style.width = `${100 * Math.min(1, (high - low) / longest)}%`;
    });
    const rest = ends_in_s === undefined ? "" : `, ${ends_in_s.toFixed(1)} s left`;
    text.textContent = `${num_tokens} of about ${predicted_tokens} tokens (${p10} to ${p90})${rest}`;
  };
  return made;
}
