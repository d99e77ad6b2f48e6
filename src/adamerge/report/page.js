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
// The axes follow the series that are shown.  The places of the first drawing are kept, and new ones computed from them.
const first = (element, name) => Number(element.dataset[name] ??= element.getAttribute(name));
function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const found = [], last = Math.floor(high / step + 1e-9);
  for (let number = Math.ceil(low / step - 1e-9); number <= last; number++) found.push(Number((number * step).toPrecision(6)));
  return found;
}
// Draws an axis around values at these pixels of the first drawing; gives the function from old pixels to new ones.
function redraw(axis, pixels, fromZero) {
  if (!axis || !pixels.length) return (pixel) => pixel;
  const [low, high, start, end] = ["low", "high", "start", "end"].map((name) => Number(axis.dataset[name]));
  const values = pixels.map((pixel) => low + ((pixel - start) / (end - start)) * (high - low));
  const least = Math.min(...values), most = Math.max(...values);
  const room = 0.06 * (most - least) || Math.max(Math.abs(most) * 0.1, 1e-9);
  const from = fromZero ? 0 : least - room, to = most + room;
  const at = (value) => start + ((value - from) / (to - from)) * (end - start);
  const upright = axis.classList.contains("y-axis");
  const text = axis.querySelector("text"), line = axis.querySelector("line");
  const below = upright ? (axis.dataset.below ??= text.getAttribute("y") - line.getAttribute("y1")) : 0;
  axis.replaceChildren(...ticks(from, to).flatMap((value) => {
    const words = text.cloneNode(), rule = line?.cloneNode();
    words.textContent = value;
    words.setAttribute(upright ? "y" : "x", at(value) + Number(below));
    for (const name of ["y1", "y2"]) rule?.setAttribute(name, at(value));
    return rule ? [rule, words] : [words];
  }));
  return (pixel) => at(low + ((pixel - start) / (end - start)) * (high - low));
}
function rescale(chart) {
  const all = [...chart.querySelectorAll(".series")], across = [], up = [];
  const level = chart.querySelector(".level"), bars = chart.querySelector(".bar") !== null;
  if (!all.some((one) => !one.classList.contains("off"))) return;
  const places = new Map();
  for (const one of all) {
    const curve = one.querySelector("polyline"), lines = [...one.querySelectorAll("line")], rects = [...one.querySelectorAll("rect")];
    const points = curve ? (curve.dataset.points ??= curve.getAttribute("points")).split(" ").map((at) => at.split(",").map(Number)) : [];
    places.set(one, { curve, points, lines, rects, marks: [...one.querySelectorAll("path.mark")] });
    if (one.classList.contains("off")) continue;
    for (const [x, y] of points) { across.push(x); up.push(y); }
    for (const line of lines) up.push(first(line, "y1"), first(line, "y2"));
    for (const rect of rects) up.push(first(rect, "y"), first(rect, "y") + first(rect, "height"));
  }
  if (level) up.push(first(level, "y1"));
  const x = redraw(chart.querySelector(".x-axis"), across, false), y = redraw(chart.querySelector(".y-axis"), up, bars);
  for (const { curve, points, lines, rects, marks } of places.values()) {
    curve?.setAttribute("points", points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "));
    points.forEach(([a, b], number) => marks[number].setAttribute("transform", `translate(${x(a) - a} ${y(b) - b})`));
    for (const line of lines) {
      for (const name of ["x1", "x2"]) line.setAttribute(name, x(first(line, name)));
      for (const name of ["y1", "y2"]) line.setAttribute(name, y(first(line, name)));
    }
    for (const rect of rects) {
      const top = first(rect, "y"), floor = top + first(rect, "height");
      rect.setAttribute("y", y(top));
      rect.setAttribute("height", y(floor) - y(top));
    }
  }
  if (level) for (const name of ["y1", "y2"]) level.setAttribute(name, y(first(level, name)));
}
// The legend shows and hides series.
for (const button of document.querySelectorAll("[data-switch]"))
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    const chart = button.closest("figure");
    chart.querySelector(`[data-series="${button.dataset.switch}"]`).classList.toggle("off", !on);
    rescale(chart);
  });
