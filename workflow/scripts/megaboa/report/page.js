// A click on a column's head sorts its table, by number where there are numbers; the rest of the page needs no script.
"use strict";
(() => {
  const scales = { ms: 1e-3, s: 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, B: 1e9, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "%": 1 };
  const value = (cell) => {
    const text = (cell?.textContent ?? "").trim();
    const found = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([A-Za-z%]*)/.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * (scales[found[2]] ?? 1) : text;
  };
  const order = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
    return typeof a === "number" ? -1 : 1;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [value(row.cells[column]), row]);
        rows.sort(([a], [b]) => {
          if (a === "" || b === "") return (a === "") - (b === "");
          return down ? order(b, a) : order(a, b);
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));
})();
