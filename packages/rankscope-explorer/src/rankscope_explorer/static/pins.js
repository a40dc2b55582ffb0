// What a pinned setting is, in words: how it differs from the one at hand.
const SAID = {
  model: (of) => (of === "random" ? "a random network" : of),
  text: () => "another text",
  tokens: (of) => `${of} tokens`,
  skip: (of) => (of === null ? "the model's own skips" : of === 0 ? "no skips" : `skip weight ${of}`),
  mlp: (of) => (of ? "with MLP" : "no MLP"),
  norm: (of) => (of ? "with norm" : "no norm"),
  mask: (of) => (of === null ? "the model's own mask" : `mask ${of}`),
  window: (of) => (of === null ? "no window" : `window ±${of}`),
  divisor: (of) => (of === null ? "the model's own score divisor" : `score divisor ${of}`),
  temperature: (of) => `temperature ×${of}`,
  layers: (of) => (of === null ? "the model's own depth" : `depth ${of}`),
  remedies: (of) => (of === null ? "no remedy" : `with ${of.replaceAll(";", ", then ")}`),
};
const SHAPE = {
  layers: (of) => `${of} layers`, heads: (of) => `${of} heads`, norm: (of) => `${of} norm`, place: (of) => `${of}-norm`,
  mlp: (of) => `${of} MLP`, init: (of) => `${of} weights`, positions: (of) => `${of} positions`,
  parallel: (of) => (of ? "parallel branches" : "branches one after the other"),
};

export function differences(pin, now) {
  const found = Object.keys(SAID).filter((name) => pin[name] !== now[name]).map((name) => SAID[name](pin[name]));
  if (pin.model === "random" && now.model === "random") {
    const parts = Object.entries(pin.shape).filter(([part, of]) => of !== now.shape[part]);
    found.push(...parts.map(([part, of]) => (SHAPE[part] ? SHAPE[part](of) : `${part} ${of}`)));
  }
  return found.join(", ") || "the same as now";
}
