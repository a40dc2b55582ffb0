/* Draws the figures of rankscope.figures.page with plotly, in the reader's theme.

   rankscope.draw(element, figure)                    one figure; again to put another in its place
   rankscope.choose(element, [{label, figure}, ...])  several, one at a time, with a choice above them
   rankscope.later(element, [{label, figure}, ...])   the same, drawn when it comes near the screen; its place is kept
   rankscope.waiting()                                how many figures that were put off are not drawn yet
   rankscope.csv(figure)                              its data as text
   rankscope.retheme()                                after data-theme of the root element has changed

   A figure is {data, layout, table, alt, panels[, frames][, panel]}; layout.height is that of one row of panels, panel
   the pixels that a panel needs across. Colours
   @ink, @faint, @paper and @order 0.3 follow the theme. Figures are saved as PNG, SVG and CSV from plotly's bar, always in
   light colours. Nothing here turns text into markup. */
var rankscope = (function () {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const coarse = matchMedia("(pointer: coarse)");
  const VIRIDIS = [
    "#440154", "#481467", "#482576", "#453781", "#404688", "#39558c", "#33638d", "#2d718e", "#287d8e",
    "#238a8d", "#1f968b", "#20a386", "#29af7f", "#3dbc74", "#56c667", "#75d054", "#95d840", "#bade28",
    "#dde318", "#fde725",
  ];
  const THEMES = {
    light: { ink: "#1c1e21", faint: "#7b8087", grid: "#e4e6ea", paper: "#ffffff", order: VIRIDIS.slice(0, 15) },
    dark: { ink: "#e9e8e4", faint: "#8d939a", grid: "#34393f", paper: "#1e2124", order: VIRIDIS.slice(5) },
  };
  const NARROW = 620; // pixels under which margins are small and squares have no numbers
  const PANEL = 290; // pixels that a panel needs across
  const PRINTED = 680; // pixels across a printed page
  const states = new Map();
  let printing = false;

  function theme() {
    if (printing) return THEMES.light;
    const asked = document.documentElement.dataset.theme;
    return THEMES[asked] || THEMES[dark.matches ? "dark" : "light"];
  }

  function namedColour(name, colours) {
    const order = /^order ([\d.]+)$/.exec(name);
    if (!order) return colours[name] || colours.ink;
    const place = Number(order[1]) * (colours.order.length - 1);
    return colours.order[Math.min(colours.order.length - 1, Math.round(place))];
  }

  // Only values under a key that names a colour: a token may well read "@ink".
  function coloured(value, colours, key) {
    if (typeof value === "string") {
      return /color/.test(key) && value[0] === "@" ? namedColour(value.slice(1), colours) : value;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, colours, key));
    if (value && typeof value === "object") {
      const found = {};
      for (const name of Object.keys(value)) {
        found[name] = coloured(value[name], colours, /color/.test(key) ? key + name : name);
      }
      return found;
    }
    return value;
  }

  // Pixels that a legend needs below the axes, where its rows break at their width. Traces in groups stand one after the
  // other with a gap between rows, others in columns of the same width.
  function legendHeight(figure, width) {
    const size = ((figure.layout.legend || {}).font || {}).size || 13;
    const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false);
    const rooms = named.map((trace) => 52 + 0.53 * size * trace.name.length);
    if (!rooms.length || figure.layout.showlegend === false) return 0;
    let across = 0, rows = 1;
    const grouped = named.some((trace) => trace.legendgroup);
    for (const room of rooms) {
      if (across && across + room > width) { rows += 1; across = 0; }
      across += room;
    }
    if (!grouped) rows = Math.ceil(rooms.length / Math.max(1, Math.floor(width / Math.max(...rooms))));
    return (grouped ? size + 17 : size + 7) * rows + (grouped ? 6 : 14);
  }

  const textOf = (markup) => markup.replace(/<br>.*$/, "").replace(/<[^>]*>/g, "");

  // Labels that would stand on each other are left out: first stay 1, the lowest and the highest, then those from below.
  function thinned(axis, pixels, size) {
    const { tickvals, ticktext, range } = axis;
    if (!tickvals || !ticktext || !range || range[0] === range[1]) return;
    const at = (value) => ((value - range[0]) / (range[1] - range[0])) * pixels;
    const inside = tickvals.map((value, k) => k).filter((k) => at(tickvals[k]) >= -1 && at(tickvals[k]) <= pixels + 1);
    if (inside.length < 2) return;
    const one = inside.find((k) => tickvals[k] === 0);
    const order = [one, inside[0], inside[inside.length - 1], ...inside].filter((k) => k !== undefined);
    const kept = new Set();
    for (const k of order) {
      if ([...kept].every((other) => other === k || Math.abs(at(tickvals[k]) - at(tickvals[other])) >= 1.35 * size)) kept.add(k);
    }
    axis.tickvals = tickvals.filter((_, k) => kept.has(k));
    axis.ticktext = ticktext.filter((_, k) => kept.has(k));
  }

  // Whole numbers at such steps that their labels do not touch.
  function stepped(axis, pixels, size, traces) {
    if (!axis.dtick) return;
    const [low, high] = axis.range || [0, Math.max(0, ...traces.flatMap((trace) => (trace.x || []).filter(Number.isFinite)))];
    const room = 0.6 * size * String(Math.round(high)).length + 8;
    while (high > low && (pixels * axis.dtick) / (high - low) < room) axis.dtick *= 2;
  }

  // Pixels that the labels of the axes on the left need, and their title.
  function labelled(layout) {
    let most = 0;
    for (const key of Object.keys(layout)) {
      if (!/^yaxis\d*$/.test(key)) continue;
      const title = layout[key].title && layout[key].title.text ? 30 : 8;
      for (const text of layout[key].ticktext || []) {
        const [base, raised] = text.replace("</sup>", "").split("<sup>");
        most = Math.max(most, title + 10 + 7.5 * base.length + 5.5 * (raised || "").length);
      }
    }
    return most;
  }

  function layoutOf(figure, colours, width) {
    const layout = coloured(figure.layout, colours, "");
    const panels = figure.panels || 1;
    const between = Math.max(figure.panel ? 56 : 72, labelled(layout)); // pixels between two panels in a row
    const headings = (layout.annotations || []).filter((each) => /domain$/.test(each.xref)).map((each) => textOf(each.text).length);
    const needed = figure.panel || Math.max(PANEL, between + 7.6 * Math.max(0, ...headings));
    let columns = layout.grid ? layout.grid.columns : 1;
    columns = Math.max(1, Math.min(columns, Math.floor(width / needed)));
    const rows = Math.ceil(panels / columns);
    const margin = layout.margin;
    margin.l = Math.max(margin.l, labelled(layout)); // plotly's own automargin draws everything twice
    if (width < NARROW) margin.r = 8;
    const free = width - margin.l - margin.r;
    const legend = legendHeight(figure, free);
    layout.showlegend = legend > 0;
    const titled = Object.keys(layout).some((key) => /^xaxis/.test(key) && (layout[key].title || {}).text);
    margin.b = (titled ? 50 : 28) + legend;
    layout.height = (layout.height - 60) * rows + 60 + Math.max(0, legend - 36);
    const high = layout.height - margin.t - margin.b;
    const below = 62 + (margin.t > 60 ? 16 : 0); // labels and title of an axis, and the heading of the panel beneath
    if (layout.grid) {
      layout.grid.columns = columns;
      layout.grid.rows = rows;
      // Gaps are shares of what a panel has with its gap.
      layout.grid.xgap = columns > 1 ? (columns * between) / (free + between) : 0;
      layout.grid.ygap = rows > 1 ? Math.max(0.3, (rows * below) / (high + below)) : 0;
    }
    const bar = figure.data.some((trace) => trace.colorbar || (trace.marker || {}).colorbar) ? 90 : 0; // it stands beside the axes
    const panelWide = (free - bar - (columns - 1) * between) / columns;
    const panelHigh = rows > 1 ? (high / (rows - layout.grid.ygap)) * (1 - layout.grid.ygap) : high;
    layout.width = width;
    layout.paper_bgcolor = "rgba(0,0,0,0)";
    layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: "system-ui, -apple-system, 'Segoe UI', sans-serif", size: 13, color: colours.ink };
    layout.hoverlabel = {
      bgcolor: colours.paper, bordercolor: colours.faint, align: "left", namelength: -1,
      font: { color: colours.ink, size: 13 },
    };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: colours.faint, activecolor: colours.ink };
    layout.dragmode = coarse.matches ? false : "zoom"; // a finger that scrolls must not zoom
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) {
        const axis = layout[key];
        const size = (axis.tickfont || {}).size || 13;
        if (key[0] === "y") thinned(axis, panelHigh, size);
        else stepped(axis, panelWide, size, figure.data.filter((trace) => (trace.xaxis || "x") === key.replace("axis", "")));
        if (axis.title && axis.title.standoff === undefined) axis.title = { ...axis.title, standoff: 8 };
        Object.assign(axis, {
          gridcolor: colours.grid, linecolor: colours.faint, zerolinecolor: colours.faint,
          tickcolor: colours.faint,
        });
      }
    }
    return layout;
  }

  function widthOf(element) {
    return printing ? Number(element.dataset.printed) || PRINTED : Math.max(240, Math.floor(element.getBoundingClientRect().width));
  }

  function saved(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function bytesOf(url) {
    const comma = url.indexOf(",");
    const body = url.slice(comma + 1);
    if (!/;base64/.test(url.slice(0, comma))) return decodeURIComponent(body);
    return Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  }

  async function image(element, format) {
    const figure = states.get(element).shown();
    const colours = THEMES.light;
    const layout = layoutOf(figure, colours, 900);
    layout.paper_bgcolor = colours.paper;
    const drawn = { data: coloured(figure.data, colours, ""), layout, config: { staticPlot: true } };
    const url = await Plotly.toImage(drawn, {
      format, width: 900, height: layout.height, scale: format === "png" ? 2 : 1,
    });
    const type = format === "png" ? "image/png" : "image/svg+xml";
    saved(new Blob([bytesOf(url)], { type }), nameOf(element) + "." + format);
  }

  function nameOf(element) {
    return (element.id || "figure").replace(/[^\w-]+/g, "_");
  }

  function csv(figure) {
    const columns = Object.keys(figure.table || {});
    const cell = (value) => {
      if (value === null || value === undefined) return "";
      let text = String(value);
      // A spreadsheet would run a text of this beginning as a formula.
      if (typeof value === "string" && text.length > 1 && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
      return /[",\r\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
    };
    const rows = columns.length ? figure.table[columns[0]].length : 0;
    const lines = [columns.map(cell).join(",")];
    for (let row = 0; row < rows; row += 1) {
      lines.push(columns.map((name) => cell(figure.table[name][row])).join(","));
    }
    return lines.join("\r\n") + "\r\n";
  }

  function button(label, title, click) {
    return { name: label, title, icon: icon(label), click };
  }

  function icon(label) {
    const svg =
      '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 34 20"><text x="17" y="15" text-anchor="middle" ' +
      'font-family="system-ui, sans-serif" font-size="14" font-weight="600">' + label + "</text></svg>";
    return { width: 34, height: 20, svg };
  }

  const CONFIG = {
    displaylogo: false,
    displayModeBar: true,
    responsive: false,
    plotlyServerURL: "", // plotly would offer to send figures there
    modeBarButtons: [["zoom2d", "pan2d", "autoScale2d", "resetScale2d"], [
      button("PNG", "Save as PNG", (element) => image(element, "png")),
      button("SVG", "Save as SVG", (element) => image(element, "svg")),
      button("CSV", "Save the data as CSV", (element) => {
        saved(new Blob([csv(states.get(element).figure)], { type: "text/csv" }), nameOf(element) + ".csv");
      }),
    ]],
  };

  // One drawing of an element at a time: what is asked for meanwhile is drawn once, after it, as things stand then.
  function render(state) {
    state.drawn = state.stale = true;
    state.turn = state.turn || turns(state).finally(() => { state.turn = null; });
    return state.turn;
  }

  async function turns(state) {
    while (state.stale) {
      state.stale = false;
      try {
        await paint(state);
      } catch (error) {
        if (!state.stale) throw error;
      }
    }
  }

  function paint(state) {
    const { element } = state;
    const colours = theme();
    state.width = widthOf(element);
    const figure = state.shown();
    const data = coloured(figure.data, colours, "");
    const layout = layoutOf(figure, colours, state.width);
    if (state.width < NARROW) for (const trace of data) {
      delete trace.texttemplate; // numbers do not fit into the squares of a map on a phone
    }
    kept(state, layout.height);
    state.colours = printing ? null : colours; // what was printed is drawn again
    return Plotly.react(element, data, layout, CONFIG).then(() => named(element, state.figure.alt));
  }

  // The page does not move when a figure is drawn into its place.
  function kept(state, height) {
    if (state.put) state.element.style.minHeight = height + "px";
  }

  function sized(state) {
    if (state.drawn) return render(state);
    state.width = widthOf(state.element);
    kept(state, layoutOf(state.shown(), theme(), state.width).height);
    return undefined;
  }

  function named(element, alt) {
    const drawing = element.querySelector(".svg-container");
    if (drawing) { drawing.setAttribute("role", "img"); drawing.setAttribute("aria-label", alt || "figure"); }
    for (const part of element.querySelectorAll(".modebar-btn")) {
      part.setAttribute("tabindex", "0");
      part.setAttribute("role", "button");
      part.setAttribute("aria-label", part.getAttribute("data-title") || "");
      if (part.dataset.keyed || part.tagName === "BUTTON") continue;
      part.dataset.keyed = "yes";
      part.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          part.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
        }
      });
    }
  }

  const watcher = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const state = states.get(entry.target);
      if (state && !printing && widthOf(state.element) !== state.width) requestAnimationFrame(() => sized(state));
    }
  });

  function draw(element, figure) {
    return render(taken(element, figure));
  }

  function taken(element, figure) {
    let state = states.get(element);
    if (!state) {
      state = { element, at: Infinity, playing: null }; // a cloud is first shown at the last layer
      states.set(element, state);
      watcher.observe(element);
    }
    stop(state);
    state.figure = figure;
    state.at = figure.frames ? Math.min(state.at, figure.frames.length - 1) : 0;
    state.shown = () => framed(state.figure, state.at);
    player(state);
    return state;
  }

  // The figure as it stands at a frame.
  function framed(figure, at) {
    if (!figure.frames) return figure;
    const frame = figure.frames[at];
    const data = figure.data.map((trace, k) => Object.assign({}, trace, frame.data[k]));
    return Object.assign({}, figure, { data, layout: Object.assign({}, figure.layout, frame.layout) });
  }

  function controls(element) {
    let before = element.previousElementSibling;
    if (!before || !before.classList.contains("rs-controls")) {
      before = document.createElement("div");
      before.className = "rs-controls";
      element.before(before);
    }
    return before;
  }

  function player(state) {
    const frames = state.figure.frames;
    const there = states.get(state.element).player;
    if (!frames) { if (there) { there.box.remove(); state.player = null; } return; }
    if (!there) state.player = makePlayer(state);
    state.player.slider.max = String(frames.length - 1);
    label(state);
  }

  function makePlayer(state) {
    const box = document.createElement("div");
    box.className = "rs-player";
    const start = document.createElement("button");
    start.type = "button";
    start.textContent = "▶ play";
    start.addEventListener("click", () => (state.playing ? stop(state) : play(state)));
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = "0";
    slider.step = "1";
    slider.setAttribute("aria-label", "layer");
    slider.addEventListener("input", () => { stop(state); go(state, Number(slider.value)); });
    const said = document.createElement("output");
    box.append(start, slider, said);
    controls(state.element).append(box);
    return { box, start, slider, said };
  }

  function label(state) {
    const { slider, said } = state.player;
    const name = state.figure.frames[state.at].name;
    slider.value = String(state.at);
    slider.setAttribute("aria-valuetext", "layer " + name);
    said.textContent = "layer " + name;
  }

  function go(state, at) {
    state.at = at;
    label(state);
    const figure = state.shown();
    const colours = theme();
    if (calm.matches || !state.drawn || state.turn) return render(state);
    return Plotly.animate(
      state.element,
      {
        data: figure.data.map(({ x, y }) => ({ x, y })),
        traces: figure.data.map((_, k) => k),
        layout: { annotations: coloured(figure.layout.annotations || [], colours, "") },
      },
      { transition: { duration: 450, easing: "cubic-in-out" }, frame: { duration: 450, redraw: true }, mode: "immediate" }
    ).catch(() => undefined); // another frame came before this one was through
  }

  function play(state) {
    const number = state.figure.frames.length;
    if (state.at === number - 1) state.at = -1;
    state.player.start.textContent = "❚❚ pause";
    const step = () => {
      go(state, state.at + 1);
      if (state.at === number - 1) stop(state);
    };
    state.playing = setInterval(step, 900);
    step();
  }

  function stop(state) {
    if (!state.playing) return;
    clearInterval(state.playing);
    state.playing = null;
    state.player.start.textContent = "▶ play";
  }

  let groups = 0;
  function choose(element, views) {
    return render(chosen(element, views));
  }

  function chosen(element, views) {
    // The views of one figure may share what is saved as CSV.
    for (const view of views) if (!view.figure.table) view.figure.table = views[0].figure.table;
    if (views.length === 1) return taken(element, views[0].figure);
    const group = document.createElement("fieldset");
    const name = "rs-choice-" + (groups += 1);
    group.className = "rs-choice";
    group.setAttribute("aria-label", "what is drawn");
    views.forEach((view, number) => {
      const words = document.createElement("label");
      const input = document.createElement("input");
      input.type = "radio";
      input.name = name;
      input.checked = number === 0;
      input.addEventListener("change", () => draw(element, view.figure));
      words.append(input, document.createTextNode(view.label));
      group.append(words);
    });
    controls(element).prepend(group);
    return taken(element, views[0].figure);
  }

  // Those near the screen, one after another so that the page stays at hand; what was scrolled past is not drawn.
  const wanted = new Set();
  let busy = false;
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) wanted[entry.isIntersecting ? "add" : "delete"](entry.target);
    drawWanted();
  }, { rootMargin: "50% 0px" });

  async function drawWanted() {
    if (busy) return;
    busy = true;
    for (const element of wanted) {
      wanted.delete(element);
      near.unobserve(element);
      try {
        if (!states.get(element).drawn) await render(states.get(element));
      } catch (error) {
        console.error(error); // the others are drawn all the same
      }
      await new Promise((resolve) => setTimeout(resolve));
    }
    busy = false;
    dispatchEvent(new Event("rankscope-drawn"));
  }

  function later(element, views) {
    const state = chosen(element, views);
    state.put = true;
    sized(state);
    near.observe(element);
  }

  function waiting() {
    return [...states.values()].filter((state) => !state.drawn).length;
  }

  // Those in other colours than the theme's, one after another so that the page answers meanwhile, those on the screen first.
  let retheming = false;
  async function retheme() {
    if (retheming) return;
    retheming = true;
    const away = ({ element }) => Math.max(0, element.getBoundingClientRect().top - innerHeight, -element.getBoundingClientRect().bottom);
    const others = () => (printing ? [] : [...states.values()].filter((state) => state.drawn && state.colours !== theme()));
    for (let left = others(); left.length; left = others()) {
      const [state] = left.sort((a, b) => away(a) - away(b));
      try {
        await render(state);
      } catch (error) {
        console.error(error); // the others are drawn all the same
        state.colours = theme();
      }
      await new Promise((resolve) => setTimeout(resolve));
    }
    retheming = false;
  }

  // A browser prints what is there when this returns.
  function print() {
    printing = true;
    for (const state of states.values()) {
      state.drawn = true;
      (async () => paint(state))().catch((error) => console.error(error));
    }
  }

  dark.addEventListener("change", retheme);
  setInterval(retheme, 1000); // a page behind others may never be told
  addEventListener("beforeprint", print);
  addEventListener("afterprint", () => { printing = false; retheme(); });

  return { draw, choose, later, waiting, csv, retheme };
})();
