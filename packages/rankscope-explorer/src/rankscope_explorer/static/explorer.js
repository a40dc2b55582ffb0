// The page: controls to a setting, a setting to the server, and what comes back to the figures.
import { ask, quiet } from "/static/ask.js";
import { settled, turned, without } from "/static/forecast.js";
import { SHAPE, USUAL, fromFragment, known, sent, toFragment } from "/static/link.js";
import { differences } from "/static/pins.js";
import { listRemedies, showRemedies } from "/static/remedies.js";
import { THEORY } from "/static/theory.js";

const $ = (id) => document.getElementById(id);
const TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I thought I would sail about a little and see the watery part of the world.";
const OFF = { skip: null, mlp: true, norm: true, mask: null, window: null, divisor: null, temperature: 1, layers: null };
const PRESETS = {
  "Transformer": {},
  "Pure attention": { skip: 0, mlp: false, norm: false },
  "With skip": { skip: 1, mlp: false, norm: false },
  "With MLP": { skip: 0, mlp: true, norm: false },
  "With norm": { skip: 0, mlp: false, norm: true },
  "Causal": { skip: 0, mlp: false, norm: false, mask: "causal" },
  "Narrow window": { skip: 0, mlp: false, norm: false, window: 2 },
  "Half a skip": { skip: 0.5, mlp: false, norm: false },
};

let networks = null;
let usual = { ...USUAL };
let state = null; // { setting, pins: {A, B}, focus }
const latest = {}; // part -> what came last

// Controls

const model = () => networks.models.find((each) => each.name === state.setting.model) || {};

function own(name) {
  const about = latest.own || {};
  if (name === "layers") return state.setting.model === "random" ? state.setting.shape.layers : model().layers || about.layers || 6;
  if (name === "skip") return about.skip ?? model().skip ?? 1;
  return model()[name] ?? about[name];
}

function show() {
  const { setting } = state;
  for (const name of ["text", "model"]) if ($(name).value !== setting[name]) $(name).value = setting[name];
  number("tokens", setting.tokens, setting.tokens);
  $("shape").hidden = setting.model !== "random";
  for (const [part, of] of Object.entries(setting.shape)) {
    const input = $("shape-" + part);
    if (!input || document.activeElement === input) continue;
    if (input.type === "checkbox") input.checked = of; else input.value = String(of);
  }
  const skip = setting.skip ?? own("skip");
  number("skip", skip, setting.skip === null ? `${skip} · own` : String(skip));
  $("mlp").checked = setting.mlp;
  $("norm").checked = setting.norm;
  const masks = [...$("mask").options].map((option) => option.value);
  const listed = setting.mask === null ? "" : masks.includes(setting.mask) ? setting.mask : "write";
  if (!($("mask").value === "write" && document.activeElement === $("mask-text"))) $("mask").value = listed;
  $("written").hidden = $("mask").value !== "write";
  if (listed === "write" && document.activeElement !== $("mask-text")) $("mask-text").value = setting.mask;
  $("window").max = String(Math.max(2, setting.tokens));
  number("window", setting.window ?? Number($("window").max), setting.window === null ? "no limit" : `±${setting.window}`);
  number("temperature", Math.log10(setting.temperature), `×${plain(setting.temperature)}`);
  if (document.activeElement !== $("divisor")) $("divisor").value = setting.divisor ?? "";
  $("divisor").placeholder = own("divisor") ? `${plain(own("divisor"))} · own` : "own";
  const layers = setting.layers ?? own("layers");
  $("layers").max = String(Math.min(networks.limits.depth, Math.max(24, 4 * own("layers"), Number(layers) || 0)));
  number("layers", layers, setting.layers === null ? `${layers} · own` : `${layers} of ${own("layers")}`);
  showRemedies(setting.remedies, networks);
  for (const button of $("presets").children) {
    button.setAttribute("aria-pressed", String(matches(PRESETS[button.textContent])));
  }
  for (const name of ["A", "B"]) {
    $("pin" + name).setAttribute("aria-pressed", String(Boolean(state.pins[name])));
    $("pin" + name).textContent = state.pins[name] ? `Unpin ${name}` : `Pin ${name}`;
    $("pin" + name).title = state.pins[name] ? `${name}: ${differences(state.pins[name], setting)}` : "Keep this setting beside those that follow";
  }
  const pinned = Boolean(state.pins.A || state.pins.B);
  $("focus").hidden = !pinned;
  document.body.classList.toggle("pinned", pinned);
  for (const input of document.getElementsByName("focus")) {
    input.checked = input.value === state.focus;
    const pin = state.pins[input.value];
    input.parentElement.hidden = input.value !== "now" && !pin;
    input.parentElement.title = pin ? differences(pin, setting) : "the setting at hand";
  }
}

