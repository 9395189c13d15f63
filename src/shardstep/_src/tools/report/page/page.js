"use strict";
// Everything shown is text from the data: names from the user's program are never read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(bytes) < 1024 || unit === "TiB") return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
}

function duration(seconds) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["us", 1e6]]) {
    if (seconds * factor >= 1 || unit === "us") return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
  }
}

// --- verdict ---------------------------------------------------------------------------------------------------

for (const { topic, text, worse } of data.verdict) {
  const row = element("p", undefined, worse ? "worse" : topic === "Verdict" ? "first" : undefined);
  row.append(element("b", topic), element("span", text.replaceAll("->", "→")));
  $("verdict").append(row);
}
for (const note of data.notes) $("notes").append(element("div", note));

// --- pictures --------------------------------------------------------------------------------------------------

const COLOURS = {
  weights: "#4c78a8", "optimizer state": "#f58518", "frozen weights": "#9d9da8", peak: "#5f6b7d",
  forward: "#4c78a8", backward: "#72b7b2", update: "#f58518",
  "all-reduce": "#e45756", "reduce-scatter": "#b279a2", "all-gather": "#54a24b", "all-to-all": "#9d755d",
};
const colour = (name) => COLOURS[name] || "#888888";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const CONFIG = { displayModeBar: false, responsive: true };

function layout(height, more) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true, fixedrange: true };
  return {
    height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 8, r: 16, t: 22, b: 8 },
    xaxis: { ...axis, showticklabels: false, rangemode: "tozero" }, yaxis: { ...axis, autorange: "reversed", ticks: "", showgrid: false },
    hoverlabel: { namelength: -1 },
    ...more,
  };
}

function stacked(id, bars, height = 210) {
  const names = [...new Set(bars.flatMap((bar) => Object.keys(bar.parts)))];
  const traces = names.map((name) => ({
    type: "bar", orientation: "h", name, marker: { color: colour(name) },
    y: bars.map((bar) => bar.name), x: bars.map((bar) => bar.parts[name] || 0),
    text: bars.map((bar) => (bar.parts[name] ? size(bar.parts[name]) : "")), textposition: "inside",
    insidetextanchor: "middle", textangle: 0, hovertemplate: `${name}: %{text}<extra></extra>`,
  }));
  const totals = bars.map((bar) => ({
    x: Object.values(bar.parts).reduce((a, b) => a + b, 0), y: bar.name, text: size(Object.values(bar.parts).reduce((a, b) => a + b, 0)),
    showarrow: false, xanchor: "left", xshift: 4,
  }));
  const widest = Math.max(...totals.map((t) => t.x), 1);
  const more = { barmode: "stack", uniformtext: { minsize: 10, mode: "hide" }, showlegend: true, legend: { orientation: "h", y: -0.05, traceorder: "normal" }, annotations: totals };
  const made = layout(height, more);
  made.xaxis.range = [0, widest * 1.25];
  return Plotly.react(id, traces, made, CONFIG);
}

// A loop goes round and round: its work and its messages alternate as often, or 24 times if that is fewer.
const ROUNDS = 24;
function unrolled(segments) {
  const found = [];
  for (let start = 0, stop; start < segments.length; start = stop) {
    const visit = segments[start].visit;
    for (stop = start + 1; stop < segments.length && visit && segments[stop].visit === visit; stop += 1);
    const body = segments.slice(start, stop);
    const rounds = body.length > 1 ? Math.min(...body.map((s) => s.times), ROUNDS) : 1;
    for (let round = 0; round < rounds; round += 1) found.push(...body.map((s) => ({ ...s, length: s.seconds / rounds })));
  }
  return found;
}

// Lanes on one axis of seconds: what is computed, and what is sent, before and after.
function timeline(id) {
  if (!data.after.length) return $(id).replaceChildren(element("p", data.left || "nothing to do", "hint"));
  const lanes = [["replicated", data.before], ["sharded", data.after]];
  const bars = lanes.flatMap(([name, segments]) => {
    let start = 0;
    return unrolled(segments).map((s) => {
      const bar = { ...s, start, lane: `${name}: ${s.collective ? "wire" : "compute"}` };
      start += s.length;
      return bar;
    });
  });
  const kinds = [...new Set(bars.map((s) => s.what))];
  const traces = kinds.map((kind) => {
    const mine = bars.filter((s) => s.what === kind);
    return {
      type: "bar", orientation: "h", name: kind, marker: { color: colour(kind) }, y: mine.map((s) => s.lane),
      x: mine.map((s) => s.length), base: mine.map((s) => s.start),
      customdata: mine.map((s) => [duration(s.seconds), s.count, s.collective ? `collectives, ${size(s.bytes)} sent` : "equations", s.loop ? `in ${s.loop}` : ""]),
      hovertemplate: `${kind}: %{customdata[0]}<br>%{customdata[1]} %{customdata[2]}<br>%{customdata[3]}<extra></extra>`,
    };
  });
  const order = lanes.flatMap(([name]) => [`${name}: compute`, `${name}: wire`]);
  const made = layout(250, { barmode: "overlay", showlegend: true, legend: { orientation: "h", y: -0.18 }, dragmode: "zoom" });
  made.xaxis = { ...made.xaxis, showticklabels: true, fixedrange: false, tickformat: "~s", ticksuffix: "s" };
  made.yaxis = { ...made.yaxis, categoryorder: "array", categoryarray: order };
  return Plotly.react(id, traces, made, { ...CONFIG, scrollZoom: false, doubleClick: "reset" });
}

