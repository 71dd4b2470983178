// What the engine does, from /metrics once a second: plots of the last minutes, and means.

import {element} from "./messages.js";

const MIN_SHOWN_S = 60, MAX_SHOWN_S = 300, MEAN_S = 60;
const WIDTH = 300, HEIGHT = 64;

const PAGES = ["owned", "reserved", "cached", "free"];
const PLOTS = [
  {title: "Requests", lines: {running: (at) => at.running, waiting: (at) => at.waiting}},
  {title: "Computed tokens per second", lines: {"tokens/s": (at) => at.rate}},
  {title: "Tokens per step", lines: {"tokens/step": (at) => at.batch}},
  {title: "KV pages on the device", stacked: true, lines: {
    owned: (at) => at.device.owned,
    reserved: (at) => at.device.reserved,
    cached: (at) => at.device.cached,
  }, total: (at) => PAGES.reduce((sum, state) => sum + at.device[state], 0)},
  {title: "KV pages on host and disk", lines: {host: (at) => at.host, disk: (at) => at.disk}},
];

// Seconds before now that plots show: they grow with what there is.
function shownS(samples) {
  return Math.min(MAX_SHOWN_S, Math.max(MIN_SHOWN_S, samples.at(-1).time - samples[0].time));
}

// Returns the metrics of a moment, with the rates since the one before.
async function sample(before) {
  const answer = await fetch("metrics");
  if (!answer.ok) throw new Error(answer.statusText);
  const text = await answer.text();
  const value = (name, labels = "") => {
    const found = new RegExp(`^\\w+:${name}\\{.*${labels}\\} (\\S+)$`, "m").exec(text);
    return found ? Number(found[1]) : NaN;
  };
  const pages = (tier, state) => value("kv_pages", `state="${state}",tier="${tier}"`);
  const parts = (name) => [value(`${name}_sum`), value(`${name}_count`)];
  const at = {
    time: performance.now() / 1000,
    running: value("num_requests_running"),
    waiting: value("num_requests_waiting"),
    device: Object.fromEntries(PAGES.map((state) => [state, pages("device", state)])),
    host: pages("host", "used"),
    disk: pages("disk", "used"),
    tokens: value("computed_tokens_total"),
    steps: value("engine_steps_total"),
    preemptions: value("num_preemptions_total"),
    first: parts("time_to_first_token_seconds"),
    between: parts("inter_token_latency_seconds"),
    hits: [value("prefix_cache_hits_total"), value("prefix_cache_queries_total")],
    rate: NaN,
    batch: NaN,
  };
  if (before) {
    at.rate = (at.tokens - before.tokens) / (at.time - before.time);
    at.batch = at.steps > before.steps ? (at.tokens - before.tokens) / (at.steps - before.steps) : 0;
  }
  return at;
}

function shown(number) {
  if (!Number.isFinite(number)) return "–";
  return number.toFixed(number && number < 10 && !Number.isInteger(number) ? 1 : 0);
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, each] of Object.entries(attributes)) made.setAttribute(key, each);
  return made;
}

function plotView({title, lines, stacked, total}) {
  const names = Object.keys(lines);
  const view = element("figure");
  const head = element("figcaption", title);
  const most = element("span", "", "most");
  head.append(most);
  const drawing = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img"});
  const shapes = names.map((_, i) => svg("path", {class: `${stacked ? "area" : "line"} series${i}`}));
  drawing.append(...shapes);
  const legend = element("ul");
  const values = names.map((name, i) => {
    const item = element("li", undefined, `series${i}`);
    const number = element("b", "–");
    item.append(number, ` ${name}`);
    legend.append(item);
    return number;
  });
  view.append(head, drawing, legend);

  view.update = (samples) => {
    const now = samples.at(-1);
    const rows = samples.map((at) => names.map((name) => lines[name](at)));
    names.forEach((_, i) => { values[i].textContent = shown(rows.at(-1)[i]); });
    const words = names.map((name, i) => `${values[i].textContent} ${name}`).join(", ");
    drawing.setAttribute("aria-label", `${title}: ${words}`);
    const tops = stacked ? rows.map(sums) : rows;
    const largest = Math.max(1, ...tops.flat().filter(Number.isFinite));
    most.textContent = `up to ${shown(largest)}` + (total ? ` of ${shown(total(now))}` : "");
    const widthS = shownS(samples);
    const x = (at) => (WIDTH * (1 - (now.time - at.time) / widthS)).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (HEIGHT - 2) * value / largest).toFixed(1);
    shapes.forEach((shape, i) => {
      const known = samples.map((at, k) => [x(at), tops[k][i], tops[k][i - 1] ?? 0])
        .filter(([, top]) => Number.isFinite(top));
      const upper = known.map(([left, top]) => `${left} ${y(top)}`);
      const lower = stacked ? known.map(([left, , below]) => `${left} ${y(below)}`).reverse() : [];
      const points = [...upper, ...lower];
      shape.setAttribute("d", points.length ? `M${points.join("L")}${stacked ? "Z" : ""}` : "");
    });
  };
  return view;
}

function sums(row) {
  let sum = 0;
  return row.map((each) => sum += each);
}

// Asks for the metrics while the page is visible, and shows them in `plots` and by `put(id, text)`.
export function watchEngine(plots, put) {
  const views = PLOTS.map(plotView);
  plots.append(...views);
  let samples = [];

  const show = () => {
    const now = samples.at(-1);
    views.forEach((view) => view.update(samples));
    const start = samples.find((at) => now.time - at.time <= MEAN_S);
    const ratio = (name) => (now[name][0] - start[name][0]) / (now[name][1] - start[name][1]);
    const told = (number, digits, unit) => Number.isFinite(number) ? number.toFixed(digits) + unit : "–";
    put("span", `last ${shownS(samples).toFixed(0)} s`);
    put("first", told(1000 * ratio("first"), 0, " ms"));
    put("between", told(1000 * ratio("between"), 1, " ms"));
    put("hits", told(100 * ratio("hits"), 0, " %"));
    put("preemptions", shown(now.preemptions));
  };

  const watch = async () => {
    try {
      if (!document.hidden) {
        const now = await sample(samples.at(-1));
        if (now.tokens < samples.at(-1)?.tokens) samples = []; // the server was started again
        samples = [...samples.filter((at) => now.time - at.time <= MAX_SHOWN_S), now];
        show();
      }
    } catch {
      put("first", "–"); // the server cannot be reached, which the next message would say
    }
    setTimeout(watch, 1000); // after the answer, so that no two are asked for at once
  };
  watch();
}
