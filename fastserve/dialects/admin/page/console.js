// Shows what /console/numbers says, every two seconds. The server sends each point of a plot once.
"use strict";

const KEEP = 300; // points of a plot; the server keeps as many
const NARROWEST = 60; // points over the whole width while the server is young
const plotted = new Map(); // model, "" for the whole server -> name of a series -> its points
let after = 0;
let startedAt = null;
let interval = 2;

const byId = (id) => document.getElementById(id);

function make(tag, className, ...children) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  found.append(...children);
  return found;
}

// Three digits, and a letter for thousands and more; counts have no fractions.
function short(value, unit = "", whole = false) {
  if (value === null || value === undefined) return "–";
  const sizes = [[1e9, "G"], [1e6, "M"], [1e4, "k", 1e3]];
  for (const [from, letter, by] of sizes) {
    if (value >= from) return `${(value / (by ?? from)).toPrecision(3)} ${letter}${unit}`;
  }
  const digits = whole || value === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${unit && ` ${unit}`}`;
}

function lasting(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const texts = parts.slice(first, first + 2).map(([size, letter]) => {
    const whole = Math.floor(seconds / size);
    seconds -= whole * size;
    return `${whole} ${letter}`;
  });
  return texts.join(" ");
}

// Plots ------------------------------------------------------------------------------------------

function keep(model, points) {
  const series = plotted.get(model) ?? {};
  for (const [name, values] of Object.entries(points)) {
    series[name] = [...(series[name] ?? []), ...values].slice(-KEEP);
  }
  plotted.set(model, series);
}

function draw(tag, attributes) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

// The newest point is at the right edge; where nothing was counted the line has a gap.
function line(values, width, top) {
  let path = "";
  let gap = true;
  values.forEach((value, i) => {
    if (value === null) {
      gap = true;
      return;
    }
    const x = width - values.length + i;
    path += `${gap ? "M" : "L"}${x} ${(40 - (38 * value) / top).toFixed(2)}`;
    gap = false;
  });
  return path;
}

function plot(title, now, series, names, whole = false) {
  const lines = names.map((name) => series[name] ?? []);
  const width = Math.max(NARROWEST, lines[0].length);
  const peak = Math.max(...lines.flat().filter((value) => value !== null), 0);
  const top = peak || 1;
  const svg = draw("svg", { viewBox: `0 0 ${width - 1} 40`, preserveAspectRatio: "none", role: "img" });
  const minutes = Math.round((width * interval) / 60);
  svg.setAttribute("aria-label", `${title}: the last ${minutes} minutes, peak ${short(peak, "", whole)}`);
  for (const y of [2, 21, 40]) svg.append(draw("path", { class: "grid", d: `M0 ${y}H${width - 1}` }));
  if (names.length === 1 && lines[0].length && !lines[0].includes(null)) {
    const outline = `${line(lines[0], width, top)}V40H${width - lines[0].length}Z`;
    svg.append(draw("path", { class: "under", d: outline }));
  }
  lines.forEach((values, i) => svg.append(draw("path", { class: "ab"[i], d: line(values, width, top) })));
  const above = make("div", "", title, make("span", "", `${minutes} min`));
  const below = make("div", "", now, make("span", "", `peak ${peak ? short(peak, "", whole) : "–"}`));
  return make("figure", "plot", make("figcaption", "", above, below), svg);
}

function figure(now, name, whole = false) {
  return make("b", "", short(now[name], "", whole));
}

function rates(now, series) {
  return plot("requests a second", figure(now, "requests_per_s"), series, ["requests_per_s"]);
}

function latencies(now, series) {
  const [p50, p99] = [`${short(now.p50_ms)} `, short(now.p99_ms)];
  const text = make("b", "", make("span", "key"), p50, make("span", "key b"), p99);
  return plot("p50, p99 in ms", text, series, ["p50_ms", "p99_ms"]);
}

function batches(now, series) {
  return plot("rows in a batch", figure(now, "batch_rows"), series, ["batch_rows"]);
}

function queues(now, series) {
  const text = figure(now, "queue_rows", true);
  return plot("rows waiting", text, series, ["queue_rows"], true);
}

function tokens(now, series) {
  return plot("tokens a second", figure(now, "tokens_per_s"), series, ["tokens_per_s"]);
}

function firsts(now, series) {
  const [p50, p99] = [`${short(now.first_p50_ms)} `, short(now.first_p99_ms)];
  const text = make("b", "", make("span", "key"), p50, make("span", "key b"), p99);
  return plot("first token, ms", text, series, ["first_p50_ms", "first_p99_ms"]);
}

function running(now, series) {
  return plot("sequences running", figure(now, "running", true), series, ["running"], true);
}

function failures(now, series) {
  const text = make("b", now.errors_per_s ? "bad" : "", short(now.errors_per_s));
  return plot("errors a second", text, series, ["errors_per_s"]);
}

// Parts of the page ------------------------------------------------------------------------------

function pill(text, kind) {
  return make("span", `pill ${kind}`, text);
}

function showServer(numbers) {
  const state = byId("state");
  state.textContent = numbers.ready ? "ready" : "not ready";
  state.className = `pill ${numbers.ready ? "good" : "bad"}`;
  byId("reason").textContent = numbers.ready ? "" : numbers.reason;
  const connections = short(numbers.connections, "", true);
  const facts = [["version", numbers.server], ["up", lasting(numbers.up_s)], ["connections", connections]];
  if (numbers.certificate_expires !== null) {
    const left = numbers.certificate_expires - numbers.at;
    facts.push(["certificate", left > 0 ? `ends in ${lasting(left)}` : "has ended"]);
  }
  const pairs = facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value)));
  byId("server").replaceChildren(...pairs);
}

function showTiles(numbers) {
  const series = plotted.get("") ?? {};
  const tiles = [rates, latencies, batches, queues, failures].map((of) => make("div", "card", of(numbers.now, series)));
  if (numbers.text) tiles.push(make("div", "card", tokens(numbers.text, series)));
  byId("tiles").replaceChildren(...tiles);
}

function describeVersion(version) {
  const state = { AVAILABLE: "good", END: version.error ? "bad" : "dim" }[version.state] ?? "wait";
  const words = version.state === "END" ? (version.error ? "failed" : "ended") : version.state.toLowerCase();
  const found = make("div", "", `version ${version.version} `, pill(words, state));
  if (version.labels.length) found.append(` ${version.labels.join(", ")}`);
  if (version.workers_wanted && version.state === "AVAILABLE") {
    found.append(` ${version.workers_alive} of ${version.workers_wanted} workers`);
  }
  if (version.shared_worker) found.append(make("span", "dim", ` in shared worker ${version.shared_worker}`));
  if (version.worker_restarts) found.append(make("span", "wait", ` ${version.worker_restarts} restarts`));
  if (version.error) found.append(make("div", "bad", version.error));
  return found;
}

function describeSizes(bars) {
  const most = Math.max(...bars.map((bar) => bar.batches), 1);
  const drawn = bars.map((bar) => {
    const one = make("i");
    one.style.height = `${(100 * bar.batches) / most}%`;
    one.title = `${bar.batches} batches of ${bar.at_most === null ? "more" : `at most ${bar.at_most}`} rows`;
    return one;
  });
  const last = bars.length ? bars[bars.length - 1].at_most : null;
  const range = bars.length ? ` 1 to ${last ?? "more"} rows` : " none";
  return make("div", "", make("span", "dim", "batch sizes "), make("span", "bars", ...drawn), range);
}

function describeStages(stages) {
  const timed = stages.filter((stage) => stage.p50_ms !== null);
  return timed.map((stage) => {
    const both = `${short(stage.p50_ms)} / ${short(stage.p99_ms, "ms")}`;
    return make("div", "", make("span", "dim", `${stage.stage} `), both);
  });
}

function describeText(text) {
  const facts = [
    ["waiting ", short(text.waiting, "", true)],
    ["between tokens ", `${short(text.gap_p50_ms)} / ${short(text.gap_p99_ms, "ms")}`],
    ["prompts ", `${short(text.prompt_tokens_per_s)} tokens/s`],
  ];
  if (text.kv_tokens) {
    const share = Math.round((100 * text.kv_used_tokens) / text.kv_tokens);
    facts.push(["KV cache ", `${share} % of ${short(text.kv_tokens, "", true)} tokens`]);
  }
  return facts.map(([name, value]) => make("div", "", make("span", "dim", name), value));
}

// How many of the last ten seconds' requests went wrong: none, some, or most of them.
function health(now) {
  if (!now.errors_per_s) return "";
  return now.errors_per_s >= now.requests_per_s / 2 ? "bad" : "wait";
}

function describeFailures(failures) {
  const found = make("div", "failures", make("span", "dim", "last failures"));
  for (const one of failures) {
    const at = new Date(1000 * one.at).toLocaleTimeString();
    const id = one.request_id ? [make("code", "", one.request_id)] : [];
    found.append(make("div", "", make("span", "dim", `${at} `), make("span", "bad", `${one.status} `), ...id, ` ${one.message}`));
  }
  return found;
}

function showModel(model) {
  const series = plotted.get(model.model) ?? {};
  const failing = health(model.now);
  const state = model.ready ? pill(failing === "bad" ? "failing" : "ready", failing || "good") : pill("not ready", "bad");
  const head = make("header", "", make("h3", "", model.model), state);
  if (failing) head.append(make("span", failing, `${short(model.now.errors_per_s)} errors a second`));
  if (!model.ready) head.append(make("span", "bad", model.reason));
  if (model.failed && model.failed.reason !== model.reason) {
    head.append(make("span", "bad", `a change failed to load since ${model.failed.since}: ${model.failed.reason}`));
  }
  const plots = model.text
    ? [rates(model.now, series), ...[tokens, firsts, running].map((of) => of(model.text, series))]
    : [rates, latencies, batches, queues].map((of) => of(model.now, series));
  plots.push(failures(model.now, series));
  const facts = [
    ...model.versions.map(describeVersion),
    ...(model.text ? describeText(model.text) : [describeSizes(model.batches), ...describeStages(model.stages)]),
  ];
  const found = make("article", `model ${model.ready ? failing : "bad"}`, head, make("div", "plots", ...plots), make("div", "facts", ...facts));
  if (model.failures.length) found.append(describeFailures(model.failures));
  found.id = `model-${model.model}`;
  return found;
}

function showModels(numbers) {
  const models = numbers.models.map(showModel);
  byId("models").replaceChildren(...(models.length ? models : [make("p", "dim", "No model is loaded.")]));
}

function meter(share) {
  const inner = make("i");
  inner.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  return make("div", "meter", inner);
}

function showDevices(numbers) {
  const cards = numbers.devices.map((device) => {
    const share = device.memory_total_bytes ? device.memory_used_bytes / device.memory_total_bytes : 0;
    return make(
      "div", "card", make("h3", "", device.name),
      device.utilization === null ? "busy: not told" : `busy ${Math.round(100 * device.utilization)} %`,
      meter(device.utilization),
      `memory ${short(device.memory_used_bytes, "B")} of ${short(device.memory_total_bytes, "B")}`, meter(share),
    );
  });
  byId("devices").replaceChildren(...cards);
}

const KINDS = { status: "answered with", reject: "turned away", cancel: "client left", wire: "refused at the door" };

function showCauses(numbers) {
  const rows = numbers.causes.map((one) => make(
    "tr", "",
    make("td", "", KINDS[one.kind] ?? one.kind), make("td", "", one.model || "–"), make("td", "", one.cause),
    make("td", "n", one.per_s ? `${short(one.per_s)} /s` : "–"), make("td", "n", short(one.total, "", true)),
  ));
  byId("causes").tBodies[0].replaceChildren(...rows);
  byId("causes").hidden = rows.length === 0;
  byId("no-causes").hidden = rows.length > 0;
}

// Asking -----------------------------------------------------------------------------------------

// Behind one port there may be several processes, each with a history that is a little off the others', and
// a server that began again begins its points anew: then everything is asked for once more.
function take(numbers) {
  const begunAt = Math.round(numbers.at - numbers.up_s);
  if (startedAt !== null && Math.abs(begunAt - startedAt) > 2) {
    plotted.clear();
    after = 0;
    startedAt = null;
    return false;
  }
  startedAt = begunAt;
  after = numbers.next_point;
  interval = numbers.interval_s;
  keep("", numbers.points);
  numbers.models.forEach((model) => keep(model.model, model.points));
  return true;
}

async function refresh() {
  let wait = 2000;
  try {
    const reply = await fetch(`/console/numbers?after=${after}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    const numbers = await reply.json();
    wait = take(numbers) ? 1000 * numbers.interval_s : 0;
    if (wait) [showServer, showTiles, showModels, showDevices, showCauses].forEach((show) => show(numbers));
  } catch (fault) {
    byId("state").textContent = "no answer";
    byId("state").className = "pill lost";
    byId("reason").textContent = String(fault.message ?? fault);
  }
  setTimeout(refresh, wait);
}

refresh();
