// Remedies against collapse: chosen ones as a line of text, attnscale:w=0.5;sqrtl, and as boxes with their numbers.
const $ = (id) => document.getElementById(id);

const split = (line) => (line ? line.split(";") : []);
const nameOf = (spec) => spec.split(":")[0];

// Numbers that a line names, as it writes them.
function numbers(spec) {
  const said = spec.slice(nameOf(spec).length + 1);
  return Object.fromEntries(said.split(",").filter(Boolean).map((part) => part.split("=")).map(([key, ...of]) => [key, of.join("=")]));
}

// What differs from the published numbers.
function written(name, values) {
  const said = Object.entries(values).map(([key, of]) => `${key}=${of}`).join(",");
  return said ? `${name}:${said}` : name;
}

let turn = null;
let line = null;
const lineNow = () => split(line());

export function listRemedies(networks, onTurn, current) {
  turn = (specs) => onTurn(specs.length ? specs.join(";") : null);
  line = current;
  for (const { name, says } of networks.remedies) {
    const option = document.createElement("option");
    option.value = name;
    option.textContent = `${name}: ${says}`;
    $("remedies").append(option);
  }
  $("remedies").addEventListener("change", () => {
    const name = $("remedies").value;
    $("remedies").value = "";
    if (name) turn([...lineNow(), name]);
  });
}

// A box for each, made anew where others are chosen than before; a field that is being written in is left alone.
export function showRemedies(text, networks) {
  const specs = split(text);
  const names = specs.map(nameOf);
  const place = $("remedied");
  if (place.dataset.names !== names.join(";") || place.children.length !== names.length) {
    place.dataset.names = names.join(";");
    place.replaceChildren(...names.map((name, at) => box(name, at, networks.remedies.find((each) => each.name === name))));
  }
  place.hidden = specs.length === 0;
  $("remedies").disabled = specs.length >= networks.limits.remedies;
  for (const option of $("remedies").options) option.disabled = names.includes(option.value);
  specs.forEach((spec, at) => {
    const said = numbers(spec);
    for (const input of place.children[at].querySelectorAll("input")) {
      if (document.activeElement !== input) input.value = said[input.dataset.number] ?? input.placeholder;
    }
  });
}

function box(name, at, known) {
  const found = document.createElement("fieldset");
  const legend = document.createElement("legend");
  legend.textContent = name;
  const out = document.createElement("button");
  out.type = "button";
  out.textContent = "×";
  out.className = "out";
  out.setAttribute("aria-label", `Take out ${name}`);
  out.title = `Take out ${name}`;
  out.addEventListener("click", () => { turn(lineNow().filter((_, index) => index !== at)); $("remedies").focus(); });
  const says = document.createElement("p");
  says.textContent = known ? `${known.says} (${known.source})` : "not known here";
  found.append(legend, out, says, ...Object.entries(known?.numbers ?? {}).map(([key, usual]) => field(name, at, key, usual)));
  return found;
}

function field(name, at, key, usual) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, { type: "number", step: "any", placeholder: String(usual) });
  input.dataset.number = key;
  input.addEventListener("input", () => {
    const specs = lineNow();
    const { [key]: _, ...rest } = numbers(specs[at]);
    const same = input.value === "" || Number(input.value) === usual;
    specs[at] = written(name, same ? rest : { ...rest, [key]: input.value });
    turn(specs);
  });
  label.append(key, " ", input);
  return label;
}
