/* Asks what was written since, draws it, and asks again. The body's data-measurements is the number of measurements that are drawn,
   data-metric what is shown. */
const $ = (id) => document.getElementById(id);
const EVERY = 2000; // milliseconds between two questions
const state = { run: 0, metric: decodeURIComponent(location.hash.slice(1)) || null, mark: "", asked: 0, timer: 0 };

async function ask() {
  const number = (state.asked += 1);
  clearTimeout(state.timer);
  const query = new URLSearchParams({ run: state.run, mark: state.mark, ...(state.metric && { metric: state.metric }) });
  try {
    const answer = await fetch("/api/training?" + query);
    const found = await answer.json();
    if (number !== state.asked) return; // another was asked for meanwhile
    if (!answer.ok) throw new Error(found.error);
    fault("");
    if (found.figures) {
      askSpikes();
      await show(found);
    }
    state.mark = found.mark;
    said();
  } catch (error) {
    if (number !== state.asked) return;
    fault(error instanceof TypeError ? "No answer: is rankscope follow still running?" : error.message);
  }
  state.timer = setTimeout(ask, EVERY);
}

// What came before spikes takes a while to find in a long run: nothing waits for it, and one question is open at a time.
let looking = false, again = false;
async function askSpikes() {
  again = looking;
  if (looking) return;
  looking = true;
  const run = state.run;
  try {
    const answer = await fetch("/api/spikes?" + new URLSearchParams({ run }));
    if (answer.ok && run === state.run) spikes(await answer.json());
  } catch { /* the next question of the page says that nobody answers */ }
  looking = false;
  if (again || run !== state.run) askSpikes();
}

