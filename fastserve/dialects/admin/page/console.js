// Shows what /console/rows says of all models, and /console/model of those unfolded, every two seconds. Elements
// are kept from one reply to the next and changed where something has: a selection or a text being written stays.
// All text of the server's is set as text, never as markup.
"use strict";

const OPEN_MOST = 8; // unfolded models: each is a request of its own
const RESORT_MS = 10000;
const SENT_MOST = 1 << 21; // elements of an example that the page makes up by itself

const server = new Points();
const models = new Map(); // name -> ModelRow
const view = { minutes: 10, sort: "requests", rising: false, trouble: false, search: "" };
let known = ""; // the history that points are of
let interval = 2;
let answeredAt = 0; // by this page's clock
let answered = null; // the last reply
let movedAt = 0; // when there last was a new point
let sortedAt = 0;
let fault = "";

const byId = (id) => document.getElementById(id);
const count = () => Math.round((60 * view.minutes) / interval);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Render a part anew where its facts have changed.
function renew(element, facts, render) {
  const told = JSON.stringify(facts);
  if (element.told === told) return;
  element.told = told;
  element.replaceChildren(...render(facts));
}

function ask(path, options = {}) {
  return fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000), ...options });
}

async function askJson(path) {
  const reply = await ask(path);
  if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
  return reply.json();
}

// The server -------------------------------------------------------------------------------------