function number(id, value, said) {
  const input = $(id);
  if (Number(input.value) !== value) input.value = String(value);
  input.setAttribute("aria-valuetext", said);
  document.querySelector(`output[for="${id}"]`).textContent = said;
}

function plain(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(3))) : String(value);
}

function matches(preset) {
  return Object.entries({ ...OFF, ...preset }).every(([name, of]) => state.setting[name] === of);
}

function turn(changes) {
  state.setting = known({ ...state.setting, ...changes });
  changed();
}

function changed() {
  history.replaceState(null, "", "#" + toFragment(state, usual));
  show();
  request();
}

function listen() {
  const on = (id, event, change) => $(id).addEventListener(event, () => turn(change($(id))));
  on("text", "input", (e) => ({ text: e.value }));
  on("tokens", "input", (e) => ({ tokens: Number(e.value) }));
  $("model").addEventListener("change", () => { latest.own = null; turn({ model: $("model").value }); });
  on("skip", "input", (e) => ({ skip: Number(e.value) }));
  on("mlp", "change", (e) => ({ mlp: e.checked }));
  on("norm", "change", (e) => ({ norm: e.checked }));
  $("mask").addEventListener("change", () => {
    const chosen = $("mask").value;
    $("written").hidden = chosen !== "write";
    if (chosen === "write") { $("mask-text").value = state.setting.mask || "causal&window:4"; $("mask-text").focus(); }
    turn({ mask: chosen === "write" ? $("mask-text").value : chosen || null });
  });
  on("mask-text", "input", (e) => ({ mask: e.value || null }));
  on("window", "input", (e) => ({ window: e.value === e.max ? null : Number(e.value) }));
  on("temperature", "input", (e) => ({ temperature: Number((10 ** Number(e.value)).toPrecision(3)) }));
  on("divisor", "input", (e) => ({ divisor: e.value === "" ? null : Number(e.value) }));
  on("layers", "input", (e) => ({ layers: Number(e.value) === own("layers") ? null : Number(e.value) }));
  for (const part of Object.keys(SHAPE)) {
    const input = $("shape-" + part);
    input.addEventListener("input", () => {
      const of = input.type === "checkbox" ? input.checked : input.type === "number" ? Number(input.value) : input.value;
      latest.own = null;
      turn({ shape: { ...state.setting.shape, [part]: of } });
    });
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const name of ["A", "B"]) {
    $("pin" + name).addEventListener("click", () => {
      state.pins[name] = state.pins[name] ? null : structuredClone(state.setting);
      if (state.focus === name) state.focus = "now";
      changed();
    });
  }
  for (const input of document.getElementsByName("focus")) {
    input.addEventListener("change", () => { state.focus = input.value; changed(); });
  }
  $("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(location.href); flash($("copied"), "copied"); }
    catch { flash($("copied"), "the address bar has it"); }
  });
  addEventListener("hashchange", () => { latest.own = null; state = fromFragment(location.hash, usual); show(); request(); });
  let settle = 0;
  addEventListener("resize", () => { clearTimeout(settle); settle = setTimeout(draw, 150); });
}

function flash(element, text) {
  element.textContent = text;
  setTimeout(() => { if (element.textContent === text) element.textContent = ""; }, 2500);
}

function presets() {
  for (const [name, preset] of Object.entries(PRESETS)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => turn({ ...OFF, ...preset }));
    $("presets").append(button);
  }
}

// Asking

// Which request was asked last, whose curve is shown, and which is answered whole, for whoever watches the page.
let requests = 0;
function tell(what, number) {
  document.body.dataset[what] = String(number);
}

const PARTS = ["curve", "cloud", "paths", "bounds"];
const card = (part) => $(part + "-card");
const busy = (part) => card(part).getAttribute("aria-busy") === "true";

// What never came leaves an older setting's in its place, marked as such.
function arrived(part, came = true) {
  card(part).setAttribute("aria-busy", "false");
  card(part).classList.toggle("stale", !came);
  if (part === "curve") $("said").classList.toggle("stale", !came);
}

