"use strict";
// Sorting: a click on a heading; numbers by value, texts by alphabet, empty cells last.
function sortBy(header) {
  const table = header.closest("table"), column = header.cellIndex, body = table.tBodies[0];
  const direction = header.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
  for (const other of header.parentNode.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const value = (row) => row.cells[column].dataset.v;
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const x = Number(a), y = Number(b);
    return sign * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
  };
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
}
for (const button of document.querySelectorAll(".sortable th button"))
  button.addEventListener("click", () => sortBy(button.parentNode));

// The values of a mark, for the pointer, for a finger and for the keyboard.
const tip = document.getElementById("tip");
function tell(mark) {
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const box = mark.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = Math.min(Math.max(4, box.x + box.width / 2 - width / 2), innerWidth - width - 4) + "px";
  tip.style.top = (box.y > height + 12 ? box.y - height - 8 : box.bottom + 8) + "px";
}
function untell(chart) {
  tip.hidden = true;
  chart.querySelectorAll(".chosen").forEach((mark) => mark.classList.remove("chosen"));
}
for (const mark of document.querySelectorAll("[data-tip]")) {
  mark.addEventListener("pointerenter", () => tell(mark));
  mark.addEventListener("pointerleave", () => { tip.hidden = true; });
  mark.addEventListener("click", () => tell(mark));
}
for (const chart of document.querySelectorAll("figure.chart > svg")) {
  chart.addEventListener("blur", () => untell(chart));
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") untell(chart);
    if (!step) return;
    event.preventDefault();
    const marks = [...chart.querySelectorAll(".series:not(.off) [data-tip]")];
    const now = marks.findIndex((mark) => mark.classList.contains("chosen"));
    const next = marks[(now + step + marks.length) % marks.length] ?? marks[0];
    untell(chart);
    next.classList.add("chosen");
    tell(next);
  });
}
// The legend shows and hides series.
for (const button of document.querySelectorAll("[data-switch]"))
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    const chart = button.closest("figure");
    chart.querySelector(`[data-series="${button.dataset.switch}"]`).classList.toggle("off", !on);
  });
