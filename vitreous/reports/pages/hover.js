"use strict";
// Charts with `data-hover` show the values of the points next to the cursor: on hover, touch and arrow keys.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const { by, series } = JSON.parse(svg.dataset.hover), box = svg.viewBox.baseVal;
  const chart = document.createElement("div"), tooltip = document.createElement("div"), marks = document.createElementNS(svg.namespaceURI, "g");
  const points = series.flatMap(({ name, colour, points }) => points.map(([x, y, title, value]) => ({ name, colour, x, y, title, value })));
  const stops = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  let current = null;
  chart.className = "chart"; tooltip.className = "hover"; tooltip.hidden = true; svg.tabIndex = 0;
  svg.replaceWith(chart); chart.append(svg, tooltip); svg.append(marks);

  // the nearest point, or in charts by x the nearest point of each curve within `reach`
  function select(x, y, reach) {
    const distance = (point) => Math.hypot(point.x - x, by === "x" ? 0 : point.y - y);
    const nearest = (candidates) => candidates.reduce((best, point) => distance(point) < distance(best) ? point : best);
    if (by === "point") return [nearest(points)];
    const selected = series.map(({ name }) => points.filter((point) => point.name === name)).filter((own) => own.length).map(nearest);
    const closest = Math.min(...selected.map(distance));
    return selected.filter((point) => distance(point) <= Math.max(closest, reach));
  }

  function show(selected) {
    const scale = svg.clientWidth / box.width, mark = (name, attributes) => {
      const node = document.createElementNS(svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return node;
    };
    current = selected[0].x;
    marks.replaceChildren(...selected.map(({ x, y, colour }) => mark("circle", { cx: x, cy: y, r: 3.5 / scale, fill: colour })));
    tooltip.replaceChildren(...[...new Set(selected.map(({ title }) => title))].map((title) => Object.assign(document.createElement("b"), { textContent: title })),
      ...selected.map(({ name, colour, value }) => {
        const line = document.createElement("span"), key = document.createElement("i");
        key.style.background = colour;
        line.append(...(name ? [key, `${name} `] : []), value);
        return line;
      }));
    tooltip.hidden = false;
    const left = selected[0].x * scale + 12, top = Math.min(...selected.map(({ y }) => y)) * scale - tooltip.offsetHeight - 8;
    tooltip.style.left = `${Math.max(0, Math.min(left, chart.clientWidth - tooltip.offsetWidth))}px`;
    tooltip.style.top = `${Math.max(0, top)}px`;
  }

  function hide() { tooltip.hidden = true; marks.replaceChildren(); current = null; }

  function follow(event) {
    const area = svg.getBoundingClientRect(), scale = box.width / area.width;
    show(select((event.clientX - area.left) * scale, (event.clientY - area.top) * scale, 10 * scale));
  }
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
  addEventListener("pointerdown", (event) => { if (!chart.contains(event.target)) hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!direction) return;
    const index = current === null ? stops.length - (direction < 0 ? 0 : 1) : stops.indexOf(current);
    const x = stops[Math.min(stops.length - 1, Math.max(0, index + direction))];
    show(by === "point" ? [points.find((point) => point.x === x)] : select(x, 0, 0));
    event.preventDefault();
  });
}
