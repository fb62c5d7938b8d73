"use strict";
// Applies changed parts of the page, draws charts, and adds keys, filters and sorting to tables.
const body = document.body, base = document.querySelector("header .name").getAttribute("href");
let clock = Number(body.dataset.now) - performance.now() / 1000;  // of the controller; this host's may be wrong
const dark = matchMedia("(prefers-color-scheme: dark)").matches;

function made(html) { const t = document.createElement("template"); t.innerHTML = html.trim(); return t.content.firstElementChild; }

function apply(changes, whole = false) {
  const began = performance.now();
  if (whole) {
    const there = new Set(changes.map(([id]) => id));
    for (const row of document.querySelectorAll("tbody > tr[id]")) if (!there.has(row.id)) row.remove();
  }
  for (const [id, parent, html] of changes) {
    const old = document.getElementById(id);
    if (html === null) { if (old) old.remove(); continue; }
    const fresh = made(html);
    if (old) { if (old.classList.contains("chosen")) fresh.classList.add("chosen"); fresh.hidden = old.hidden; old.replaceWith(fresh); }
    else { const into = document.getElementById(parent); if (into) into.dataset.newestFirst !== undefined ? into.prepend(fresh) : into.append(fresh); }
    tell(fresh);
  }
  performance.measure("update", {start: began, detail: changes.length});
}

function tell(inside) {
  const now = performance.now() / 1000 + clock;
  for (const time of inside.querySelectorAll("time[data-at]")) {
    const {at, from, to} = time.dataset;
    time.textContent = to ? starts(at - now, from - now, to - now) : ago(now - at);
  }
}
function starts(at, from, to) {
  if (to <= 0) return "at any moment";
  const [a, b] = [length(Math.max(from, 0)), length(to)], [number, unit] = a.split(" ");
  return `in ${length(Math.max(at, 0))}, ${b.endsWith(" " + unit) ? number : a} to ${b}`;
}
function ago(s) {
  if (s < 0) return "in " + length(-s);
  return length(s) + " ago";
}
function length(s) {
  if (s < 60) return Math.floor(s) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 172800) return Math.floor(s / 3600) + " h";
  return Math.floor(s / 86400) + " d";
}
setInterval(() => { if (!document.hidden) tell(document); }, 5000);
tell(document);

// --- live changes
const streams = [];  // of this page; a hidden page has none, because browsers open only six for each host
let source = null, missed = 0, heard = 0;
function listen() {
  if (source || !body.dataset.stream) return;
  source = new EventSource(body.dataset.stream);
  heard = performance.now();
  source.onopen = () => { missed = 0; };
  source.onmessage = event => {
    const said = JSON.parse(event.data);
    heard = performance.now();
    clock = said.now - heard / 1000;
    if (String(said.history) !== body.dataset.history) { location.reload(); return; }
    apply(said.parts, said.whole); redraw();
  };
  source.onerror = () => {
    const closed = source.readyState === EventSource.CLOSED;
    if (++missed > 1 || closed) lost();
    if (closed) { stop(); setTimeout(() => { if (!document.hidden) listen(); }, 5000); }
  };
}
function stop() { source?.close(); source = null; }
function lost() { apply([["status", "banner", '<p id="status" class="problem">This page has lost its server, and reconnects.</p>']]); }
function check() {  // a connection can end unnoticed, as in a host that sleeps
  if (source && performance.now() - heard > 1000 * Number(body.dataset.silence)) { lost(); stop(); listen(); }
}
streams.push([listen, stop]);
setInterval(check, 5000);
document.addEventListener("resume", check);
let leaving = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => { for (const [, end] of streams) end(); }, 10000);
  else for (const [begin] of streams) begin();
});
if (!document.hidden) listen();

// --- charts
const charts = [...document.querySelectorAll("[data-chart]")];
let drawn = -2000, drawing = false;
const address = (chart, more) => { const url = new URL(chart.dataset.chart, location.href); for (const k in more) url.searchParams.set(k, more[k]); return url; };
async function draw(chart) {
  const reply = await fetch(address(chart, {dark: dark ? 1 : 0}));
  if (!reply.ok) { chart.textContent = "This chart is not available now."; return; }
  const item = await reply.json();
  await Bokeh.embed.embed_item(item, chart.id);
  chart.doc = Bokeh.documents.find(doc => doc.roots().some(root => root.id === item.root_id));
  const {start, end} = chart.doc.get_model_by_name("time") ?? {};
  chart.range = {start, end};
  chart.done = true;
  performance.mark("drawn");
}
async function fill(chart) {
  const time = chart.doc.get_model_by_name("time"), {start, end} = time ?? {};
  const moved = time && (start !== chart.range.start || end !== chart.range.end);
  const same = chart.shown?.start === start && chart.shown?.end === end;
  if (moved && same && end / 1000 < performance.now() / 1000 + clock) return;  // the past does not change
  chart.shown = {start, end};
  const wait = setTimeout(() => note(chart, "Older events are being read."), 500);
  const reply = await fetch(address(chart, {data: 1, ...(moved && {from: start / 1000, to: end / 1000})}));
  clearTimeout(wait);
  const columns = reply.ok ? await reply.json() : {note: "This range is not available now."};
  note(chart, columns.note);
  for (const name in columns) {
    const model = chart.doc.get_model_by_name(name);
    if (model?.data) model.data = columns[name];
    else if (model && !moved && !chart.held) { const {start, end} = chart.range = columns[name]; model.setv({start, end, reset_start: start, reset_end: end}); }
  }
}
function note(chart, text) { const line = chart.parentElement.querySelector(".note"); if (line) line.textContent = text; }
async function redraw(soon = false) {
  if (drawing || document.hidden || (!soon && performance.now() - drawn < 2000)) return;
  drawing = true;
  try {
    for (const chart of charts) if (chart.done) await fill(chart);
    drawn = performance.now();
  } catch { /* the next message draws again */ } finally { drawing = false; }
}
for (const chart of document.querySelectorAll("[data-inline]"))
  Bokeh.embed.embed_item(JSON.parse(document.getElementById(chart.dataset.inline).textContent), chart.id);