function request() {
  const { setting, pins, focus } = state;
  const number = (requests += 1);
  tell("asked", number);
  turned(sent(setting));
  if (!setting.text.trim()) return nothing(number);
  ask({ setting: sent(setting), ...(pins.A && { A: sent(pins.A) }), ...(pins.B && { B: sent(pins.B) }), focus }, {
    start() { for (const part of PARTS) card(part).setAttribute("aria-busy", "true"); },
    part(part, milliseconds) {
      latest[part.part] = part;
      $("error").hidden = true;
      if (part.part === "curve") {
        const seen = { divisor: part.about.divisor / setting.temperature, skip: part.about.skip, layers: part.about.layers };
        for (const name of Object.keys(seen)) if (setting[name] === null) latest.own = { ...latest.own, [name]: seen[name] };
        show();
        latest.milliseconds = milliseconds;
      }
      if (part.part !== "end") { drawPart(part.part); arrived(part.part); }
      if (part.part === "curve") tell("shown", number);
    },
    end() { tell("answered", number); settled(sent(setting)); },
    error(message) {
      $("error").textContent = message;
      $("error").hidden = false;
      if (!latest.curve) $("verdict").textContent = "Nothing to show yet.";
      for (const part of PARTS) if (busy(part)) arrived(part, false);
      without();
      tell("shown", number);
      tell("answered", number);
    },
  });
}

// Without a text there is nothing to ask, and nothing is wrong either.
function nothing(number) {
  quiet();
  $("error").hidden = true;
  $("verdict").textContent = "There is no text yet: write a few words, and see what becomes of their tokens.";
  $("pins").replaceChildren();
  $("about").textContent = "";
  for (const part of PARTS) arrived(part, false);
  $("said").classList.remove("stale");
  tell("shown", number);
  tell("answered", number);
}

// Drawing

// One screen: what the window leaves for the two rows of charts.
function room() {
  if (matchMedia("(max-width: 56rem)").matches) return { upper: 290, lower: 260 };
  const free = innerHeight - $("curve-card").getBoundingClientRect().top - scrollY - ($("focus").hidden ? 160 : 205);
  const lower = Math.max(200, Math.min(380, 0.45 * free));
  return { upper: Math.max(240, Math.min(560, free - lower)), lower };
}

function sized(figure, height) {
  const layout = { ...figure.layout, height, margin: { ...figure.layout.margin } };
  layout.margin.t = layout.annotations && layout.annotations.length ? 46 : 16;
  for (const key of Object.keys(layout)) {
    if (!/^[xy]axis/.test(key)) continue;
    const title = { ...(layout[key].title || {}), font: { size: 12 }, standoff: 6 };
    layout[key] = { ...layout[key], title, tickfont: { size: 11 } };
  }
  layout.legend = { ...layout.legend, font: { size: 11 } };
  return { ...figure, layout };
}

function draw() {
  for (const part of PARTS) if (latest[part]) drawPart(part);
}

// A part of the answer is a section: a sentence, one picture with a choice of its views, and a table, which is the last choice.
const wanted = {}; // part -> the label that was chosen last
function drawPart(name) {
  const { sentence, plots: [plot], tables: [table], verdicts } = latest[name];
  const { upper, lower } = room();
  const height = { curve: upper, cloud: upper - 52 }[name] || lower;
  const views = plot ? plot.views : [];
  const labels = [...views.map((view) => view.label), ...(views.length && table ? ["table"] : [])];
  const shown = labels.includes(wanted[name]) ? wanted[name] : labels[0];
  choices(name, labels, shown);
  if (verdicts) said(latest[name]);
  if ($(name + "-said")) $(name + "-said").textContent = sentence;
  const view = views.find((each) => each.label === shown);
  $(name).parentElement.hidden = !view;
  if (view) {
    const atEnd = name !== "cloud" || !slider() || slider().value === slider().max;
    rankscope.draw($(name), sized({ table: views[0].figure.table, ...view.figure }, height));
    if (name === "cloud" && atEnd) toLast();
  }
  if (!$(name + "-table")) return;
  $(name + "-table").hidden = shown !== "table";
  $(name + "-table").style.maxHeight = `${height}px`;
  if (shown === "table") $(name + "-table").replaceChildren(tabular(name === "curve" ? upright(table) : table));
}

// A card is narrow: layers stand below each other.
function upright({ headings, rows, marked, ...rest }) {
  const body = headings.slice(1).map((layer, at) => [layer, ...rows.map((cells) => cells[at + 1])]);
  return { ...rest, headings: ["layer", ...rows.map(([variant]) => variant)], rows: body, marked: marked.map(([row, column]) => [column - 1, row + 1]) };
}