function showServer(numbers) {
  const state = byId("state");
  setText(state, numbers.ready ? "ready" : "not ready");
  state.className = `pill ${numbers.ready ? "good" : "bad"}`;
  setText(byId("reason"), numbers.ready ? "" : numbers.reason);
  const facts = [["version", numbers.server], ["up", lasting(numbers.up_s)], ["connections", short(numbers.connections, "", true)]];
  if (numbers.certificate_expires !== null) {
    const left = numbers.certificate_expires - numbers.at;
    facts.push(["certificate", left > 0 ? `ends in ${lasting(left)}` : "has ended"]);
  }
  renew(byId("server"), facts, (pairs) => pairs.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
}

// Plots of one set of figures and points; `text` has those of generated text. Of errors those that are not the
// clients' own are red.
function plotsOf(now, text, points, whole = false) {
  const last = (...names) => names.map((name) => points.last(name, count()));
  const big = (value, kind = "", counted = false) => make("b", kind, short(value, "", counted));
  const both = (p50, p99) => make("b", "", make("span", "key"), `${short(p50)} `, make("span", "key b"), short(p99));
  const one = (title, shown, names, kinds, unit, counted) => plot(title, shown, last(...names), count(), interval, kinds, unit, counted);
  const found = [
    one("requests/s", big(now.requests_per_s), ["requests_per_s"]),
    one("errors/s", big(now.errors_per_s, now.faults_per_s ? "bad" : ""), ["errors_per_s", "faults_per_s"], ["dim", "bad"]),
    one("p50 / p99, ms", both(now.p50_ms, now.p99_ms), ["p50_ms", "p99_ms"]),
  ];
  if (!text || whole) found.push(one("rows waiting", big(now.queue_rows, "", true), ["queue_rows"], ["a"], "", true));
  if (!text) found.push(one("rows in a batch", big(now.batch_rows), ["batch_rows"]));
  if (text) found.push(one("tokens/s", big(text.tokens_per_s), ["tokens_per_s"]));
  if (text && !whole) found.push(one("first token, ms", both(text.first_p50_ms, text.first_p99_ms), ["first_p50_ms", "first_p99_ms"]));
  if (text) found.push(one("running", big(text.running, "", true), ["running"], ["a"], "", true));
  return found;
}

function showTiles(numbers) {
  const plots = plotsOf(numbers.now, numbers.text, server, true);
  byId("tiles").replaceChildren(...plots.map((one) => make("div", "card", one)));
}

function showDevices(numbers) {
  renew(byId("devices"), numbers.devices, (devices) => devices.map((device) => {
    const share = device.memory_total_bytes ? device.memory_used_bytes / device.memory_total_bytes : 0;
    const kind = (part) => (part > 0.95 ? "bad" : part > 0.85 ? "warn" : "");
    return make(
      "div", "card", make("b", "", device.name), make("div", ""),
      device.utilization === null ? "busy: not told" : `busy ${Math.round(100 * device.utilization)} %`,
      meter(device.utilization),
      `memory ${short(device.memory_used_bytes, "B")} of ${short(device.memory_total_bytes, "B")}`, meter(share, kind(share)),
    );
  }));
}

const KINDS = { status: "answered with", reject: "turned away", cancel: "client left", wire: "refused at the door" };

function causeRows(causes, named) {
  return causes.map((one) => make(
    "tr", "",
    make("td", "", KINDS[one.kind] ?? one.kind), ...(named ? [make("td", "", one.model || "–")] : []), make("td", "", one.cause),
    make("td", "n", one.per_s > 0 ? `${short(one.per_s)} /s` : "–"), make("td", "n", short(one.total, "", true)),
  ));
}

function showCauses(numbers) {
  renew(byId("causes").tBodies[0], numbers.causes, (causes) => causeRows(causes, true));
  byId("causes").hidden = numbers.causes.length === 0;
  byId("no-causes").hidden = numbers.causes.length > 0;
}

// A row ------------------------------------------------------------------------------------------

// A figure of a row, and a smaller one below it.
class Cell {
  constructor(name, unit) {
    this.value = make("span", "");
    this.value.dataset.unit = unit;
    this.more = make("small", "");
    this.element = make("span", `n ${name}`, this.value, this.more);
  }

  show(value, more = "") {
    setText(this.value, value);
    setText(this.more, more);
    this.more.hidden = !more;
  }
}

const DOTS = { ready: "good", dormant: "off", loading: "warn", down: "bad", unloaded: "off" };

class ModelRow {
  constructor(name) {
    this.name = name;
    this.points = new Points();
    this.traffic = 0;
    this.details = null;
    this.spark = new Sparkline();
    this.dot = make("i", "dot");
    this.tags = make("small", "");
    this.rate = new Cell("rate", "requests/s");
    this.errors = new Cell("errors", "errors/s");
    this.latency = new Cell("latency", "");
    this.waiting = new Cell("waiting", "waiting");
    const cells = [this.rate, this.errors, this.latency, this.waiting].map((cell) => cell.element);
    const numbers = make("span", "numbers", ...cells);
    this.button = make("button", "row", this.dot, make("span", "name", make("b", "", name), this.tags), this.spark.svg, numbers);
    this.button.type = "button";
    this.button.setAttribute("aria-expanded", "false");
    this.button.addEventListener("click", () => this.toggle());
    this.said = make("p", "said");
    this.element = make("article", "model", this.button, this.said);
    this.element.id = `model-${name}`;
  }

  show(row, numbers) {
    this.row = row;
    this.points.add(row.points ?? {}, numbers.first_point, numbers.next_point);
    const now = row.now ?? {};
    this.state = row.state ?? "ready";
    const kind = row.trouble || DOTS[this.state];
    this.kind = kind;
    this.dot.className = `dot ${kind}`;
    this.dot.title = row.why || this.state;
    this.element.className = `model ${kind}${this.details ? " open" : ""}`;
    const tags = [this.state === "ready" ? "" : this.state, row.text ? "text" : "", (row.versions ?? []).map((number) => `v${number}`).join(" ")];
    setText(this.tags, tags.filter(Boolean).join(" · "));
    const [requests, errors] = ["requests_per_s", "errors_per_s"].map((name) => this.points.last(name, count()));
    this.traffic = sum(requests);
    this.failed = sum(errors);
    this.spark.show(requests, errors, count());
    this.rate.show(short(now.requests_per_s ?? 0), row.text ? `${short(now.tokens_per_s ?? 0)} tokens/s` : "");
    this.errors.show(short(now.errors_per_s ?? 0));
    this.errors.element.classList.toggle("bad", Boolean(now.faults_per_s));
    this.errors.element.classList.toggle("dim", !now.errors_per_s);
    this.latency.show(pair(now.p50_ms, now.p99_ms));
    this.latency.element.title = explainPair(now.p50_ms, now.p99_ms);
    const waiting = short(row.text ? (now.waiting ?? 0) : (now.queue_rows ?? 0), "", true);
    this.waiting.show(waiting, row.text ? `${short(now.running ?? 0, "", true)} running` : "");
    const last = row.last && numbers.at - row.last.at < 60 * view.minutes ? row.last : null;
    renew(this.said, [row.why ?? "", row.trouble ?? "", last], describeTrouble);
    this.said.hidden = !this.said.childElementCount;
  }

  sortValue() {
    const now = this.row.now ?? {};
    const values = {
      requests: this.traffic, errors: this.failed, latency: now.p99_ms ?? -1,
      waiting: this.row.text ? (now.waiting ?? 0) : (now.queue_rows ?? 0),
    };
    return values[view.sort];
  }

  toggle(open = !this.details) {
    if (open === Boolean(this.details)) return;
    if (open) {
      const others = [...models.values()].filter((one) => one.details);
      if (others.length >= OPEN_MOST) others[0].toggle(false);
      this.details = new Details(this.name);
      this.element.append(this.details.element);
      this.details.refresh();
    } else {
      this.details.element.remove();
      this.details = null;
    }
    this.button.setAttribute("aria-expanded", String(open));
    this.element.classList.toggle("open", open);
    rememberOpen();
  }
}

// What is the matter, and the last request that failed.
function describeTrouble([why, trouble, last]) {
  const found = why ? [make("span", trouble, why)] : [];
  return last ? [...found, ...describeFailure(last)] : found;
}

function describeFailure(one) {
  const id = one.request_id ? [make("code", "", one.request_id)] : [];
  return [make("span", "dim", clock(one.at)), make("span", "bad", one.status), ...id, make("span", "", one.message)];
}

// An unfolded model ------------------------------------------------------------------------------

const STAGE_TEXTS = ["decode", "queue", "copy-in", "compute", "copy-out", "encode"];

class Details {
  constructor(name) {
    this.name = name;
    this.history = "";
    this.at = 0;
    this.points = new Points();
    this.plots = make("section", "plots");
    this.parts = Object.fromEntries(["stages", "failures", "versions", "text", "tensors", "batches", "causes"].map((part) => [part, make("section", part)]));
    this.request = new RequestPart();
    const parts = make("div", "parts", ...Object.values(this.parts));
    this.element = make("div", "details", this.plots, parts, this.request.element);
  }

  async refresh() {
    let told;
    try {
      const since = `after=${this.points.next}&history=${this.history}`;
      told = await askJson(`/console/model?name=${encodeURIComponent(this.name)}&${since}`);
    } catch (error) {
      return; // the list says that the server does not answer
    }
    if (!follow([this.points], this.history, this.at, told)) {
      this.history = "";
      this.points = new Points();
      return this.refresh();
    }
    [this.history, this.at] = [told.history, told.at];
    this.points.add(told.points, told.first_point, told.next_point);
    this.show(told);
  }

  show(told) {
    this.plots.replaceChildren(...plotsOf(told.now, told.text, this.points));
    renew(this.parts.stages, told.stages, describeStages);
    renew(this.parts.failures, [told.failures, told.refusals], describeFailures);
    renew(this.parts.versions, told.versions, describeVersions);
    renew(this.parts.text, told.text, describeText);
    renew(this.parts.tensors, [told.inputs, told.outputs, told.backend, told.max_batch_size], describeTensors);
    renew(this.parts.batches, told.text ? [] : told.batches, describeSizes);
    renew(this.parts.causes, told.causes, describeCauses);
    this.request.show(told);
  }
}

function describeStages(stages) {
  const timed = stages.filter((stage) => stage.p50_ms !== null);
  if (!timed.length) return [];
  const longest = Math.max(...["p50_ms", "p99_ms"].map((rank) => sum(timed.map((stage) => stage[rank]))));
  const bar = (rank) => make("div", "stack", ...timed.map((stage) => {
    const part = make("i", `s${STAGE_TEXTS.indexOf(stage.stage)}`);
    part.style.width = `${(100 * stage[rank]) / longest}%`;
    part.title = `${stage.stage} ${short(stage[rank], "ms")}`;
    return part;
  }));
  const total = (rank) => make("span", "n", short(sum(timed.map((stage) => stage[rank])), "ms"));
  const names = timed.map((stage) => {
    const swatch = make("i", `swatch s${STAGE_TEXTS.indexOf(stage.stage)}`);
    return make("span", "", swatch, `${stage.stage} `, make("b", "", pair(stage.p50_ms, stage.p99_ms)));
  });
  const grid = make(
    "div", "stage-bars",
    make("span", "", "half of the requests"), bar("p50_ms"), total("p50_ms"),
    make("span", "", "slow ones, 1 of 100"), bar("p99_ms"), total("p99_ms"),
  );
  return [make("h3", "", "Where the time goes, stage by stage"), grid, make("div", "legend", ...names)];
}

function describeFailures([failures, refusals]) {
  const table = (title, kind, list) => {
    if (!list.length) return [];
    const groups = new Map(); // those alike are one line, with the ids of all
    for (const one of list) {
      const key = JSON.stringify([one.status, one.message]);
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    const rows = [...groups.values()].map((alike) => {
      const ids = make("td", "ids", ...alike.map((one) => make("code", "", one.request_id || "–")));
      return make("tr", "", make("td", "time dim", clock(alike[0].at)), make("td", `time ${kind}`, alike[0].status), ids, make("td", "", alike[0].message));
    });
    const head = make("tr", "", ...["time", "status", "request id", "error"].map((text) => make("th", "", text)));
    return [make("h3", "", title), make("table", "failures", make("thead", "", head), make("tbody", "", ...rows))];
  };
  return [...table("Last failures", "bad", failures), ...table("Last requests that clients got wrong", "dim", refusals)];
}

function describeVersions(versions) {
  const rows = versions.map((version) => {
    const failed = version.state === "END" && version.error;
    const kind = { AVAILABLE: "good", END: failed ? "bad" : "dim" }[version.state] ?? "warn";
    const state = make("td", "", pill(version.state === "END" ? (failed ? "failed" : "ended") : version.state.toLowerCase(), kind));
    if (version.error) state.append(make("div", "bad", version.error));
    const workers = make("td", "");
    if (version.workers_wanted && version.state === "AVAILABLE") {
      const missing = version.workers_alive < version.workers_wanted;
      workers.append(make("span", missing ? "warn" : "", `${version.workers_alive} of ${version.workers_wanted} workers`));
      version.workers.forEach((worker, number) => {
        const memory = worker.memory_bytes === null ? "" : `, ${short(worker.memory_bytes, "B")}`;
        workers.append(make("div", "dim", `${number}: ${worker.device}${memory}`));
      });
    }
    if (version.shared_worker) workers.append(make("div", "dim", `in shared worker ${version.shared_worker}`));
    if (version.worker_restarts) workers.append(make("div", "warn", `${version.worker_restarts} restarts`));
    const labels = version.labels.length ? make("div", "dim", version.labels.join(", ")) : "";
    return make("tr", "", make("td", "", String(version.version), labels), state, workers);
  });
  const head = make("tr", "", ...["version", "state", "workers, memory of their own"].map((text) => make("th", "", text)));
  return [make("h3", "", "Versions and workers"), make("table", "", make("thead", "", head), make("tbody", "", ...rows))];
}

function describeText(text) {
  if (!text) return [];
  const facts = [
    ["running, waiting", `${short(text.running, "", true)}, ${short(text.waiting, "", true)} sequences`],
    ["first token", pair(text.first_p50_ms, text.first_p99_ms)],
    ["between tokens", pair(text.gap_p50_ms, text.gap_p99_ms)],
    ["prompts", `${short(text.prompt_tokens_per_s)} tokens/s`],
  ];
  const rows = facts.map(([name, value]) => make("tr", "", make("td", "dim", name), make("td", "n", value)));
  const found = [make("h3", "", "Text"), make("table", "", make("tbody", "", ...rows))];
  if (text.kv_tokens) {
    const share = text.kv_used_tokens / text.kv_tokens;
    found.push(make("div", "", make("span", "dim", "KV cache "), `${Math.round(100 * share)} % of ${short(text.kv_tokens, "", true)} tokens`));
    found.push(meter(share, share > 0.95 ? "bad" : share > 0.85 ? "warn" : ""));
  }
  return found;
}

function describeTensors([inputs, outputs, backend, most]) {
  const rows = (kind, tensors) => tensors.map((one) => make(
    "tr", "", make("td", "dim", one.optional ? `${kind}, optional` : kind), make("td", "", make("code", "", one.name)),
    make("td", "", one.datatype), make("td", "n", one.shape === null ? "any shape" : `[${one.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`),
  ));
  if (!backend) return [];
  const about = `Tensors · backend ${backend} · ${most ? `batches of up to ${most} rows` : "no batching"}`;
  return [make("h3", "", about), make("table", "", make("tbody", "", ...rows("in", inputs), ...rows("out", outputs)))];
}

function describeSizes(bars) {
  if (!bars.length) return [];
  const most = Math.max(...bars.map((bar) => bar.batches), 1);
  const drawn = bars.map((bar) => {
    const one = make("i");
    one.style.height = `${(100 * bar.batches) / most}%`;
    one.title = `${bar.batches} batches of ${bar.at_most === null ? "more" : `at most ${bar.at_most}`} rows`;
    return one;
  });
  const range = bars.length > 1 ? ` 1 to ${bars[bars.length - 1].at_most ?? "more"} rows` : " single rows";
  return [make("h3", "", "Batch sizes"), make("span", "bars", ...drawn), range];
}

function describeCauses(causes) {
  if (!causes.length) return [];
  return [make("h3", "", "Errors by cause"), make("table", "", make("tbody", "", ...causeRows(causes, false)))];
}

// A request to paste or to send ------------------------------------------------------------------

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curlOf(method, path, body) {
  return `curl -s ${quoted(location.origin + path)} -H 'Content-Type: application/json' -d ${quoted(body)}`;
}

function pythonOf(method, path, body) {
  const address = JSON.stringify(location.origin + path);
  return [
    "import urllib.request", "",
    `body = ${JSON.stringify(body)}.encode()`,
    `request = urllib.request.Request(${address}, body, {"Content-Type": "application/json"})`,
    "print(urllib.request.urlopen(request).read().decode())",
  ].join("\n");
}

// A body with as many ones as the model wants, where the server's example is without values.
function makeBody(inputs) {
  const tensors = inputs.filter((one) => !one.optional).map((one) => {
    const shape = (one.shape ?? [1]).map((size) => (size < 0 ? 1 : size));
    return { name: one.name, shape, datatype: one.datatype, data: shape.reduce((all, size) => all * size, 1) };
  });
  const whole = tensors.reduce((all, one) => all + one.data, 0);
  if (!tensors.length || whole > SENT_MOST || tensors.some((one) => ["FP16", "BF16", "INVALID"].includes(one.datatype))) return null;
  const one = (datatype) => ({ BYTES: "text", BOOL: true })[datatype] ?? 1;
  return { inputs: tensors.map((tensor) => ({ ...tensor, data: Array(tensor.data).fill(one(tensor.datatype)) })) };
}

class RequestPart {
  constructor() {
    this.element = make("section", "request");
    this.told = "";
    this.choice = make("select", "");
    this.choice.setAttribute("aria-label", "Which request");
    this.choice.addEventListener("change", () => this.choose());
    this.note = make("p", "dim");
    this.body = make("textarea", "");
    this.body.spellcheck = false;
    this.body.setAttribute("aria-label", "Body of the request");
    const copied = (make) => (one) => copy(make(this.chosen.method, this.chosen.path, this.text()), one);
    this.actions = make(
      "div", "buttons",
      pressable("send", "Send it to this server", () => this.send(this.text())),
      pressable("copy curl", "A command for a shell", copied(curlOf)),
      pressable("copy Python", "A script without any package", copied(pythonOf)),
      pressable("copy body", "The JSON alone", (one) => copy(this.text(), one)),
    );
    this.answer = make("pre", "");
    this.answer.hidden = true;
    this.controls = make("div", "buttons");
  }

  text() {
    return this.body.hidden ? this.large : this.body.value;
  }

  show(told) {
    const loaded = told.versions.some((one) => one.state === "AVAILABLE");
    const facts = JSON.stringify([told.examples, told.inputs, told.may_load, loaded]);
    if (facts === this.told) return; // what somebody has written stays
    this.told = facts;
    this.inputs = told.inputs;
    this.examples = told.examples;
    const parts = [];
    if (this.examples.length) {
      this.choice.replaceChildren(...this.examples.map((one, at) => {
        const option = make("option", "", `${one.method} ${one.path} (${one.api})`);
        option.value = String(at);
        return option;
      }));
      this.choose();
      this.choice.hidden = this.examples.length === 1;
      const title = make("h3", "", "Try it");
      if (this.choice.hidden) title.append(": ", make("code", "", `${this.chosen.method} ${this.chosen.path}`), ` (${this.chosen.api})`);
      parts.push(title, this.choice, this.note, this.body, this.actions);
    }
    if (told.may_load) {
      this.controls.replaceChildren(...controlButtons(told.model, loaded, (said) => this.say(said)));
      parts.push(make("h3", "", "Load and unload"), this.controls);
    }
    this.element.replaceChildren(...parts, this.answer);
  }

  choose() {
    this.chosen = this.examples[Number(this.choice.value || 0)];
    const body = this.chosen.body ?? (this.chosen.path.startsWith("/v2/") ? makeBody(this.inputs) : null);
    this.large = body === null ? "" : JSON.stringify(body);
    const small = this.large.length <= 20000;
    this.body.value = small && this.large.length > 400 ? JSON.stringify(body, null, 1) : small ? this.large : "";
    this.body.hidden = !small || body === null;
    this.actions.hidden = body === null;
    this.note.hidden = !this.body.hidden;
    setText(this.note, body === null
      ? "Its values are too many for JSON, or of a type that JSON has no word for: send them as binary data."
      : `A body of ${short(this.large.length, "B")}, with ones for values.`);
  }

  say(text) {
    this.answer.hidden = false;
    this.answer.textContent = text;
  }

  async send(body) {
    this.say("sent");
    const began = performance.now();
    try {
      const { method, path } = this.chosen;
      const reply = await ask(path, { method, body, headers: { "Content-Type": "application/json" }, signal: AbortSignal.timeout(120000) });
      const text = await reply.text();
      const took = short(performance.now() - began, "ms");
      const id = reply.headers.get("x-request-id");
      this.say(`${reply.status} ${reply.statusText} in ${took}${id ? `, request ${id}` : ""}\n${text.slice(0, 20000)}${text.length > 20000 ? " …" : ""}`);
    } catch (error) {
      this.say(`no answer: ${error.message ?? error}`);
    }
  }
}

function pressable(label, title, act) {
  const found = make("button", "", label);
  found.type = "button";
  found.title = title;
  found.addEventListener("click", () => act(found));
  return found;
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch (error) { // of an http page only localhost may
    const area = make("textarea", "");
    area.value = text;
    button.after(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "copied" : "cannot copy";
    area.remove();
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Loads and unloads, where clients may (V2's model control) ---------------------------------------

async function control(name, what, say) {
  say(`${what} of ${name}: waiting`);
  try {
    const path = `/v2/repository/models/${encodeURIComponent(name)}/${what}`;
    const reply = await ask(path, { method: "POST", body: "{}", headers: { "Content-Type": "application/json" }, signal: AbortSignal.timeout(600000) });
    const text = await reply.text();
    say(reply.ok ? `${what} of ${name}: done` : `${what} of ${name}: ${reply.status} ${text.slice(0, 2000)}`);
  } catch (error) {
    say(`${what} of ${name}: no answer: ${error.message ?? error}`);
  }
}

function controlButtons(name, loaded, say) {
  const load = pressable(loaded ? "load again" : "load", "Load what its folder holds now", () => control(name, "load", say));
  const unload = pressable("unload", "Its requests will fail", () => {
    if (unload.dataset.asked) {
      delete unload.dataset.asked;
      unload.textContent = "unload";
      control(name, "unload", say);
    } else {
      unload.dataset.asked = "1";
      unload.textContent = "unload: sure?";
      setTimeout(() => { delete unload.dataset.asked; unload.textContent = "unload"; }, 4000);
    }
  });
  return loaded ? [load, unload] : [load];
}

async function showRepository() {
  const say = (text) => setText(byId("repository-said"), text);
  const box = byId("repository-box");
  if (!box.open) box.showModal();
  say("asking");
  try {
    const reply = await ask("/v2/repository/index", { method: "POST", body: "{}", headers: { "Content-Type": "application/json" } });
    if (!reply.ok) throw new Error(`the server answered ${reply.status} ${(await reply.text()).slice(0, 500)}`);
    const found = new Map();
    for (const one of await reply.json()) {
      const before = found.get(one.name);
      if (!before || one.state === "READY") found.set(one.name, one);
    }
    say(`${found.size} models`);
    const told = async (text) => {
      await showRepository();
      say(text);
    };
    const rows = [...found.values()].map((one) => make(
      "tr", "", make("td", "", one.name), make("td", one.state === "READY" ? "good" : "dim", (one.state ?? "not loaded").toLowerCase()),
      make("td", "dim", one.reason ?? ""),
      make("td", "n", ...controlButtons(one.name, one.state === "READY", (text) => (text.endsWith("waiting") ? say(text) : told(text)))),
    ));
    byId("repository-list").replaceChildren(make("table", "", make("tbody", "", ...rows)));
  } catch (error) {
    say(String(error.message ?? error));
  }
}

// The list ---------------------------------------------------------------------------------------

function showModels(numbers) {
  const there = new Set();
  for (const row of numbers.models) {
    there.add(row.model);
    let model = models.get(row.model);
    if (!model) {
      model = new ModelRow(row.model);
      models.set(row.model, model);
      sortedAt = 0;
    }
    model.show(row, numbers);
  }
  for (const [name, model] of models) {
    if (!there.has(name)) {
      model.element.remove();
      models.delete(name);
    }
  }
  byId("repository").hidden = !numbers.may_load;
  arrange(false);
}

// Put rows in order, not more often than every ten seconds, nor under somebody's pointer or keys.
function arrange(now) {
  const list = byId("models");
  const busy = list.matches(":hover") || list.contains(document.activeElement) || [...models.values()].some((one) => one.details);
  if (now || sortedAt === 0 || (!busy && Date.now() - sortedAt > RESORT_MS)) {
    const sign = view.rising ? 1 : -1;
    const byName = (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true });
    const byValue = (a, b) => sign * (a.sortValue() - b.sortValue()) || byName(a, b);
    const order = [...models.values()].sort(view.sort === "model" ? (a, b) => sign * -byName(a, b) : byValue);
    order.forEach((model, at) => {
      if (list.children[at] !== model.element) list.insertBefore(model.element, list.children[at] ?? null);
    });
    sortedAt = Date.now();
  }
  filter();
}

function filter() {
  const terms = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const troubled = [...models.values()].filter((one) => one.row.trouble).length;
  let shown = 0;
  for (const model of models.values()) {
    const name = model.name.toLowerCase();
    const fits = terms.every((term) => name.includes(term)) && (!view.trouble || Boolean(model.row.trouble || model.details));
    model.element.hidden = !fits;
    shown += fits;
  }
  const all = models.size;
  setText(byId("count"), shown === all ? String(all) : `${shown} of ${all}`);
  setText(byId("trouble").querySelector("b"), String(troubled));
  byId("trouble").classList.toggle("any", troubled > 0);
  byId("trouble").setAttribute("aria-pressed", String(view.trouble));
  byId("heads").hidden = !shown;
  byId("nothing").hidden = shown > 0;
  setText(byId("nothing"), !all ? "No model is loaded." : view.trouble && !terms.length ? "No model is in trouble." : "No model has such a name.");
  document.title = troubled ? `(${troubled}) fastserve` : "fastserve";
}

function showOrder() {
  for (const button of byId("heads").querySelectorAll("button")) {
    const chosen = button.dataset.sort === view.sort;
    if (chosen) button.setAttribute("aria-sort", (view.sort === "model") !== view.rising ? "ascending" : "descending");
    else button.removeAttribute("aria-sort");
  }
}

// Unfolded models stand in the address, so that a page can be sent to somebody.
function rememberOpen() {
  const open = [...models.values()].filter((one) => one.details).map((one) => encodeURIComponent(one.name));
  history.replaceState(null, "", open.length ? `#${open.join("&")}` : location.pathname + location.search);
}

function unfoldRemembered() {
  for (const part of location.hash.slice(1).split("&").filter(Boolean)) {
    let name;
    try {
      name = decodeURIComponent(part);
    } catch (error) { // an address that somebody cut off
      continue;
    }
    models.get(name)?.toggle(true);
  }
}

// Asking -----------------------------------------------------------------------------------------

// Behind one port there may be several processes, each with a history of its own of the same counters; a server
// that began again has a new one. They are asked for the last points, which follow those there are, unless it is
// too long ago: then for all.
function follow(all, before, at, told) {
  if (!before || before === told.history) return true;
  const [count, fresh] = [told.next_point - told.first_point, Math.round((told.at - at) / interval)];
  if (fresh > Math.max(count, 1)) return false;
  for (const points of all) points.renumber(told.first_point, count, fresh);
  return true;
}

function take(numbers) {
  const all = [server, ...[...models.values()].map((model) => model.points)];
  if (!follow(all, known, answered?.at ?? 0, numbers)) {
    known = "";
    for (const points of all) Object.assign(points, new Points());
    return false;
  }
  if (numbers.next_point !== server.next || !known) movedAt = Date.now();
  const first = known === "";
  known = numbers.history;
  interval = numbers.interval_s;
  server.add(numbers.points, numbers.first_point, numbers.next_point);
  answered = numbers;
  answeredAt = Date.now();
  fault = "";
  showServer(numbers);
  showTiles(numbers);
  showModels(numbers);
  showDevices(numbers);
  showCauses(numbers);
  if (first) unfoldRemembered();
  for (const model of models.values()) model.details?.refresh();
  return true;
}

async function refresh() {
  let wait = 1000 * interval;
  try {
    if (!take(await askJson(`/console/rows?after=${server.next}&history=${known}`))) wait = 0;
  } catch (error) {
    fault = String(error.message ?? error);
  }
  showStale();
  timer = setTimeout(refresh, wait);
}

let timer = 0;

// Figures that are old look old.
function showStale() {
  const late = 1000 * (3 * interval + 1);
  const [silent, still] = [Date.now() - answeredAt, Date.now() - movedAt];
  const stale = answered !== null && (silent > late || still > 2 * late);
  document.body.classList.toggle("stale", stale);
  byId("stale").hidden = !stale;
  if (stale) {
    const why = silent > late ? `No answer for ${lasting(silent / 1000)}${fault ? ` (${fault})` : ""}` : `No new sample for ${lasting(still / 1000)}: the server is too busy`;
    setText(byId("stale"), `${why}. These figures are of ${clock(answered.at)}.`);
  }
  if (fault && (stale || !answered)) {
    setText(byId("state"), "no answer");
    byId("state").className = "pill warn";
    setText(byId("reason"), answered ? "" : fault);
  }
}

setInterval(showStale, 1000);

document.addEventListener("visibilitychange", () => { // a page that nobody sees asks nothing
  clearTimeout(timer);
  if (!document.hidden) refresh();
});

// Choices and keys -------------------------------------------------------------------------------

function remember(name, value) {
  try {
    localStorage.setItem(`fastserve.${name}`, value);
  } catch (error) { /* a browser that keeps nothing: the choice holds for this page */ }
}

function remembered(name) {
  try {
    return localStorage.getItem(`fastserve.${name}`);
  } catch (error) {
    return null;
  }
}

function setMinutes(minutes) {
  view.minutes = minutes;
  remember("minutes", minutes);
  for (const one of [2, 10]) byId(`minutes-${one}`).setAttribute("aria-pressed", String(one === minutes));
  if (!answered) return;
  showTiles(answered);
  const nothingNew = { ...answered, first_point: server.next, next_point: server.next };
  for (const model of models.values()) {
    model.show({ ...model.row, points: Object.fromEntries(Object.keys(model.points.series).map((name) => [name, []])) }, nothingNew);
    model.details?.refresh();
  }
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme"), theme);
  remember("theme", theme);
}

function setTrouble(on) {
  view.trouble = on;
  filter();
}

function setSort(sort) {
  view.rising = view.sort === sort ? !view.rising : false;
  view.sort = sort;
  showOrder();
  arrange(true);
}

function step(by) {
  const rows = [...byId("models").querySelectorAll(".model:not([hidden]) > .row")];
  const at = rows.findIndex((row) => row.parentElement.contains(document.activeElement));
  const next = rows[Math.min(Math.max(at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by, 0), rows.length - 1)];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function escape() {
  if (view.search) {
    byId("search").value = view.search = "";
    filter();
  } else for (const model of models.values()) model.toggle(false);
  if (document.activeElement === byId("search")) byId("search").blur();
}

const KEYS = {
  "/": () => byId("search").focus(),
  j: () => step(1),
  k: () => step(-1),
  t: () => setTrouble(!view.trouble),
  w: () => setMinutes(view.minutes === 10 ? 2 : 10),
  d: () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]),
  "?": () => byId("help-box").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return escape();
  if (event.target.matches("input, textarea")) {
    if (event.target === byId("search") && (event.key === "Enter" || event.key === "ArrowDown")) {
      event.preventDefault(); // else the same key unfolds the model that it has come to
      step(1);
    }
    return;
  }
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

byId("search").addEventListener("input", (event) => {
  view.search = event.target.value;
  filter();
});
byId("trouble").addEventListener("click", () => setTrouble(!view.trouble));
byId("minutes-2").addEventListener("click", () => setMinutes(2));
byId("minutes-10").addEventListener("click", () => setMinutes(10));
byId("theme").addEventListener("click", KEYS.d);
byId("help").addEventListener("click", KEYS["?"]);
byId("repository").addEventListener("click", showRepository);
for (const button of byId("heads").querySelectorAll("button")) button.addEventListener("click", () => setSort(button.dataset.sort));
for (const button of document.querySelectorAll("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close());

setTheme(THEMES.includes(remembered("theme")) ? remembered("theme") : "auto");
setMinutes(remembered("minutes") === "2" ? 2 : 10);
showOrder();
refresh();
