"use strict";
// Lists the operations of openapi.json, shows one, and sends requests to the server that the page came from.

const MOST_SHOWN = 200000; // characters of an answer
const MOST_LISTED = 500; // operations: a search finds the others
const base = location.pathname.replace(/docs\/?$/, "");
const place = (name) => document.getElementById(name);
let operations = [];
let listed = [];
let chosen = null;
let components = {};
let sending = null;

function make(tag, properties = {}, ...children) {
  const found = Object.assign(document.createElement(tag), properties);
  found.append(...children);
  return found;
}

function extraHeader() {
  const [name, ...rest] = place("header").value.split(":");
  return name.trim() && rest.length ? { [name.trim()]: rest.join(":").trim() } : {};
}

async function load() {
  place("state").textContent = "loading";
  try {
    const reply = await fetch(base + "openapi.json", { headers: extraHeader() });
    const text = await reply.text();
    if (!reply.ok) throw new Error(`${reply.status} ${text.slice(0, 300)}`);
    read(JSON.parse(text));
  } catch (fault) {
    place("state").textContent = `openapi.json: ${fault.message}`;
    place("state").className = "bad";
  }
}

function read(found) {
  components = (found.components && found.components.schemas) || {};
  operations = [];
  for (const [path, methods] of Object.entries(found.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      operations.push({ path, method: method.toUpperCase(), about, tag: (about.tags || [""])[0] });
    }
  }
  const order = new Map(found.tags.map((tag, at) => [tag.name, at]));
  const rank = (one) => (one.tag === "Models" ? -1 : order.get(one.tag) ?? 0);
  operations.sort((a, b) => rank(a) - rank(b));
  const left = found["x-models-left-out"];
  place("state").className = left ? "bad" : "dim";
  place("state").textContent = left
    ? `${operations.length} operations; ${left.length} models are left out`
    : `${operations.length} operations`;
  list();
  choose(operations.find((one) => `#${one.method} ${one.path}` === decodeURIComponent(location.hash))
    || operations.find((one) => one.method === "POST") || operations[0]);
}

