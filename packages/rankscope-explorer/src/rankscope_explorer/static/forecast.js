// The panel of forecasts: asked for once everything else of a setting is shown, given up when a control is turned.
import { GONE, answered } from "/static/ask.js";

const $ = (id) => document.getElementById(id);
const SETTLED = 400; // milliseconds without a turn before a forecast is asked for
const AGAIN = 1500; // milliseconds after which what gave way to another computation is asked for once more

let key = null; // of the setting whose forecast is shown or on its way
let stop = null;
let timer = 0;
let asked = {}; // what a person asked for beyond the usual: a large network, mends

// Neither the text nor how much of it is seen makes a difference to a forecast.
function keyOf({ text, tokens, ...rest }) {
  return JSON.stringify(rest);
}

function quit() {
  clearTimeout(timer);
  if (stop) stop.abort();
  stop = null;
}

// A control was turned: what is on its way is given up, unless it is of the same network.
export function turned(setting) {
  if (keyOf(setting) === key) return;
  quit();
  key = null;
  asked = {};
  $("forecast-card").classList.add("stale");
  $("forecast-card").setAttribute("aria-busy", "false");
  for (const name of ["forecast-ask", "forecast-mend"]) $(name).hidden = true;
  note("");
  $("mends-note").textContent = $("forecast-line").textContent = "";
}

// Everything else of the setting is there.
export function settled(setting) {
  if (keyOf(setting) === key) return;
  key = keyOf(setting);
  clearTimeout(timer);
  timer = setTimeout(() => start(setting), SETTLED);
}

// There is nothing to forecast: the controls were refused.
export function without() {
  quit();
  key = null;
}

function start(setting) {
  quit();
  const own = (stop = new AbortController());
  $("forecast-card").setAttribute("aria-busy", "true");
  $("forecast-ask").hidden = true;
  $("forecast-mend").disabled = true;
  if (asked.mends) $("mends-note").textContent = "Forecasting changes, which may take minutes …";
  else note("Forecasting …");
  $("forecast-ask").onclick = () => { asked.large = true; start(setting); };
  $("forecast-mend").onclick = () => { asked.mends = true; start(setting); };
  follow(setting, own);
}

async function follow(setting, own) {
  const gone = () => own.signal.aborted || stop !== own;
  try {
    let whole = false;
    for await (const part of answered("/api/forecast", { setting, ...asked }, own.signal)) {
      if (gone()) return;
      whole = part.part === "end";
      if (part.part === "forecast") show(part);
      if (part.part === "mends") mends(part);
    }
    if (gone()) return;
    if (!whole) throw Object.assign(new Error(""), { later: true });
    done();
  } catch (error) {
    if (gone()) return;
    if (error.later) { timer = setTimeout(() => start(setting), AGAIN); return; }
    done();
    $("forecast-card").classList.add("stale");
    note(error instanceof TypeError ? GONE : error.message);
    document.body.dataset.forecast = "error";
  }
}

function done() {
  stop = null;
  $("forecast-card").setAttribute("aria-busy", "false");
  document.body.dataset.forecast = asked.mends ? "mends" : "shown";
}

function note(words) {
  $("forecast-note").textContent = words;
  if (!words) delete document.body.dataset.forecast;
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

const chance = (probability) => probability.toFixed(2);

function show(part) {
  $("forecast-card").classList.remove("stale");
  $("forecast").hidden = Boolean(part.why);
  $("mends").hidden = true;
  $("forecast-ask").hidden = !part.ask;
  $("forecast-mend").hidden = !part.mends;
  $("forecast-mend").disabled = Boolean(asked.mends);
  note(part.why || "");
  if (part.why) return;
  $("forecast-line").textContent = `Forecast: it ${part.chance} (${chance(part.probability)}), place ${part.place} of 100; more below`;
  const numbers = [
    [chance(part.probability), `the probability that it learns: it ${part.chance}`],
    [`${part.place} of 100`, `its expected place among designs by loss, 1 the best (± ${part.spread})`],
  ];
  $("forecast-numbers").replaceChildren(...numbers.map(([number, words]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", words), element("dd", number));
    return pair;
  }));
  $("forecast-sentences").replaceChildren(...part.sentences.map((words) => element("li", words)));
}

function mends(part) {
  const all = part.done === part.total;
  $("forecast-mend").disabled = true;
  $("mends").hidden = part.mends.length === 0;
  $("mends-note").textContent = (!all ? `Forecasting changes: ${part.done} of ${part.total} kinds were tried …`
    : part.mends.length ? "Changes that make it no less probable to learn, weights drawn anew for each (?: a guess, unlike all that were trained):" : "No change that was tried makes it more probable to learn.");
  $("mends").tBodies[0].replaceChildren(...part.mends.map((mend) => {
    const row = document.createElement("tr");
    row.append(element("td", mend.change), element("td", chance(mend.probability) + (mend.guess ? "?" : "")), element("td", String(mend.place)));
    return row;
  }));
}