// Squarified: each strip is filled while its boxes become squarer (Bruls, Huizing, van Wijk).
function squarify(items, x, y, width, height) {
  const total = items.reduce((sum, item) => sum + item.area, 0), scale = total ? (width * height) / total : 0, placed = [];
  let rest = items.map((item) => ({ item, area: item.area * scale })).filter((r) => r.area > 0);
  const worst = (row, side) => {
    const sum = row.reduce((s, r) => s + r.area, 0);
    return Math.max(...row.map((r) => Math.max((side * side * r.area) / (sum * sum), (sum * sum) / (side * side * r.area))));
  };
  while (rest.length) {
    const side = Math.min(width, height);
    let count = 1;
    while (count < rest.length && worst(rest.slice(0, count + 1), side) <= worst(rest.slice(0, count), side)) count += 1;
    const row = rest.slice(0, count), depth = row.reduce((s, r) => s + r.area, 0) / side;
    let along = 0;
    for (const { item, area } of row) {
      const length = area / depth;
      placed.push(width <= height ? { item, x: x + along, y, width: length, height: depth } : { item, x, y: y + along, width: depth, height: length });
      along += length;
    }
    if (width <= height) { y += depth; height -= depth; } else { x += depth; width -= depth; }
    rest = rest.slice(count);
  }
  return placed;
}

const PALETTE = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b"];
function treemap(id, key) {
  const box = $(id), width = box.clientWidth, tallest = 260;
  const total = data.families.reduce((sum, f) => sum + f[key], 0), most = Math.max(...["before", "after"].map((k) => data.families.reduce((sum, f) => sum + f[k], 0)), 1);
  const height = Math.max(tallest * (total / most), 14);
  $(`${id}-name`).textContent = `${key}: ${size(total)}` + (data.limit ? ` (${(100 * total / data.limit).toFixed(total < data.limit / 100 ? 2 : 0)} % of the device)` : "");
  const items = data.families.map((f) => ({ ...f, area: f[key] })).sort((a, b) => b.area - a.area);
  const line = data.limit ? tallest * (data.limit / most) : Infinity;
  box.style.height = `${height}px`;
  box.replaceChildren(...squarify(items, 0, 0, width, height).map((p) => {
    const made = element("button", p.width > 60 && p.height > 16 ? p.item.path : "");
    made.type = "button";
    made.title = `${p.item.path}: ${size(p.item[key])}, ${p.item.layout}`;
    made.setAttribute("aria-label", made.title);
    made.style.cssText = `left:${p.x}px;top:${p.y}px;width:${Math.max(p.width - 1, 1)}px;height:${Math.max(p.height - 1, 1)}px`;
    if (!made.textContent) made.style.padding = "0";
    made.style.background = PALETTE[data.families.findIndex((f) => f.path === p.item.path) % PALETTE.length];
    made.addEventListener("click", () => { $("filter").value = p.item.path; $("filter").dispatchEvent(new Event("input")); $("filter").scrollIntoView({ block: "center" }); });
    return made;
  }));
  if (line < height) {
    const mark = element("div", `device: ${size(data.limit)}`, "limit");
    mark.style.top = `${line}px`;
    box.append(mark);
  }
}

// State and predicted peak against what a device has.
function memory() {
  const bars = data.memory.concat(data.peak), made = stacked("memory", bars, 240);
  if (data.limit) {
    const widest = Math.max(...bars.map((bar) => Object.values(bar.parts).reduce((a, b) => a + b, 0)), data.limit);
    Plotly.relayout("memory", {
      "xaxis.range": [0, widest * 1.25],
      shapes: [{ type: "line", x0: data.limit, x1: data.limit, y0: 0, y1: 1, yref: "paper", line: { color: css("--bad"), width: 2, dash: "dash" } }],
      annotations: [...$("memory").layout.annotations, { x: data.limit, y: 1, yref: "paper", yanchor: "bottom", text: `device: ${size(data.limit)}`, showarrow: false, font: { color: css("--bad") } }],
    });
  }
  return made;
}

function draw() {
  treemap("map-before", "before");
  treemap("map-after", "after");
  memory();
  timeline("timeline");
  stacked("wire", data.wire);
}
addEventListener("resize", () => { treemap("map-before", "before"); treemap("map-after", "after"); });

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  draw();
}
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

// --- tables ----------------------------------------------------------------------------------------------------