function list() {
  const words = place("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (one) => {
    const text = `${one.method} ${one.path} ${one.tag} ${one.about.summary}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const found = operations.filter(fits);
  listed = found.slice(0, MOST_LISTED);
  const items = [];
  let tag = null;
  for (const one of listed) {
    if (one.tag !== tag) items.push(make("h3", { textContent: (tag = one.tag) }));
    one.button = make(
      "button",
      { type: "button", onclick: () => choose(one, true) },
      make("span", { className: `verb ${one.method.toLowerCase()}`, textContent: one.method }),
      make("code", { textContent: one.path }),
      make("span", { className: "what", textContent: one.about.summary }),
    );
    if (one === chosen) one.button.setAttribute("aria-current", "true");
    items.push(one.button);
  }
  if (!found.length) items.push(make("p", { className: "dim", textContent: "Nothing is found." }));
  if (found.length > listed.length) {
    items.push(make("p", { className: "dim", textContent: `${found.length - listed.length} more: search.` }));
  }
  place("operations").replaceChildren(...items);
}

function choose(one, asked = false) {
  if (!one) return;
  if (chosen && chosen.button) chosen.button.removeAttribute("aria-current");
  chosen = one;
  if (sending) sending.abort();
  if (one.button) {
    one.button.setAttribute("aria-current", "true");
    one.button.scrollIntoView({ block: "nearest" });
  }
  if (asked) history.replaceState(null, "", `#${encodeURIComponent(`${one.method} ${one.path}`)}`);
  place("one").replaceChildren(...show(one));
}

function show(one) {
  const { about } = one;
  const content = about.requestBody ? Object.entries(about.requestBody.content)[0] : null;
  const parts = [
    make("h2", {}, make("span", { className: `verb ${one.method.toLowerCase()}`, textContent: one.method }), " ",
      make("code", { textContent: one.path })),
    make("div", { textContent: about.summary }),
  ];
  if (about.description) parts.push(make("p", { className: "dim", textContent: about.description }));
  one.inputs = (about.parameters || []).map((given) => {
    const input = make("input", { value: given.example ?? "", name: given.name });
    parts.push(make("label", {}, `${given.name} (${given.in})`, input));
    return { given, input };
  });
  one.body = null;
  one.media = content && content[0];
  if (content && isText(one.media)) {
    const example = content[1].example;
    const text = example === undefined ? "" : typeof example === "string" && one.media !== "application/json"
      ? example : pretty(example);
    one.body = make("textarea", { value: text, spellcheck: false, id: "body" });
    parts.push(make("label", { htmlFor: "body", textContent: `Body (${one.media})` }), one.body);
    if (example === undefined) {
      parts.push(make("p", { className: "dim", textContent: "An example would be too long for this page." }));
    }
  } else if (content) {
    one.raw = bytesOf(content[1].example ?? "");
    parts.push(make("p", { className: "dim", textContent: `Body: ${one.raw.length} bytes, all zero (${one.media}).` }));
  }
  one.answer = make("div", { role: "status" });
  one.send = make("button", { type: "button", className: "main", textContent: "Send", onclick: () => send(one) });
  const copy = make("button", { type: "button", textContent: "Copy as curl", onclick: () => copyText(copy, curl(one)) });
  parts.push(make("div", { className: "bar" }, one.send, copy), one.answer);
  parts.push(make("details", {}, make("summary", { textContent: "curl" }), make("pre", { textContent: curl(one) })));
  if (content) parts.push(schemaOf("Schema of the body", content[1].schema, true));
  for (const [media, given] of Object.entries(about.responses["200"].content || {})) {
    if (given.schema && Object.keys(given.schema).length) parts.push(schemaOf(`Schema of the answer (${media})`, given.schema));
  }
  return parts;
}

const isText = (media) => /json|text/.test(media);
const bytesOf = (text) => Uint8Array.from(text, (letter) => letter.charCodeAt(0));

function pretty(value) {
  const text = JSON.stringify(value, null, 2);
  // Numbers of a row stay on a line.
  return text.replace(/\[\s+([^[\]{}"]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s+/g, " ")}]`);
}

function schemaOf(title, schema, open = false) {
  const used = {};
  collect(schema, used);
  const shown = Object.keys(used).length ? { ...schema, $defs: used } : schema;
  return make("details", { open }, make("summary", { textContent: title }), make("pre", { textContent: pretty(shown) }));
}

function collect(schema, used) {
  if (!schema || typeof schema !== "object") return;
  const name = typeof schema.$ref === "string" ? schema.$ref.split("/").pop() : "";
  if (name && components[name] && !used[name]) {
    used[name] = components[name];
    collect(components[name], used);
  }
  for (const value of Object.values(schema)) collect(value, used);
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(one) {
  const parts = [`curl ${quoted(location.origin + base.replace(/\/$/, "") + one.path)}`];
  for (const { given, input } of one.inputs) parts.push(`-H ${quoted(`${given.name}: ${input.value}`)}`);
  for (const [name, value] of Object.entries(extraHeader())) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (one.body) parts.push(`-H 'Content-Type: ${one.media}'`, `-d ${quoted(one.body.value)}`);
  else if (one.raw) parts.push(`-H 'Content-Type: ${one.media}'`, "--data-binary @FILE");
  return parts.join(" \\\n  ");
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
  setTimeout(() => { button.textContent = "Copy as curl"; }, 1500);
}

async function send(one) {
  if (sending) sending.abort();
  const mine = (sending = new AbortController());
  const headers = { ...extraHeader() };
  for (const { given, input } of one.inputs) headers[given.name] = input.value;
  if (one.media) headers["Content-Type"] = one.media;
  const state = make("div", { className: "bar dim", textContent: "sent" });
  const shown = make("pre", { hidden: true });
  one.answer.replaceChildren(state, shown);
  const began = performance.now();
  try {
    const body = one.body ? one.body.value : one.raw;
    const reply = await fetch(base.replace(/\/$/, "") + one.path, {
      method: one.method, headers, body: one.method === "GET" ? undefined : body, signal: mine.signal,
    });
    const type = reply.headers.get("Content-Type") || "";
    const tell = (more) => {
      state.className = `bar ${reply.ok ? "good" : "bad"}`;
      state.textContent = `${reply.status} ${reply.statusText} · ${(performance.now() - began).toFixed(1)} ms · ${more}`;
    };
    tell(type);
    shown.hidden = false;
    if (type.includes("octet-stream") || type.startsWith("image/")) {
      tell(`${type} · ${(await reply.arrayBuffer()).byteLength} bytes`);
      shown.textContent = reply.headers.get("NV-InferResponse") || "";
      return;
    }
    await showText(reply, type, shown);
    tell(type);
  } catch (fault) {
    if (mine.signal.aborted) return;
    state.className = "bar bad";
    state.textContent = fault.message;
  }
}

// Shows a stream's events as they come; JSON is indented once it is whole.
async function showText(reply, type, shown) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (text.length < MOST_SHOWN) {
      text += decoder.decode(value, { stream: true });
      shown.textContent = text.slice(0, MOST_SHOWN);
    }
  }
  if (text.length >= MOST_SHOWN) {
    shown.textContent += "\n...";
  } else if (type.startsWith("application/json")) {
    try { shown.textContent = pretty(JSON.parse(text)); } catch { /* shown as it came */ }
  }
}

function step(by) {
  if (!listed.length) return;
  const at = listed.indexOf(chosen);
  choose(listed[Math.min(Math.max(at + by, 0), listed.length - 1)], true);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (chosen) send(chosen);
    return;
  }
  const writes = /INPUT|TEXTAREA/.test(event.target.tagName);
  if (event.key === "Escape" && writes) event.target.blur();
  if (writes || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    place("search").focus();
  } else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
});
place("search").addEventListener("input", list);
place("header").addEventListener("change", load);
load();
