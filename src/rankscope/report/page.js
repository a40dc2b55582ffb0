/* Puts every figure of the report into its place, to be drawn as it comes near the screen, and makes it printable.
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
