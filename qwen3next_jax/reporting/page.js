"use strict";
(() => {
  const root = document.documentElement;
  window.addEventListener("error", event => { root.dataset.error = event.message; });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const show = theme => { root.dataset.theme = theme; };
  show(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => show(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const number = value => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  };
  const row = (name, value, colour) => {
    const line = document.createElement("div"), left = document.createElement("span"), right = document.createElement("b");
    if (colour) {
      const dot = document.createElement("i");
      dot.style.background = colour;
      left.append(dot);
    }
    left.append(name);
    right.textContent = value;
    line.append(left, right);
    return line;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] < xs[high] - x ? low : high;
  };

  function lines(data, at) {
    const [low, high, begin, end] = data.x;
    if (at.x < begin - 4 || at.x > end + 4) return null;
    const to = data.log_x ? Math.log : x => x, share = (at.x - begin) / (end - begin);
    const scaled = to(low) + share * (to(high) - to(low)), x = data.log_x ? Math.exp(scaled) : scaled;
    const found = data.lines.filter(line => line[2].length).map(([label, colour, xs, ys]) => {
      const i = nearest(xs, x);
      return {label, colour, x: xs[i], y: ys[i]};
    });
    if (!found.length) return null;
    const closest = found.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a).x;
    const where = data.names.length ? data.names[Math.round(closest)] : number(closest);
    return {
      rows: [row(data.label, where), ...found.map(f => row(f.label || "value", number(f.y), f.colour))],
      cursor: begin + (to(closest) - to(low)) / (to(high) - to(low)) * (end - begin),
    };
  }

  function heat(data, at) {
    const [x0, x1, y0, y1] = data.box;
    const column = Math.floor((at.x - x0) / (x1 - x0) * data.columns.length);
    const line = Math.floor((at.y - y0) / (y1 - y0) * data.rows.length);
    if (column < 0 || line < 0 || column >= data.columns.length || line >= data.rows.length) return null;
    return {rows: [row(data.names[0], data.rows[line]), row(data.names[1], data.columns[column]),
                   row("value", number(data.values[line][column]))]};
  }

  for (const figure of document.querySelectorAll("figure[data-kind=lines], figure[data-kind=heat]")) {
    const svg = figure.querySelector("svg.chart"), source = figure.querySelector("script");
    if (!svg || !source) continue;
    let data = null, cursor = null;  // parsed when first pointed at: the page opens sooner
    svg.addEventListener("pointermove", event => {
      data = data || JSON.parse(source.textContent);
      const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
      const at = {x: (event.clientX - box.left) / box.width * view.width, y: (event.clientY - box.top) / box.height * view.height};
      const found = (figure.dataset.kind === "lines" ? lines : heat)(data, at);
      tip.hidden = !found;
      if (!found) { if (cursor) cursor.remove(); return; }
      tip.replaceChildren(...found.rows);
      const left = event.clientX + 16 + tip.offsetWidth > window.innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
      tip.style.left = `${Math.max(left, 4)}px`;
      tip.style.top = `${Math.max(Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 6), 4)}px`;
      if (found.cursor !== undefined) {
        cursor = cursor || document.createElementNS("http://www.w3.org/2000/svg", "line");
        cursor.setAttribute("class", "axis");
        for (const [name, value] of [["x1", found.cursor], ["x2", found.cursor], ["y1", data.y[2]], ["y2", data.y[3]]])
          cursor.setAttribute(name, value);
        svg.append(cursor);
      }
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; if (cursor) cursor.remove(); });
  }
})();
