"use strict";
// Draws the pictures of the page from the report, which is in this file: JSON, compressed, in base64. The tables of steps and of
// bytes are in the page already. All text of the report becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";
const NUMBER = new Intl.NumberFormat("en-US");
const MAX_ROWS = 2000; // of a table; more would make the page slow
const MAX_SPANS = 6000;

function put(parent, ...children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) parent.append(child);
  }
  return parent;
}

function make(tag, attributes = {}, ...children) {
  return put(dressed(document.createElement(tag), attributes), ...children);
}

function draw(tag, attributes = {}, ...children) {
  return put(dressed(document.createElementNS(SVG, tag), attributes), ...children);
}

function dressed(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

const at = (id) => document.getElementById(id);

function sized(bytes) {
  let unit = 0;
  while (bytes >= 1000 && unit < 4) {
    bytes /= 1000;
    unit += 1;
  }
  return `${bytes.toFixed(unit ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][unit]}`;
}

function timed(seconds) {
  for (const [unit, least] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    if (seconds >= least) return `${(seconds / least).toPrecision(3)} ${unit}`;
  }
  return `${(seconds * 1e9).toFixed(0)} ns`;
}

const percent = (part) => `${(100 * part).toFixed(1)}%`;

// -- the report, and questions about it

let report; // the report
let steps; // of a run and of its commit: profiles number these
let writers; // buffer -> numbers of the steps that write it
let chosen = -1; // number of the step that is shown

async function read() {
  const packed = Uint8Array.from(atob(at("report").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function nodeText(number) {
  const node = report.graph.nodes[number];
  const label = node.name ? `'${node.name}' = ` : "";
  return `${label}${node.op} ${node.shapes.join(", ")}${node.source ? ` at ${node.source}` : ""}`;
}

const shapeText = (b) => `${b.dtype}[${b.dims.join(",")}]`;

function bufferText(b) {
  const end = lastMoment();
  const life = b.first === null ? "" : `; live from ${b.first < 0 ? "before the run" : whenText(b.first)} ${b.last >= end ? "until the next run" : `to ${whenText(b.last)}`}`;
  const place = b.offset === null ? "" : ` at offset ${NUMBER.format(b.offset)}`;
  const from = b.node === null ? "" : `; ${nodeText(b.node)}`;
  return `${b.region} ${b.name}: ${shapeText(b)}, ${NUMBER.format(b.bytes)} bytes${place}${life}${from}`;
}

const lastMoment = () => 1 + Math.max(-1, ...steps.map((s) => s.moment));

function whenText(moment) {
  const here = steps.flatMap((s, n) => (s.moment === moment ? [n] : []));
  return here.length > 1 ? `steps ${here[0]} to ${here[here.length - 1]}` : `step ${here.length ? here[0] : moment}`;
}

const timeOf = (n) => (report.profile ? report.profile.steps[n].seconds : 0);

// -- pictures that keys move through

// A picture whose boxes have details: on hover, on a click, and by arrow keys. `tell` receives the index, or -1.
function explorable(svg, boxes, tell, act) {
  let now = -1;
  const choose = (index) => {
    if (now >= 0) boxes[now].classList.remove("chosen");
    now = index;
    if (now >= 0) boxes[now].classList.add("chosen");
    tell(now);
  };
  boxes.forEach((box, index) => {
    box.addEventListener("pointerenter", () => choose(index));
    box.addEventListener("click", () => {
      choose(index);
      if (act) act(index);
    });
  });
  dressed(svg, {
    tabindex: 0,
    focus: () => choose(Math.max(now, 0)),
    keydown: (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -boxes.length, End: boxes.length }[event.key];
      if (by !== undefined && boxes.length) {
        choose(Math.min(Math.max(now + by, 0), boxes.length - 1));
        event.preventDefault();
      } else if (event.key === "Enter" && act && now >= 0) act(now);
    },
  });
  return svg;
}

function legend(entries) {
  const list = make("ul", { class: "legend" });
  for (const [kind, text] of entries) {
    put(list, make("li", {}, draw("svg", { viewBox: "0 0 10 10", "aria-hidden": true }, draw("rect", { width: 10, height: 10, class: kind })), text));
  }
  return list;
}

// Round numbers from 0 to `most`, some four of them.
function ticks(most, count = 4) {
  if (!(most > 0)) return [0];
  const raw = most / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= raw);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, n) => n * step);
}

