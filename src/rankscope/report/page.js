/* Draws every figure of the report, one after another so that the page stays at hand, and makes it printable. */
(async function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const id of Object.keys(figures)) {
    await rankscope.choose(document.getElementById(id), figures[id]);
    await new Promise((resolve) => setTimeout(resolve));
  }
  performance.mark("rankscope-drawn");
  document.documentElement.dataset.drawn = "yes";

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of closed) each.open = false;
  });
})();