function fault(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

let changed = Date.now();
function said() {
  const seconds = Math.round((Date.now() - changed) / 1000);
  $("state").textContent = seconds < 4 ? "up to date" : `nothing new for ${span(seconds)}`;
}

function span(seconds) {
  if (seconds < 90) return `${seconds} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const whole = (number) => number.toLocaleString("en-US");
const several = (number, what) => `${whole(number)} ${what}${number === 1 ? "" : "s"}`;

async function show(found) {
  changed = Date.now();
  const since = found.since ? ` · since ${new Date(found.since).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}` : "";
  const far = found.step === null ? "no measurement yet" : `step ${whole(found.step)} · ${several(found.measurements, "measurement")}`;
  $("about").textContent = `${found.model} · ${far}${since}`;
  const raised = found.elsewhere.reduce((sum, each) => sum + each.raised, found.raised);
  document.title = `${raised ? `(${raised}) ` : ""}${found.model}, step ${found.step ?? 0} · rankscope`;
  options(found);
  alarms(found);
  forecast(found.forecast);
  $("map-note").textContent = [
    found.heads && `Mean over ${found.heads} heads.`,
    found.zeros && "Values of zero are drawn at the lower end of the scale.",
    found.noise && "Grey: at or below its floor, which is rounding noise; dotted in the curves.",
    found.drawn && `Drawn are ${found.drawn} of ${whole(found.measurements)} measurements, and those with alarms.`,
    found.broken && `${several(found.broken, "reading")} of samples were no numbers: something overflowed.`,
    ...found.notes,
  ].filter(Boolean).join(" ");
  const { map, curves, paths } = found.figures;
  if (map && !matchMedia("(max-width: 56rem)").matches) curves.layout.height = map.layout.height; // they stand side by side
  if (map) {
    const groups = curves.data.map((trace) => trace.legendgroup).filter((name) => /^layer /.test(name));
    const lines = new Set(groups).size, layers = map.data[0].y.length; // of a deep network some layers have a line
    $("curves-title").textContent = `Over the steps, ${lines < layers ? `${lines} of the ${layers} layers` : "a line for each layer"}`;
  }
  $("run").closest(".card").classList.toggle("wide", !paths);
  for (const name of ["together", "map", "curves", "run", "gradients", "paths"]) {
    const figure = found.figures[name];
    $(name).closest(".card").hidden = !figure;
    if (figure) await rankscope.draw($(name), figure);
  }
  document.body.dataset.measurements = String(found.measurements);
  document.body.dataset.metric = found.metric ?? "";
}

function options(found) {
  const runs = $("run-choice");
  if (runs.options.length !== found.runs.length) runs.replaceChildren(...found.names.map((name, place) => new Option(name, place)));
  runs.title = found.runs[state.run];
  runs.hidden = found.runs.length < 2;
  const select = $("metric");
  const names = found.metrics.map((each) => each.name).join();
  if (select.dataset.names !== names) {
    select.dataset.names = names;
    select.replaceChildren(...found.metrics.map((each) => new Option(each.says, each.name)));
  }
  if (found.metric) select.value = found.metric;
}

function forecast(sentences) {
  $("forecast-card").hidden = sentences.length === 0;
  if ($("forecast").textContent === sentences.join("")) return; // what is read aloud is what is new
  $("forecast").replaceChildren(...sentences.map((words) => {
    const line = document.createElement("p");
    line.textContent = words;
    return line;
  }));
}

const made = (tag, text = "", ...parts) => {
  const element = document.createElement(tag);
  element.textContent = text;
  element.append(...parts);
  return element;
};

function spikes(found) {
  $("spikes-card").hidden = found.count === 0;
  const now = JSON.stringify(found);
  if ($("spikes").dataset.key === now) return; // what is read aloud is what is new
  $("spikes").dataset.key = now;
  $("spikes-title").textContent = several(found.count, "loss spike");
  const earlier = found.count - found.spikes.length;
  $("spikes-left").textContent = earlier ? `And ${whole(earlier)} earlier: rankscope spikes has all.` : "";
  $("spikes").replaceChildren(...found.spikes.map((spike) => {
    const head = made("p", "", made("b", `step ${whole(spike.step)}`), `the loss ${spike.loss}${spike.none && `; ${spike.none}`}`);
    if (!spike.events.length) return made("li", "", head);
    const rows = spike.events.map((event) => {
      const cells = [several(event.lead, "step"), event.title, event.place, event.rose ? "rose" : "fell", String(Number(event.chance.toPrecision(2)))];
      return made("tr", "", ...cells.map((text) => made("td", text)));
    });
    const titles = ["before it", "signal", "where", "", "chance"].map((text) => made("th", text));
    const table = made("table", "", made("thead", "", made("tr", "", ...titles)), made("tbody", "", ...rows));
    const more = spike.more ? [made("p", `And ${whole(spike.more)} more: rankscope spikes has all.`)] : [];
    return made("li", "", head, table, ...more);
  }));
}

function alarms(found) {
  const of = found.runs.length > 1 ? found.names[state.run] : "";
  $("alarms-card").classList.toggle("raised", found.raised + found.elsewhere.length > 0);
  $("alarms-title").textContent = `${found.raised ? several(found.raised, "alarm") : "Alarms"}${of && ` of ${of}`}`;
  $("none").textContent = `None so far${of && ` in ${of}`}.`;
  $("none").hidden = found.raised > 0;
  elsewhere(found);
  const key = (each) => `${each.step} ${each.rule} ${each.layer} ${each.head}`;
  const now = found.alarms.map(key).join();
  if ($("alarms").dataset.key === now) return; // what is read aloud is what is new
  $("alarms").dataset.key = now;
  $("alarms").replaceChildren(...found.alarms.map((each, place) => { // the first of the run, then the latest before the earlier
    const item = document.createElement("li");
    const when = document.createElement("b");
    when.textContent = `step ${whole(each.step)}${place === 0 && found.raised > 1 ? ", the first" : ""}`;
    const rule = document.createElement("small");
    rule.textContent = each.rule;
    when.append(rule);
    const words = document.createElement("span");
    const rest = each.sentence.replace(new RegExp(`^Step ${each.step}[,:] `), ""); // its step stands beside it
    words.textContent = rest.charAt(0).toUpperCase() + rest.slice(1);
    item.append(when, words);
    return item;
  }));
}

function elsewhere(found) {
  const now = JSON.stringify(found.elsewhere);
  if ($("elsewhere").dataset.key === now) return; // what is read aloud is what is new
  $("elsewhere").dataset.key = now;
  $("elsewhere").replaceChildren(...found.elsewhere.map((each) => {
    const name = made("button", found.names[each.run]);
    name.addEventListener("click", () => { $("run-choice").value = each.run; chooseRun(); });
    const rest = each.sentence.replace(new RegExp(`^Step ${each.step}[,:] `), "");
    const words = made("span", `${several(each.raised, "alarm")}${each.raised > 1 ? ", the first" : ""} at step ${whole(each.step)}: ${rest}`);
    return made("li", "", name, " ", words);
  }));
}

function chooseRun() {
  state.run = $("run-choice").value;
  ask();
}

$("run-choice").addEventListener("change", chooseRun);
$("metric").addEventListener("change", () => {
  state.metric = $("metric").value;
  history.replaceState(null, "", "#" + encodeURIComponent(state.metric));
  ask();
});
addEventListener("hashchange", () => { state.metric = decodeURIComponent(location.hash.slice(1)) || null; ask(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
ask();