// -- memory

function drawArena() {
  const planned = report.buffers.filter((b) => b.offset !== null && b.first <= b.last && b.bytes > 0);
  planned.sort((a, b) => a.first - b.first || a.offset - b.offset);
  const room = at("arena");
  const size = report.memory.arena.bytes;
  if (!planned.length) {
    put(room, make("p", { class: "hint" }, "The arena is empty."));
    return;
  }
  const width = Math.max(room.clientWidth - 14, 240);
  const height = width < 500 ? 260 : 340;
  const [left, bottom, top] = [66, 34, 18];
  const end = lastMoment();
  const x = (moment) => left + ((moment + 1) / (end + 1)) * (width - left - 6);
  const y = (bytes) => height - bottom - (bytes / size) * (height - bottom - top);
  const peak = report.memory.arena.peak;
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "application", "aria-roledescription": "map of buffers",
    "aria-label": `${planned.length} buffers in an arena of ${sized(size)}. Peak: ${sized(peak.bytes)}. Arrow keys move between buffers.`,
    "aria-describedby": "arena-detail",
  });
  for (const bytes of ticks(size)) {
    put(svg, draw("path", { class: "axis", d: `M${left} ${y(bytes)}H${width - 6}` }), draw("text", { x: left - 6, y: y(bytes) + 4, "text-anchor": "end" }, sized(bytes)));
  }
  const boxes = planned.map((b) => {
    const last = Math.min(b.last, end - 1) + 1;
    const tall = y(b.offset) - y(b.offset + b.bytes);
    return draw("rect", {
      class: `box region-${b.region}${tall < 4 ? " thin" : ""}`, x: x(b.first), width: Math.max(x(last) - x(b.first), 1.5),
      y: y(b.offset + b.bytes), height: Math.max(tall, 2),
    });
  });
  put(svg, boxes);
  const middle = (x(peak.moment) + x(peak.moment + 1)) / 2;
  const right = middle > width / 2;
  put(
    svg, draw("path", { class: "peak", d: `M${middle} ${top - 2}V${height - bottom}` }),
    draw("text", { class: "peak", x: middle + (right ? -5 : 5), y: 12, "text-anchor": right ? "end" : "start" }, `peak ${sized(peak.bytes)}`),
  );
  for (const moment of ticks(end - 1, width < 500 ? 4 : 8).filter(Number.isInteger)) {
    const here = steps.findIndex((s) => s.moment === moment);
    put(svg, draw("text", { x: (x(moment) + x(moment + 1)) / 2, y: height - bottom + 16, "text-anchor": "middle" }, String(here < 0 ? moment : here)));
  }
  put(svg, draw("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "step"));
  const rest = "Point at a box, or press an arrow key, for the buffer behind it.";
  const tell = (index) => at("arena-detail").replaceChildren(index < 0 ? rest : bufferText(planned[index]));
  room.replaceChildren(
    explorable(svg, boxes, tell, (index) => show((writers.get(planned[index].id) || [-1])[0])),
    legend([["region-input", "input"], ["region-arena", "between steps"], ["region-output", "output"]]),
  );
  tell(-1);
}

const PURPOSES = { param: "params", prepared: "prepared weights", constant: "constants", handle: "handles" };

function listLasting() {
  const room = at("lasting");
  for (const [region, title] of Object.entries(PURPOSES)) {
    const here = report.buffers.filter((b) => b.region === region && b.present && b.bytes).sort((a, b) => b.bytes - a.bytes);
    if (!here.length) continue;
    const total = here.reduce((sum, b) => sum + b.bytes, 0);
    const body = make("tbody");
    for (const b of here.slice(0, MAX_ROWS)) {
      const name = region === "prepared" ? preparedName(b) : b.name;
      put(body, make("tr", {}, make("td", { class: "name" }, name, make("br"), make("span", { class: "soft" }, shapeText(b))), make("td", { class: "number" }, NUMBER.format(b.bytes))));
    }
    const table = make("table", {}, make("caption", { class: "unseen" }, title), body);
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title, style: null }, table);
    scroll.style.maxHeight = "260px";
    put(room, make("details", {}, make("summary", {}, `${title}: ${here.length}, `, make("span", { class: "soft" }, `${NUMBER.format(total)} bytes`)), scroll));
  }
}