const COLUMNS = {
  leaves: [
    { name: "leaf", key: "path", cell: "path" }, { name: "array", key: "array", cell: "array" }, { name: "role", key: "role" },
    { name: "at rest", key: "layout", cell: "short" }, { name: "before", key: "before", bytes: true }, { name: "after", key: "after", bytes: true },
    { name: "saved", key: "saved", bytes: true },
    { name: "why", key: "reason", cell: "reason" },
  ],
  collectives: [
    { name: "what", key: "what", cell: "path" }, { name: "how", key: "how", cell: "short" }, { name: "collectives", key: "count", number: true },
    { name: "sent", key: "bytes", bytes: true }, { name: "line", key: "line", cell: "path" },
  ],
  owned: [
    { name: "matrices", key: "matrices", cell: "array" }, { name: "owner", key: "owner", cell: "path" },
    { name: "flops per replica, before", key: "before", number: true }, { name: "after", key: "after", number: true },
    { name: "line", key: "line", cell: "path" }, { name: "why", key: "why", cell: "reason" },
  ],
  fallbacks: [
    { name: "primitive", key: "primitive" }, { name: "line", key: "line", cell: "path" }, { name: "why", key: "why" },
    { name: "gathered", key: "bytes", bytes: true }, { name: "what to do", key: "advice", cell: "reason" },
  ],
};

function cell(row, column) {
  const value = row[column.key], many = typeof value === "number" && value >= 1e6;
  const made = element("td", column.bytes ? size(value) : many ? value.toExponential(2) : String(value), column.cell);
  if (column.bytes || column.number) made.classList.add("number");
  if (column.key === "after" && row.after < row.before) made.classList.add("smaller");
  if (column.key === "after" && row.after > row.before) made.classList.add("larger");
  return made;
}

function fill(id, rows) {
  $(id).tBodies[0].replaceChildren(...rows.map((row) => {
    const made = document.createElement("tr");
    made.append(...COLUMNS[id].map((column) => cell(row, column)));
    return made;
  }));
}

function sortable(id, rows, show) {
  const order = { key: null, down: false };
  const head = document.createElement("tr");
  for (const column of COLUMNS[id]) {
    const made = element("th"), button = element("button", column.name);
    button.type = "button";
    button.addEventListener("click", () => {
      order.down = order.key === column.key ? !order.down : Boolean(column.bytes || column.number);
      order.key = column.key;
      for (const list of rows) list.sort((a, b) => {
        const [x, y] = [a[column.key], b[column.key]];
        const compared = typeof x === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
        return order.down ? -compared : compared;
      });
      for (const other of head.children) other.removeAttribute("aria-sort");
      made.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      show();
    });
    made.append(button);
    head.append(made);
  }
  $(id).tHead.append(head);
  show();
}

const PAGE = 100;
let pages = 1;
const bySaving = (a, b) => b.saved - a.saved || b.before - a.before;
for (const rows of [data.groups, data.leaves]) rows.sort(bySaving);
function showLeaves() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), role = $("role").value;
  const rows = $("each").checked ? data.leaves : data.groups;
  const found = rows.filter((leaf) => (!role || leaf.role === role)
    && words.every((word) => `${leaf.path} ${leaf.short} ${leaf.array} ${leaf.layout} ${leaf.reason}`.toLowerCase().includes(word)));
  const shown = found.slice(0, pages * PAGE), kind = $("each").checked ? "leaves" : "groups";
  fill("leaves", shown);
  $("shown").textContent = `${shown.length} of ${found.length} ${kind}` + (found.length < rows.length ? ` (${rows.length} in all)` : "");
  $("more").hidden = shown.length === found.length;
}
for (const role of new Set(data.leaves.map((leaf) => leaf.role))) $("role").append(element("option", role));
for (const id of ["filter", "role", "each"]) $(id).addEventListener("input", () => { pages = 1; showLeaves(); });
$("more").addEventListener("click", () => { pages += 1; showLeaves(); });
sortable("leaves", [data.leaves, data.groups], showLeaves);
$("left").textContent = data.left;
for (const [id, rows] of [["collectives", data.collectives], ["update-section", data.update]]) $(id).hidden = Boolean(data.left) && !rows.length;
sortable("collectives", [data.collectives], () => fill("collectives", data.collectives));
sortable("fallbacks", [data.fallbacks], () => fill("fallbacks", data.fallbacks));
sortable("owned", [data.owned], () => fill("owned", data.owned));
$("owned-section").hidden = data.owned.length === 0;
$("fallback-section").hidden = data.fallbacks.length === 0;

// --- the update ------------------------------------------------------------------------------------------------

for (const { source, code, lines } of data.update) {
  const where = element("p", `${source}  `, "source");
  where.append(element("code", code));
  const block = element("pre");
  for (const { text, count, sends } of lines) {
    block.append(element("span", text));
    if (sends) block.append(element("span", `   ← ${sends}`, "sends"));
    if (count > 1) block.append(element("span", `   x ${count}`, "times"));
    block.append("\n");
  }
  $("update").append(where, block);
}
document.documentElement.dataset.ready = "true";