for (const chart of charts) {
  draw(chart);
  let still = 0;
  const moved = () => { clearTimeout(still); still = setTimeout(() => { chart.held = false; redraw(true); }, 300); };
  const first = {capture: true};  // Bokeh keeps these events to itself
  chart.addEventListener("wheel", moved, first);
  chart.addEventListener("pointerdown", () => { chart.held = true; }, first);
  addEventListener("pointerup", () => { if (chart.held) moved(); }, first);
}

// --- tables
function cell(row, place) { const c = row.children[place]; const p = c.querySelector("progress"); return p ? p.value : (c.querySelector("time")?.dataset.at ?? c.textContent.trim()); }
for (const button of document.querySelectorAll("[data-sort]")) button.onclick = () => {
  const head = button.parentElement, rows = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const place = [...head.parentElement.children].indexOf(head), sign = down ? -1 : 1;
  rows.append(...[...rows.children].sort((a, b) => {
    const x = cell(a, place), y = cell(b, place), n = Number(x) - Number(y);
    return sign * (Number.isNaN(n) || x === "" || y === "" ? String(x).localeCompare(String(y)) : n);
  }));
};
for (const field of document.querySelectorAll("[data-filters]")) {
  const rows = document.getElementById(field.dataset.filters);
  const filter = () => { const words = field.value.toLowerCase().split(/\s+/); for (const row of rows.children) { const text = row.textContent.toLowerCase(); row.hidden = !words.every(w => text.includes(w)); } };
  field.oninput = filter;
  new MutationObserver(() => { if (field.value) filter(); }).observe(rows, {childList: true});
}
function choose(step) {
  const rows = [...document.querySelectorAll("tbody tr:not([hidden])")];
  const at = rows.findIndex(row => row.classList.contains("chosen"));
  const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
  if (!next) return;
  rows[at]?.classList.remove("chosen"); next.classList.add("chosen"); next.scrollIntoView({block: "nearest"});
}
document.addEventListener("keydown", event => {
  if (event.target.matches("input, textarea") || event.ctrlKey || event.metaKey || event.altKey) { if (event.key === "Escape") event.target.blur(); return; }
  const links = document.querySelectorAll("nav a");
  if (event.key === "/") document.querySelector("[type=search]")?.focus();
  else if (event.key === "j") choose(1);
  else if (event.key === "k") choose(-1);
  else if (event.key === "Enter" && event.target === body) { const link = document.querySelector("tr.chosen a"); if (link) location.href = link.href; }
  else if (event.key === "?") document.getElementById("help").showModal();
  else if (links[Number(event.key) - 1]) location.href = links[Number(event.key) - 1].href;
  else return;
  event.preventDefault();
});
for (const field of document.querySelectorAll("[data-dark]")) field.value = dark ? 1 : 0;
for (const button of document.querySelectorAll("[data-confirm]")) button.addEventListener("click", event => { if (!confirm(button.dataset.confirm)) event.preventDefault(); });

// --- output of a job
const section = document.querySelector("[data-log]");
if (section) {
  const log = document.getElementById("log"), form = document.getElementById("log-form");
  const most = 2000;
  let lines = null;
  const end = () => { if (lines?.readyState !== EventSource.CLOSED) { lines?.close(); lines = null; } };
  const follow = () => {
    lines?.close();
    const url = new URL(section.dataset.log, location.href);
    for (const [name, value] of new FormData(form)) if (value) url.searchParams.set(name, value);
    const ranks = new Set();
    lines = new EventSource(url);
    lines.onopen = () => log.replaceChildren();  // also after a break: the server begins anew
    lines.onmessage = event => {
      const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      for (const [rank, text, end] of JSON.parse(event.data)) {
        const last = log.lastElementChild;
        if (last && last.dataset.open && last.dataset.rank === String(rank)) last.remove();
        const line = document.createElement("div");
        line.textContent = (ranks.add(rank).size > 1 && rank !== null ? `[${rank}] ` : "") + (text || " "); line.dataset.rank = String(rank); line.dir = "auto";
        if (end !== "\n") line.dataset.open = "1";
        log.append(line);
      }
      while (log.childElementCount > most) log.firstElementChild.remove();
      if (low) log.scrollTop = log.scrollHeight;
    };
    lines.addEventListener("ended", () => lines.close());
    lines.addEventListener("refused", event => { lines.close(); log.textContent = event.data; });
  };
  form.addEventListener("submit", event => { event.preventDefault(); log.replaceChildren(); follow(); });
  streams.push([() => { if (!lines) follow(); }, end]);
  if (!document.hidden) follow();
}