// Prepared weights have names made of digests: show the params that they come from.
function preparedName(b) {
  const found = new Set();
  const visit = (id) => {
    for (const step of report.steps.filter((s) => s.phase === "prepare" && s.writes.includes(id))) {
      for (const other of step.reads) {
        const from = report.buffers[other];
        if (from.region === "param") found.add(from.name);
        else if (other !== id && from.region === "prepared") visit(other);
      }
    }
  };
  visit(b.id);
  return [...found].join(", ") || b.name;
}

function listBuffers() {
  const details = at("buffers");
  details.addEventListener("toggle", () => {
    const room = details.querySelector(".scroll");
    if (!details.open || room.childElementCount) return;
    const rows = report.buffers.filter((b) => b.present).map((b) => {
      const from = b.node === null ? null : report.graph.nodes[b.node];
      return [[b.region], [b.name, "name"], [shapeText(b)], [b.bytes, "number"], [b.offset ?? "", "number"], [b.first ?? "", "number"], [b.last ?? "", "number"], [from ? `${from.op} ${from.source || ""}` : "", "lines"]];
    });
    const heads = [["region"], ["name"], ["shape"], ["bytes", "number"], ["offset", "number"], ["from", "number"], ["to", "number"], ["made from"]];
    put(room, tableOf("Buffers", heads, rows));
  });
}

// `heads`: [title, class]; `rows`: cells as [text or number or element, class].
function tableOf(caption, heads, rows) {
  const head = make("tr", {}, heads.map(([title, kind]) => make("th", { scope: "col", class: kind }, title)));
  const body = make("tbody");
  for (const row of rows.slice(0, MAX_ROWS)) {
    put(body, make("tr", {}, row.map(([value, kind]) => {
      const cell = make("td", { class: kind }, typeof value === "number" ? NUMBER.format(value) : value);
      if (typeof value === "number") cell.dataset.order = value;
      return cell;
    })));
  }
  const table = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, head), body);
  if (rows.length > MAX_ROWS) put(body, make("tr", {}, make("td", { colspan: heads.length }, `and ${rows.length - MAX_ROWS} more`)));
  sortable(table);
  return table;
}

// Buttons in the heads sort the rows of the body; numbers from data-order, else by text.
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : numeric && column > 0;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        if (!cell) return "";
        return numeric ? Number(cell.dataset.order ?? -1) : cell.textContent;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [p, q] = [key(a), key(b)];
        return (p < q ? -1 : p > q ? 1 : 0) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// -- time

function enhanceSteps() {
  const table = at("steps");
  for (const row of table.tBodies[0].rows) {
    const number = Number(row.dataset.step);
    const cell = row.cells[1];
    cell.replaceChildren(make("button", { type: "button", class: "link", click: () => show(number, true) }, cell.textContent));
    if (report.profile) {
      const bar = make("span", { class: "share", "aria-hidden": true });
      bar.style.width = `${Math.min(60, 60 * (timeOf(number) / Math.max(...report.profile.steps.map((s) => s.seconds), 1e-12)))}px`;
      put(row.cells[2], " ", bar);
    }
  }
  sortable(table);
}

function colours() {
  const kernels = [...new Set(steps.map((s) => s.kernel))];
  const spent = new Map(kernels.map((k) => [k, steps.reduce((sum, s, n) => sum + (s.kernel === k ? timeOf(n) : 0), 0)]));
  kernels.sort((a, b) => spent.get(b) - spent.get(a));
  return new Map(kernels.map((k, n) => [k, `c${Math.min(n, 7)}`]));
}