function choices(name, labels, shown) {
  const place = $(name + "-choice");
  if (place.dataset.labels !== labels.join(";")) {
    place.dataset.labels = labels.join(";");
    place.replaceChildren(...(labels.length > 1 ? labels : []).map((words) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      Object.assign(input, { type: "radio", name, value: words });
      input.addEventListener("change", () => { wanted[name] = words; drawPart(name); });
      label.append(input, words);
      return label;
    }));
  }
  for (const input of place.querySelectorAll("input")) input.checked = input.value === shown;
}

const slider = () => document.querySelector("#cloud-card .rs-player input");

// The cloud is first seen where it ends up, and stays at the end when the depth changes.
function toLast() {
  const input = slider();
  if (!input || input.value === input.max) return;
  input.value = input.max;
  input.dispatchEvent(new Event("input"));
}

function said(part) {
  const { about } = part;
  $("verdict").textContent = part.verdicts.now;
  $("pins").replaceChildren(...Object.keys(part.verdicts).filter((name) => name !== "now").map((name) => {
    const item = document.createElement("li");
    const tag = document.createElement("b");
    tag.textContent = name;
    const words = state.pins[name] ? `: ${differences(state.pins[name], state.setting)}. ` : " ";
    item.append(tag, words, part.verdicts[name]);
    return item;
  }));
  $("about").textContent =
    `${several(about.tokens, "token")} · ${several(about.layers, "layer")} of width ${about.width}, ${several(about.heads, "head")} · ` +
    `skip ${plain(about.skip)} · mask ${about.mask} · scores / ${plain(about.divisor)} · ` +
    (about.remedies ? `with ${about.remedies.replaceAll(";", ", then ")} · ` : "") +
    `${about.arithmetic} arithmetic · ${Math.round(latest.milliseconds)} ms`;
}

const several = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

// A table of a section; the name of a theorem opens what it says.
function tabular({ headings, rows, marked, note }) {
  const table = document.createElement("table");
  table.className = headings.some(Boolean) ? "" : "wordy";
  if (headings.some(Boolean)) {
    const head = table.createTHead().insertRow();
    for (const heading of headings) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: heading }));
  }
  const body = table.createTBody();
  rows.forEach((cells, number) => {
    const row = body.insertRow();
    cells.forEach((text, column) => {
      const cell = row.insertCell();
      if (marked.some(([of, at]) => of === number && at === column)) cell.className = "marked";
      const theorem = column === 0 && networks.theorems.find((each) => each.name === text);
      cell.append(theorem ? opener(theorem, cells[1]) : text);
    });
  });
  if (note) Object.assign(table.createCaption(), { textContent: note, className: "note" });
  return table;
}

function opener({ name, says, source }, here) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", () => open({ title: name, text: [says], source, theorem: `Here: ${here}` }));
  return button;
}

// Theory

function open({ title, text, theorem, source }) {
  $("theory-title").textContent = title;
  const parts = text.map((words) => paragraph(words));
  if (theorem) parts.push(paragraph(theorem, "theorem"));
  if (source) parts.push(paragraph(source, "source"));
  $("theory-text").replaceChildren(...parts);
  $("theory").showModal();
}

function paragraph(words, kind = "") {
  const element = document.createElement("p");
  element.className = kind;
  element.textContent = words;
  return element;
}

function theory() {
  for (const button of document.querySelectorAll("button.theory")) {
    const about = THEORY[button.dataset.about];
    button.textContent = "?";
    button.setAttribute("aria-label", `Theory: ${about.title}`);
    button.title = `What is behind: ${about.title}`;
    button.addEventListener("click", (event) => { event.preventDefault(); open(about); });
  }
  $("theory-close").addEventListener("click", () => $("theory").close());
  $("theory").addEventListener("click", (event) => { if (event.target === $("theory")) $("theory").close(); });
}

async function begin() {
  theory();
  presets();
  try {
    networks = await (await fetch("/api/networks")).json();
  } catch { $("verdict").textContent = "The explorer does not answer: is rankscope explore still running?"; return; }
  for (const each of networks.models) {
    const option = document.createElement("option");
    option.value = each.name;
    const size = each.layers ? `, ${each.layers} layers` : "";
    const weights = each.drawn ? ", random weights" : "";
    option.textContent = each.name === "random" ? "random, of any shape" : each.name + size + weights;
    $("model").append(option);
  }
  listRemedies(networks, (remedies) => { latest.own = null; turn({ remedies }); }, () => state.setting.remedies);
  $("text").maxLength = networks.limits.text;
  $("tokens").max = String(networks.limits.tokens);
  usual = { ...USUAL, model: networks.models[0].name, text: TEXT };
  state = fromFragment(location.hash, usual);
  listen();
  show();
  request();
}

begin();
