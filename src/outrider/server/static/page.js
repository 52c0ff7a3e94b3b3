"use strict";
// The chat page: streams answers, tints what drafters contributed, and shows what the engine does.

const $ = (id) => document.getElementById(id);
const messages = []; // what is sent: {role, content}
const drafters = []; // names in order of appearance; the index is the colour
let running = null; // AbortController of the answer on its way

// --- requests ---------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  const own = { "content-type": "application/json" };
  return key ? { ...own, authorization: `Bearer ${key}` } : own;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function body() {
  const budget = Number($("budget").value);
  return {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    return_spans: true,
    temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor(Number($("max-tokens").value)) || 512),
    speculative: $("speculative").checked,
    ...(budget >= 1 ? { context_budget: Math.floor(budget) } : {}),
  };
}

// Events of a server-sent stream, as parsed JSON; an error event is thrown.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      const data = JSON.parse(block.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

// --- the conversation -------------------------------------------------------

function addMessage(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  follow(true);
  return item;
}

function follow(always) {
  const list = $("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (always || near) list.scrollTop = list.scrollHeight;
}

function colour(name) {
  if (!drafters.includes(name)) drafters.push(name);
  return `d${drafters.indexOf(name) % 6}`;
}

// One answer: spans are appended to the page, their text is kept for the next request.
class Answer {
  constructor() {
    this.item = addMessage("assistant", "");
    this.text = "";
    this.content = "";
    this.tokens = 0;
    this.start = performance.now();
    this.first = null;
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.first ??= performance.now();
    this.content += choice.delta.content ?? "";
    for (const span of choice.spans ?? []) this.addSpan(span);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    follow(false);
  }

  addSpan(span) {
    const node = document.createElement("span");
    node.textContent = span.text;
    if (span.drafter) {
      node.className = colour(span.drafter);
      node.title = `drafted by ${span.drafter}`;
    }
    this.text += span.text;
    const thinks = this.text.trimStart().startsWith("<think>") && !this.text.includes("</think>");
    if (thinks) node.classList.add("think");
    this.item.append(node);
  }

  finish(note) {
    const seconds = (performance.now() - (this.first ?? this.start)) / 1000;
    const details = this.usage?.completion_tokens_details;
    const tokens = this.usage?.completion_tokens;
    const parts = [];
    if (tokens > 1) parts.push(`${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (details?.accepted_prediction_tokens) parts.push(`${details.accepted_prediction_tokens} of them drafted`);
    if (this.reason === "length") parts.push("cut at max tokens");
    if (note) parts.push(note);
    const line = document.createElement("span");
    line.className = "note";
    line.textContent = parts.join(" · ");
    this.item.append(line);
    if (tokens > 1) $("speed").textContent = ((tokens - 1) / seconds).toFixed(1);
    if (this.first) $("first").textContent = `${Math.round(this.first - this.start)} ms`;
    follow(false);
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  const answer = new Answer();
  let note = "";
  setRunning(new AbortController());
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const chunk of events(response)) answer.add(chunk);
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else addMessage("error", error.message);
  }
  setRunning(null);
  answer.finish(note);
  if (answer.content) messages.push({ role: "assistant", content: answer.content });
  else messages.pop();
  refresh();
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (!controller) $("text").focus({ preventScroll: true });
}

function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
}

// --- the panel --------------------------------------------------------------

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function drafterRow(drafter) {
  const row = element("tr");
  const name = element("td");
  const swatch = element("span", undefined, "swatch");
  swatch.style.background = `var(--tint-${colour(drafter.name).slice(1)})`;
  name.append(swatch, drafter.off ? `${drafter.name} (off)` : drafter.name);
  if (drafter.off) name.title = drafter.off;
  const share = drafter.draft_tokens ? `${Math.round((100 * drafter.accepted_tokens) / drafter.draft_tokens)} %` : "–";
  row.append(name, element("td", share));
  row.append(element("td", drafter.acceptance_length.toFixed(2)), element("td", drafter.weight.toFixed(2)));
  return row;
}

function lengthBars(lengths) {
  const entries = Object.entries(lengths).map(([length, count]) => [Number(length), count]);
  entries.sort((a, b) => a[0] - b[0]);
  const most = Math.max(1, ...entries.map(([, count]) => count));
  return entries.map(([length, count]) => {
    const bar = element("div");
    const fill = element("i");
    fill.style.height = `${(75 * count) / most}%`;
    bar.title = `${count} drafts of ${length}`;
    bar.append(fill, element("span", length));
    return bar;
  });
}

function meter(name, share, text) {
  const box = element("div", undefined, "meter");
  const line = element("span");
  line.append(element("b", name), element("span", text));
  const track = element("div");
  const fill = element("i");
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  track.append(fill);
  box.append(line, track);
  return box;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < 4; unit += 1) count /= 1024;
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function memoryRows(engine) {
  const rows = [meter("KV pages", engine.kv_usage, `${engine.kv_pages_used} of ${engine.kv_pages_total}`)];
  if (engine.prefix_cache_queries) {
    const share = engine.prefix_cache_hits / engine.prefix_cache_queries;
    rows.push(meter("Prefix cache hits", share, `${Math.round(100 * share)} %`));
  }
  for (const [name, tier] of Object.entries(engine.tiers)) {
    const moved = `${bytes(tier.loaded_bytes ?? 0)} in, ${bytes(tier.stored_bytes ?? 0)} out`;
    const held = tier.capacity_bytes ? (tier.used_bytes ?? 0) / tier.capacity_bytes : 0;
    rows.push(meter(`Tier ${name}`, held, moved));
  }
  return rows;
}

function contextRows(context) {
  if (context.mode === "full") return [element("p", "everything is read", "quiet")];
  const percent = (share) => `${Math.round(100 * share)} %`;
  const rows = [meter(`Read, ${context.mode}, budget ${context.budget}`, context.read_share, percent(context.read_share))];
  if (context.captured !== null) rows.push(meter("Attention captured", context.captured, `about ${percent(context.captured)}`));
  if (context.overlap !== null) rows.push(meter("Selection overlap", context.overlap, percent(context.overlap)));
  return rows;
}

function show(stats) {
  const engine = stats.engine;
  $("model").textContent = stats.config.model ?? "ready";
  $("model").className = "";
  $("acceptance").textContent = engine.acceptance_length.toFixed(2);
  $("running").textContent = `${engine.running} / ${engine.waiting}`;
  $("drafters").replaceChildren(...engine.drafters.map(drafterRow));
  if (!engine.drafters.length) {
    const row = element("tr");
    row.append(element("td", "none: plain decoding"));
    $("drafters").append(row);
  }
  $("lengths").replaceChildren(...lengthBars(engine.lengths));
  $("memory").replaceChildren(...memoryRows(engine));
  $("context").replaceChildren(...contextRows(engine.context));
  $("budget").placeholder = engine.context.mode === "full" ? "all" : engine.context.budget;
  $("budget").disabled = engine.context.mode === "full";
}

async function refresh() {
  try {
    const response = await fetch("/stats", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    show(await response.json());
  } catch (error) {
    $("model").textContent = error.message;
    $("model").className = "error";
    if (error.message.includes("API key")) $("options").open = true;
  }
}

// --- wiring -----------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  $("text").focus();
});
$("tint").addEventListener("change", () => document.body.classList.toggle("tinted", $("tint").checked));
$("panel-button").addEventListener("click", () => {
  const open = $("panel").classList.toggle("open");
  $("panel-button").setAttribute("aria-expanded", String(open));
});
$("key").value = sessionStorage.getItem("outrider-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("outrider-key", $("key").value);
  refresh();
});
document.body.classList.add("tinted");
refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, 1500);