function drawTimeline(colour) {
  const { nanoseconds, spans } = report.profile.timeline;
  const room = make("div", { class: "picture" });
  const around = make("div", {}, make("h3", {}, "One run on its threads"), room);
  put(at("time-pictures"), around);
  const width = Math.max(room.clientWidth - 14, 240);
  const threads = 1 + Math.max(0, ...spans.map((s) => s[1]));
  const rowHeight = threads > 16 ? 12 : 26;
  const height = threads * rowHeight + 40;
  const x = (t) => 66 + (t / nanoseconds) * (width - 100);
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "application", "aria-roledescription": "timeline", "aria-describedby": "time-detail",
    "aria-label": `A run of ${timed(nanoseconds / 1e9)} on ${threads} threads. Arrow keys move between steps.`,
  });
  for (const t of ticks(nanoseconds, 3)) {
    put(svg, draw("path", { class: "axis", d: `M${x(t)} 0V${height - 34}` }), draw("text", { x: x(t), y: height - 18, "text-anchor": "middle" }, timed(t / 1e9)));
  }
  for (let thread = 0; thread < threads; thread += 1) {
    if (threads <= 16 || thread % 8 === 0) put(svg, draw("text", { x: 60, y: thread * rowHeight + rowHeight / 2 + 6, "text-anchor": "end" }, `thread ${thread}`));
  }
  const merged = [];
  for (const [step, thread, begin, end] of [...spans].sort((a, b) => a[1] - b[1] || a[2] - b[2])) {
    const last = merged[merged.length - 1];
    if (last && last[0] === step && last[1] === thread && begin - last[3] < nanoseconds / 2000) last[3] = end;
    else merged.push([step, thread, begin, end]);
  }
  merged.sort((a, b) => a[2] - b[2]);
  const shown = merged.slice(0, MAX_SPANS);
  const boxes = shown.map(([step, thread, begin, end]) =>
    draw("rect", { class: `box ${colour.get(steps[step].kernel)}`, x: x(begin), width: Math.max(x(end) - x(begin), 0.8), y: thread * rowHeight + 2, height: rowHeight - 4 }));
  put(svg, boxes);
  const tell = (index) => {
    if (index < 0) return;
    const [step, thread, begin, end] = shown[index];
    at("time-detail").replaceChildren(`step ${step}, ${steps[step].kernel}, thread ${thread}: ${timed((end - begin) / 1e9)} from ${timed(begin / 1e9)} on`);
  };
  put(room, explorable(svg, boxes, tell, (index) => show(shown[index][0], true)));
  put(around, legend([...colour].slice(0, 7).map(([kernel, kind]) => [kind, kernel])));
}

