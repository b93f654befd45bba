// Makes elements, texts of figures, and plots. Nothing here knows the server.
"use strict";

const KEEP = 300; // points of a series; the server keeps as many
const NARROWEST = 60; // points over the whole width of a plot while the server is young

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

// A pair of percentiles with one unit, the one that suits the larger.
function pair(p50, p99) {
  if (p50 === null || p50 === undefined) return "–";
  const seconds = Math.max(p50, p99) >= 10000;
  const [a, b] = [p50, p99].map((value) => short(seconds ? value / 1000 : value));
  return `${a} / ${b} ${seconds ? "s" : "ms"}`;
}

function explainPair(p50, p99) {
  if (p50 === null || p50 === undefined) return "no request in the last ten seconds";
  return `half of the requests took at most ${short(p50, "ms")}, 99 of 100 at most ${short(p99, "ms")}`;
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

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });
}

// Points ------------------------------------------------------------------------------------------

// Series by name, whose last points have number `next` - 1. A series may begin later than others.
class Points {
  constructor() {
    this.next = 0;
    this.series = {};
  }

  // Take over points from number `first` to `next` - 1.
  add(points, first, next) {
    const overlap = Math.max(this.next - first, 0);
    const old = first <= this.next ? this.series : {};
    this.series = {};
    for (const [name, values] of Object.entries(points)) {
      const before = old[name] ?? [];
      this.series[name] = [...before.slice(0, Math.max(before.length - overlap, 0)), ...values].slice(-KEEP);
    }
    this.next = next;
  }

  // Number the points as another process does, which has `count` points from `first` on of which `fresh` are new.
  // It counts the same, so the old ones stay.
  renumber(first, count, fresh) {
    this.next = first + count - Math.min(fresh, count);
  }

  last(name, count) {
    return (this.series[name] ?? []).slice(-count);
  }
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}

// Plots -------------------------------------------------------------------------------------------

function draw(tag, attributes, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

// The newest point is at the right edge; where nothing was counted the line has a gap.
function line(values, width, top, height = 40) {
  let path = "";
  let gap = true;
  values.forEach((value, i) => {
    if (value === null) {
      gap = true;
      return;
    }
    const x = width - values.length + i;
    const y = (height - ((height - 2) * value) / top).toFixed(1);
    path += gap ? `M${x} ${y}h0` : `L${x} ${y}`; // h0: a point between two gaps is a dot
    gap = false;
  });
  return path;
}

function area(values, width, top, height = 40) {
  if (!values.length || values.includes(null)) return "";
  return `${line(values, width, top, height)}V${height}H${width - values.length}Z`;
}

function peakOf(lines) {
  return lines.flat().reduce((most, value) => (value !== null && value > most ? value : most), 0);
}

// The mean of every few points, so that a small plot of ten minutes is not a saw.
function thin(values, most) {
  const by = Math.ceil(values.length / most);
  if (by <= 1) return values;
  const found = [];
  for (let end = values.length; end > 0; end -= by) {
    const part = values.slice(Math.max(end - by, 0), end);
    found.unshift(sum(part) / part.length);
  }
  return found;
}

function widthOf(lines, count) {
  return Math.min(count, Math.max(NARROWEST, ...lines.map((values) => values.length)));
}

// A plot with a title, the value of now, and what the pointer is at.
function plot(title, now, lines, count, interval, kinds = ["a", "b"], unit = "", whole = false) {
  const width = widthOf(lines, count);
  const peak = peakOf(lines);
  const top = peak || 1;
  const svg = draw("svg", { viewBox: `0 0 ${width - 1} 40`, preserveAspectRatio: "none", role: "img" });
  const minutes = Math.round((width * interval) / 60);
  svg.setAttribute("aria-label", `${title}: the last ${minutes} minutes, peak ${short(peak, unit, whole)}`);
  for (const y of [2, 21, 40]) svg.append(draw("path", { class: "grid", d: `M0 ${y}H${width - 1}` }));
  if (lines.length === 1) svg.append(draw("path", { class: `under ${kinds[0]}`, d: area(lines[0], width, top) }));
  lines.forEach((values, i) => svg.append(draw("path", { class: `line ${kinds[i]}`, d: line(values, width, top) })));
  const highest = make("span", "", `↑ ${peak ? short(peak, unit, whole) : "–"}`);
  highest.title = "the highest of these minutes";
  const tip = make("span", "tip");
  tip.hidden = true;
  const cursor = draw("path", { class: "cursor", d: "" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = Math.round(((event.clientX - box.left) / box.width) * (width - 1));
    const values = lines.map((one) => one[x - (width - one.length)] ?? null);
    if (values.every((value) => value === null)) return;
    tip.textContent = `${values.map((value) => short(value, "", whole)).join(" / ")} ${unit} · ${lasting((width - 1 - x) * interval)} ago`;
    tip.hidden = false;
    cursor.setAttribute("d", `M${x} 0V40`);
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.setAttribute("d", "");
  });
  const caption = make("figcaption", "", make("div", "", title, highest), make("div", "", now, tip));
  return make("figure", "plot", caption, svg);
}

// Two paths that rows keep: requests, and the errors among them.
class Sparkline {
  constructor() {
    this.requests = draw("path", { class: "line a", d: "" });
    this.under = draw("path", { class: "under a", d: "" });
    this.errors = draw("path", { class: "errors", d: "" });
    this.svg = draw("svg", { class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" }, this.under, this.errors, this.requests);
  }

  show(requests, errors, count) {
    const all = widthOf([requests], count);
    const width = Math.min(all, 60);
    const full = [requests, errors].map((values) => [...Array(Math.max(all - values.length, 0)).fill(0), ...values]);
    const [a, b] = full.map((values) => thin(values, width));
    const top = peakOf([a]) || 1;
    this.svg.setAttribute("viewBox", `0 0 ${width - 1} 20`);
    this.requests.setAttribute("d", line(a, width, top, 20));
    this.under.setAttribute("d", area(a, width, top, 20));
    this.errors.setAttribute("d", peakOf([b]) ? area(b, width, top, 20) : "");
  }
}

function meter(share, kind = "") {
  const inner = make("i", kind);
  inner.style.width = `${Math.min(100, 100 * (share ?? 0)).toFixed(1)}%`;
  return make("div", "meter", inner);
}

function pill(text, kind) {
  return make("span", `pill ${kind}`, text);
}
