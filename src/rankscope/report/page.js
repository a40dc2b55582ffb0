/* Puts every figure of the report into its place, to be drawn as it comes near the screen, and makes it printable; sorts tables.
   The root's data-drawn is "near" once those about the first screen are drawn, and "all" once every one is. */
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const id of Object.keys(figures)) rankscope.later(document.getElementById(id), figures[id]);

  function told() {
    if (!document.documentElement.dataset.drawn) performance.mark("rankscope-drawn");
    document.documentElement.dataset.drawn = rankscope.waiting() ? "near" : "all";
  }
  addEventListener("rankscope-drawn", told);

  // Tables to sort: by what a cell's data-key says, a number or a word; what has none comes last.
  function order(a, b) {
    const one = Number(a), other = Number(b);
    if (!Number.isNaN(one) && !Number.isNaN(other)) return one - other;
    return a < b ? -1 : a > b ? 1 : 0;
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.key;
      const rows = [...table.tBodies[0].rows];
      const known = rows.filter((row) => key(row) !== undefined);
      known.sort((a, b) => (down ? -1 : 1) * order(key(a), key(b)));
      table.tBodies[0].append(...known, ...rows.filter((row) => key(row) === undefined));
    }));
  }

  let closed = [];
  addEventListener("beforeprint", () => { // draw.js has drawn all figures by now
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
    told();
  });
  addEventListener("afterprint", () => {
    for (const each of closed) each.open = false;
  });
})();