function drawRoofline(colour) {
  const roof = report.profile.roofline;
  if (!roof) return;
  const points = steps.map((s, n) => ({ n, s, seconds: timeOf(n) })).filter(({ s, seconds }) => s.cost.flops && s.cost.least_bytes && seconds > 0)
    .map(({ n, s, seconds }) => ({ n, s, intensity: s.cost.flops / s.cost.least_bytes, rate: s.cost.flops / seconds }));
  if (!points.length) return;
  const room = make("div", { class: "picture" });
  put(at("time-pictures"), make("div", {}, make("h3", {}, "Steps below the roofline"), room));
  const width = Math.max(room.clientWidth - 14, 240);
  const [height, left, bottom, top] = [250, 52, 38, 12];
  const peak = roof.operations.f32;
  const log = Math.log10;
  const low = [Math.min(0, ...points.map((p) => log(p.intensity))) - 0.2, Math.min(...points.map((p) => log(p.rate))) - 0.3];
  const high = [Math.max(2, ...points.map((p) => log(p.intensity))) + 0.2, Math.max(log(peak), ...points.map((p) => log(p.rate))) + 0.15];
  const x = (v) => left + ((log(v) - low[0]) / (high[0] - low[0])) * (width - left - 8);
  const y = (v) => height - bottom - ((log(v) - low[1]) / (high[1] - low[1])) * (height - bottom - top);
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "application", "aria-roledescription": "scatter plot", "aria-describedby": "time-detail",
    "aria-label": `Arithmetic per byte and rate of ${points.length} steps, below the rates of the machine. Arrow keys move between steps.`,
  });
  for (let power = Math.ceil(low[1]); power <= high[1]; power += 1) {
    put(svg, draw("path", { class: "axis", d: `M${left} ${y(10 ** power)}H${width - 8}` }), draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, rateText(10 ** power)));
  }
  for (let power = Math.ceil(low[0]); power <= high[0]; power += 1) {
    put(svg, draw("text", { x: x(10 ** power), y: height - bottom + 16, "text-anchor": "middle" }, power < 0 ? (10 ** power).toFixed(-power) : String(10 ** power)));
  }
  put(svg, draw("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "FLOP per byte"));
  for (const [, rate] of [roof.reading[0], roof.reading[roof.reading.length - 1]]) {
    const knee = Math.min(Math.max(peak / rate, 10 ** low[0]), 10 ** high[0]);
    const start = Math.max(10 ** low[0], 10 ** low[1] / rate);
    put(svg, draw("path", { class: "roof", d: `M${x(start)} ${y(Math.min(rate * start, peak))}L${x(knee)} ${y(Math.min(rate * knee, peak))}H${width - 8}` }));
  }
  const boxes = points.map(({ s, intensity, rate }) => draw("circle", { class: `box ${colour.get(s.kernel)}`, cx: x(intensity), cy: y(rate), r: 6 }));
  put(svg, boxes);
  const tell = (index) => {
    if (index < 0) return;
    const { n, s, intensity, rate } = points[index];
    const share = report.profile.steps[n].share;
    at("time-detail").replaceChildren(`step ${n}, ${s.kernel}: ${rateText(rate)}FLOP/s at ${intensity.toPrecision(3)} FLOP per byte; ${share === null ? "" : `${percent(share)} of the roofline (${report.profile.steps[n].bound})`}`);
  };
  put(room, explorable(svg, boxes, tell, (index) => show(points[index].n, true)));
  put(room.parentElement, make("p", { class: "hint" }, "Lines: arithmetic in f32, with operands from the nearest cache (upper) and from memory (lower)."));
}

function rateText(rate) {
  const power = Math.min(Math.max(Math.floor(Math.log10(rate) / 3), 0), 4);
  return `${Number((rate / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T"][power]}`;
}

// -- the graph: blocks of kernels, and the nodes of one kernel

// Rows with arcs from the row that makes something to the rows that use it. `edges`: [from, to]; `row(n)`: the elements of a row.
function arcs(count, edges, row, label) {
  const tall = 34;
  const spread = Math.max(1, ...edges.map(([a, b]) => b - a));
  const wide = Math.min(90, 24 + 8 * Math.min(spread, 8));
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${count * tall}`, "aria-hidden": true });
  svg.style.width = `${wide}px`;
  svg.style.height = `${count * tall}px`;
  const y = (n) => n * tall + tall / 2;
  const lines = edges.map(([from, to]) => {
    const out = wide - 8 - Math.min(wide - 14, 10 + (wide - 24) * ((to - from) / spread) ** 0.7);
    return draw("path", { class: "arc", d: `M${wide - 6} ${y(from)}C${out} ${y(from)} ${out} ${y(to)} ${wide - 6} ${y(to)}` });
  });
  put(svg, lines, Array.from({ length: count }, (_, n) => draw("circle", { cx: wide - 5, cy: y(n), r: 3.5, class: "c0" })));
  const list = make("ol");
  for (let n = 0; n < count; n += 1) {
    const mark = (on) => lines.forEach((line, e) => line.classList.toggle("near", on && edges[e].includes(n)));
    put(list, make("li", { pointerenter: () => mark(true), pointerleave: () => mark(false), focusin: () => mark(true), focusout: () => mark(false) }, row(n)));
  }
  return make("div", { class: "steps-of", role: "region", tabindex: 0, "aria-label": label }, svg, list);
}

function drawBlocks() {
  const room = at("blocks");
  const run = report.profile ? report.profile.seconds : 0;
  report.blocks.forEach((block, number) => {
    const seconds = block.steps.reduce((sum, n) => sum + timeOf(n), 0);
    const moved = block.steps.reduce((sum, n) => sum + steps[n].cost.least_bytes, 0);
    const note = `${block.steps.length} step${block.steps.length > 1 ? "s" : ""}, ${run ? `${timed(seconds)}, ${percent(seconds / run)}, ` : ""}${sized(moved)}`;
    const details = make("details", { class: "block", open: number === 0 }, make("summary", {}, make("strong", {}, block.name), " ", make("span", { class: "soft" }, note)));
    put(room, details);
    const fill = () => {
      if (!details.open || details.childElementCount > 1) return;
      const inside = new Map(block.steps.map((n, place) => [n, place]));
      const edges = [];
      for (const [place, n] of block.steps.entries()) {
        for (const id of steps[n].reads) {
          const from = (writers.get(id) || []).filter((w) => w < n && inside.has(w)).pop();
          if (from !== undefined) edges.push([inside.get(from), place]);
        }
      }
      put(details, arcs(block.steps.length, edges, (place) => stepRow(block.steps[place]), `Kernels of ${block.name}`), outside(block, inside));
    };
    details.addEventListener("toggle", fill);
    fill();
  });
}

function stepRow(n) {
  const step = steps[n];
  const time = report.profile ? timed(timeOf(n)) : "";
  const why = step.why || step.members.some((m) => m.why) ? "refusals" : "";
  return [make("button", { type: "button", class: "link", click: () => show(n, true) }, `${n} ${step.kernel}`), make("span", { class: "soft" }, [time, `${step.members.length} node${step.members.length > 1 ? "s" : ""}`, why].filter(Boolean).join(", "))];
}

// What the steps of a block read from steps of other blocks.
function outside(block, inside) {
  const found = new Set();
  for (const n of block.steps) {
    for (const id of steps[n].reads) {
      for (const w of writers.get(id) || []) if (!inside.has(w) && w < n) found.add(w);
    }
  }
  return found.size ? make("p", { class: "hint" }, `Reads results of steps ${[...found].sort((a, b) => a - b).join(", ")}.`) : null;
}

// Shows step `n` in its section; `go`: moves there.
function show(n, go = false) {
  if (n < 0) return;
  chosen = n;
  for (const row of at("steps").tBodies[0].rows) row.classList.toggle("chosen", Number(row.dataset.step) === n);
  const step = steps[n];
  const room = at("step-view");
  const pick = make("select", { "aria-label": "Step", change: (event) => show(Number(event.target.value)) }, steps.map((s, m) => make("option", { value: m, selected: m === n }, `${m} ${s.kernel}`)));
  const move = (by, text) => make("button", { type: "button", disabled: !steps[n + by], click: () => { show(n + by); } }, text);
  const facts = make("ul", { class: "facts" });
  if (report.profile) {
    const time = report.profile.steps[n];
    put(facts, make("li", {}, `${timed(time.seconds)}, ${percent(time.seconds / report.profile.seconds)} of the measured run${time.share === null ? "" : `, ${percent(time.share)} of the roofline (${time.bound})`}`));
  }
  const cost = step.cost;
  put(facts, make("li", {}, `${NUMBER.format(cost.read_bytes)} bytes read, ${NUMBER.format(cost.written_bytes)} written; each operand and result once: ${NUMBER.format(cost.least_bytes)}; ${cost.flops === null ? "operations unknown" : `${NUMBER.format(cost.flops)} FLOP`}`));
  for (const [verb, ids] of [["reads", step.reads], ["writes", step.writes]]) {
    put(facts, make("li", {}, `${verb} `, ids.map((id, i) => `${i ? "; " : ""}${report.buffers[id].region} ${report.buffers[id].region === "prepared" ? preparedName(report.buffers[id]) : report.buffers[id].name} ${shapeText(report.buffers[id])}`).join("") || "nothing"));
  }
  if (step.why) put(facts, make("li", {}, make("strong", {}, "Own kernel: "), step.why));
  const edges = step.members.flatMap((m, to) => m.inputs.map((from) => [from, to])).filter(([a, b]) => a < b);
  room.replaceChildren(
    make("div", { class: "bar-row" }, move(-1, "Previous"), pick, move(1, "Next")), facts, make("h3", {}, `Nodes of this kernel (${step.members.length})`),
    arcs(step.members.length, edges, (place) => memberRow(step.members[place]), "Nodes of this kernel"), codeView(report.kernels[step.kernel]),
  );
  if (go) {
    at("step").scrollIntoView();
    pick.focus({ preventScroll: true });
  }
}

const FORMS = { full: "", row: "one per row", dropped: "one per row", viewed: "through a view", absorbed: "computed where it is read" };

function memberRow(member) {
  const notes = [FORMS[member.form], member.node === null ? "" : `from ${nodeText(member.node)}`, member.why && `no kernel of its own: ${member.why}`].filter(Boolean);
  return [make("span", {}, make("strong", {}, member.op), ` ${member.shapes.join(", ")}`), make("span", { class: "soft", title: notes.join("; ") }, notes.join("; "))];
}

// Tabs of the texts of one kernel.
function codeView(kernel) {
  const kinds = [["text", "Kernel"], ["code", "Generated code"], ["assembly", "Assembly"]].filter(([kind]) => kernel[kind]);
  const panel = make("pre", { role: "tabpanel", tabindex: 0, "aria-label": "Text of the kernel" });
  const tabs = kinds.map(([kind, title]) => make("button", { type: "button", role: "tab", click: () => choose(kind) }, title));
  const choose = (kind) => {
    panel.textContent = report.texts[kernel[kind]];
    tabs.forEach((tab, n) => {
      tab.setAttribute("aria-selected", String(kinds[n][0] === kind));
      tab.tabIndex = kinds[n][0] === kind ? 0 : -1;
    });
  };
  const list = make("div", {
    class: "bar-row", role: "tablist", "aria-label": "Texts of the kernel",
    keydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      const next = tabs[(tabs.indexOf(document.activeElement) + by + tabs.length) % tabs.length];
      next.click();
      next.focus();
    },
  }, tabs);
  choose("text");
  return make("div", {}, make("h3", {}, "Code"), list, panel);
}

// -- nodes

function listNodes() {
  const room = at("node-table");
  const places = new Map();
  steps.forEach((s, n) => s.nodes.forEach((node) => places.set(node, [...(places.get(node) || []), n])));
  const rows = report.graph.nodes.map((node, n) => [
    [n, "number"], [node.op], [node.name || "", "name"], [node.shapes.join(", ")], [node.how], [node.why, "why"],
    [make("span", {}, (places.get(n) || []).flatMap((s, i) => [i ? ", " : "", make("button", { type: "button", class: "link", click: () => show(s, true) }, String(s))]))],
    [node.source || "", "lines"],
  ]);
  const filter = make("input", { type: "search", placeholder: "op, name, line or reason", "aria-label": "Show nodes with this text" });
  const table = tableOf("Nodes", [["node", "number"], ["op"], ["name"], ["shape"], ["what became of it"], ["refused, because"], ["steps"], ["line"]], rows);
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  put(room, make("div", { class: "bar-row" }, filter), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of nodes" }, table));
}

// -- the bug report

function copying() {
  at("bug-copy").addEventListener("click", async () => {
    const text = at("bug-text");
    try {
      await navigator.clipboard.writeText(text.value);
      at("bug-copied").textContent = "copied";
    } catch {
      text.select();
      at("bug-copied").textContent = "selected: copy it with Ctrl+C";
    }
  });
}

async function main() {
  report = await read();
  steps = report.steps.filter((s) => s.phase === "steps" || s.phase === "commit");
  writers = new Map();
  steps.forEach((s, n) => s.writes.forEach((id) => writers.set(id, [...(writers.get(id) || []), n])));
  drawArena();
  listLasting();
  listBuffers();
  enhanceSteps();
  if (report.profile) {
    const colour = colours();
    drawTimeline(colour);
    drawRoofline(colour);
  }
  drawBlocks();
  listNodes();
  copying();
  if (steps.length) show(slowest());
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    drawArena();
    at("time-pictures").replaceChildren();
    if (report.profile) {
      drawTimeline(colours());
      drawRoofline(colours());
    }
  });
  document.documentElement.dataset.ready = "yes";
}

function slowest() {
  let found = 0;
  steps.forEach((_, n) => { if (timeOf(n) > timeOf(found)) found = n; });
  return found;
}

main();
