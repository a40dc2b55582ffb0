// A setting as a link: what differs from the usual setting, in the fragment of the address.

export const USUAL = Object.freeze({
  model: "random", text: "", tokens: 32, skip: null, mlp: true, norm: true, mask: null, window: null,
  divisor: null, temperature: 1, layers: null, remedies: null,
});
export const SHAPE = Object.freeze({
  layers: 6, width: 64, heads: 4, seed: 0, init: "bert", mlp: "plain", norm: "layer", place: "post",
  positions: "none", parallel: false,
});
const WORDS = new Set(["model", "text", "mask", "remedies", "init", "place", "positions"]);
const SHAPE_WORDS = new Set(["init", "mlp", "norm", "place", "positions"]);

// What does not read as it should goes to the server as it is, which says in a sentence what it expected.
function value(text, word) {
  if (word) return text;
  if (text === "true" || text === "false") return text === "true";
  const number = Number(text);
  return text.trim() !== "" && Number.isFinite(number) ? number : text;
}

function written(setting, usual) {
  const found = new URLSearchParams();
  for (const [name, item] of Object.entries(setting)) {
    if (name === "shape") {
      if (setting.model !== "random") continue;
      for (const [part, of] of Object.entries(item)) {
        if (of !== SHAPE[part]) found.set("shape." + part, String(of));
      }
    } else if (name === "model" || (item !== null && item !== usual[name])) { // another explorer may begin with another model
      found.set(name, String(item));
    }
  }
  return found;
}

function read(parameters, usual) {
  const setting = { ...usual, shape: { ...SHAPE } };
  for (const [name, text] of parameters) {
    if (name === "A" || name === "B" || name === "focus") continue;
    if (name.startsWith("shape.")) {
      const part = name.slice(6);
      setting.shape = { ...setting.shape, [part]: value(text, SHAPE_WORDS.has(part)) };
    } else {
      setting[name] = value(text, WORDS.has(name));
    }
  }
  return setting;
}

// A setting without what no control could take out of it again.
export function known(setting) {
  const kept = (of, usual) => Object.fromEntries(Object.entries(of).filter(([name]) => Object.hasOwn(usual, name)));
  return { ...kept(setting, USUAL), shape: kept(setting.shape, SHAPE) };
}

// A setting as the server takes it: the shape of a random network is of no concern to others.
export function sent({ shape, ...setting }) {
  return setting.model === "random" ? { ...setting, shape } : setting;
}

export function toFragment({ setting, pins, focus }, usual) {
  const found = written(setting, usual);
  for (const name of ["A", "B"]) {
    if (pins[name]) found.set(name, written(pins[name], usual).toString());
  }
  if (focus !== "now") found.set("focus", focus);
  return found.toString();
}

export function fromFragment(fragment, usual) {
  const parameters = new URLSearchParams(fragment.replace(/^#/, ""));
  const pins = { A: null, B: null };
  for (const name of ["A", "B"]) {
    if (parameters.has(name)) pins[name] = read(new URLSearchParams(parameters.get(name)), usual);
  }
  const focus = parameters.get("focus");
  return { setting: read(parameters, usual), pins, focus: Object.hasOwn(pins, focus) && pins[focus] ? focus : "now" };
}
