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
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(bytes) < 1024 || unit === "GiB") return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
}

// --- headline --------------------------------------------------------------------------------------------------

for (const { name, value, change, verdict } of data.headline) {
  const card = element("div", undefined, "card");
  card.append(element("div", name, "name"), element("div", value, "value"), element("div", change, `change ${verdict}`));
  $("headline").append(card);
}
for (const note of data.notes) $("notes").append(element("div", note));

// --- pictures --------------------------------------------------------------------------------------------------

const COLOURS = {
  weight: "#4c78a8", auxiliary: "#f58518", frozen: "#9d9da8", input: "#b8b8c2",
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
    margin: { l: 8, r: 16, t: 8, b: 8 },
    xaxis: { ...axis, showticklabels: false, rangemode: "tozero" }, yaxis: { ...axis, autorange: "reversed", ticks: "", showgrid: false },
    hoverlabel: { namelength: -1 },
    ...more,
  };
}

function stacked(id, bars) {
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
  const made = layout(210, more);
  made.xaxis.range = [0, widest * 1.25];
  return Plotly.react(id, traces, made, CONFIG);
}

// Before and after are drawn to one scale.
const LONGEST = Math.max(...[...data.before, ...data.after].map((s) => s.bytes), 1);

function inOrder(id, segments) {
  if (!segments.length) return $(id).replaceChildren(element("p", data.left || "nothing to do", "hint"));
  const label = (s, i) => `${i + 1}. ${s.what}` + (s.collective && s.count > 1 ? ` ×${s.count}` : "");
  const trace = {
    type: "bar", orientation: "h", y: segments.map(label), x: segments.map((s) => s.bytes),
    marker: { color: segments.map((s) => colour(s.what)) },
    text: segments.map((s) => size(s.bytes) + (s.loop ? " ↻" : "")), textposition: "outside", cliponaxis: false,
    customdata: segments.map((s) => [s.count, s.collective ? "collectives" : "equations", s.loop ? `in ${s.loop}` : ""]),
    hovertemplate: "%{y}: %{text}<br>%{customdata[0]} %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
  };
  const made = layout(Math.max(150, 40 + 32 * segments.length));
  made.xaxis.range = [0, 1.35 * LONGEST];
  return Plotly.react(id, [trace], made, CONFIG);
}

function draw() {
  stacked("memory", data.memory);
  stacked("wire", data.wire);
  inOrder("before", data.before);
  inOrder("after", data.after);
}

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
    { name: "at rest", key: "layout" }, { name: "before", key: "before", bytes: true }, { name: "after", key: "after", bytes: true },
    { name: "why", key: "reason", cell: "reason" },
  ],
  collectives: [
    { name: "collective", key: "kind" }, { name: "count", key: "count", number: true }, { name: "dtype", key: "dtype" },
    { name: "sent", key: "bytes", bytes: true }, { name: "for", key: "purpose" }, { name: "line", key: "line", cell: "path" },
    { name: "inside", key: "loop" },
  ],
  fallbacks: [
    { name: "primitive", key: "primitive" }, { name: "line", key: "line", cell: "path" }, { name: "why", key: "why" },
    { name: "gathered", key: "bytes", bytes: true }, { name: "what to do", key: "advice", cell: "reason" },
  ],
};

function cell(row, column) {
  const made = element("td", column.bytes ? size(row[column.key]) : String(row[column.key]), column.cell);
  if (column.bytes || column.number) made.classList.add("number");
  if (column.key === "after" && row.after < row.before) made.classList.add("smaller");
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
      rows.sort((a, b) => {
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
function showLeaves() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), role = $("role").value;
  const found = data.leaves.filter((leaf) => (!role || leaf.role === role)
    && words.every((word) => `${leaf.path} ${leaf.array} ${leaf.layout} ${leaf.reason}`.toLowerCase().includes(word)));
  const shown = found.slice(0, pages * PAGE);
  fill("leaves", shown);
  $("shown").textContent = `${shown.length} of ${found.length} leaves` + (found.length < data.leaves.length ? ` (${data.leaves.length} in all)` : "");
  $("more").hidden = shown.length === found.length;
}
for (const role of new Set(data.leaves.map((leaf) => leaf.role))) $("role").append(element("option", role));
for (const id of ["filter", "role"]) $(id).addEventListener("input", () => { pages = 1; showLeaves(); });
$("more").addEventListener("click", () => { pages += 1; showLeaves(); });
sortable("leaves", data.leaves, showLeaves);
$("left").textContent = data.left;
for (const [id, rows] of [["collectives", data.collectives], ["update-section", data.update]]) $(id).hidden = Boolean(data.left) && !rows.length;
sortable("collectives", data.collectives, () => fill("collectives", data.collectives));
sortable("fallbacks", data.fallbacks, () => fill("fallbacks", data.fallbacks));
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
