"use strict";
(() => {
  const root = document.documentElement;
  window.addEventListener("error", event => { root.dataset.error = event.message; });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const show = theme => { root.dataset.theme = theme; };
  show(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => show(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));

  // ---- Text

  const escape = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
  const number = value => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e10)) return value.toExponential(3);
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
  };
  const short = (value, digits = 4) => {  // the same as short_number in charts.py
    const size = Math.abs(value), rounded = v => String(Number(v.toPrecision(digits)));
    for (const [unit, scale] of [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (size >= scale * (unit === "k" ? 10 : 1)) return rounded(value / scale) + unit;
    return size > 0 && size < 1e-4 ? String(Number(value.toPrecision(digits - 2))) : rounded(value);
  };
  const tickLabels = ticks => {  // with as many digits as tell the ticks apart
    for (let digits = 4; ; digits++) {
      const labels = ticks.map(tick => short(tick, digits));
      if (digits === 8 || new Set(labels).size === labels.length) return labels;
    }
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
  const button = (text, title, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.title = title;
    made.addEventListener("click", () => act(made));
    return made;
  };

  // ---- What the reader has chosen for all charts

  const chosen = {smooth: 0, hidden: new Set(), group: null};  // group: run → number of its group
  const series = i => i < 8 ? `var(--series-${i})` : `hsl(${Math.round(i * 137.508 % 360)} 60% 50%)`;
  const colourOf = line => line.run !== undefined && chosen.group ? series(chosen.group[line.run]) : line.colour;

  // ---- Scales

  const linearTicks = (low, high, count, whole) => {
    const rough = Math.max((high - low) / count, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= rough * 0.999 && !(whole && s % 1));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (low, high, count) => {
    let ticks = [];
    for (const multiples of [[1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
      ticks = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
        for (const m of multiples) if (low <= m * 10 ** p && m * 10 ** p <= high) ticks.push(m * 10 ** p);
      if (ticks.length <= count + 1) break;
    }
    const every = Math.max(1, Math.ceil(ticks.length / (count + 1)));
    ticks = ticks.filter((_, i) => i % every === 0);
    return ticks.length >= 2 ? ticks : linearTicks(low, high, count - 1, false);
  };
  const scale = (low, high, begin, end, log, whole) => {
    const f = log ? v => Math.log10(Math.max(v, 1e-30)) : v => v, a = f(low), b = f(high);
    const at = v => begin + (f(v) - a) / (b - a) * (end - begin);
    at.value = place => { const v = a + (place - begin) / (end - begin) * (b - a); return log ? 10 ** v : v; };
    at.ticks = count => log ? logTicks(low, high, count) : linearTicks(low, high, count, whole);
    return Object.assign(at, {low, high, begin, end});
  };
  const widened = (low, high) => {
    if (high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low, high];
    const pad = 0.1 * Math.abs(high) || 0.1;
    return [low - pad, high + pad];
  };

  // ---- Line charts

  const smoothable = line => !line.dots && line.joined !== false && line.y.length >= 10;
  const smoothed = ys => {  // exponential moving average, without the pull of its start towards 0
    let sum = 0, weight = 0;
    return ys.map(y => {
      if (y === null) return null;
      sum = chosen.smooth * sum + (1 - chosen.smooth) * y;
      weight = chosen.smooth * weight + 1 - chosen.smooth;
      return sum / weight;
    });
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  const TOP = 10, LEFT = 54, RIGHT = 14, BOTTOM = 34, MOST = 12;  // MOST lines in a legend and under the pointer

  class Chart {
    constructor(figure, svg, data) {
      Object.assign(this, {figure, svg, data, log: data.log, logX: data.logX, drawn: false, pin: null});
      this.legend = figure.querySelector(".legend");
      const positive = data.lines.some(line => line.y.some(y => y > 0));
      if (positive) this.toggle("log y", "logarithmic y axis", this.log, on => { this.log = on; });
      if (!data.names.length && data.lines.some(line => line.x.some(x => x > 0)))
        this.toggle("log x", "logarithmic x axis", this.logX, on => { this.logX = on; });
      tools(figure).append(button("CSV", "the values of the lines shown, as a file", () => this.save()));
    }

    toggle(text, title, on, act) {
      const made = button(text, title, () => {
        on = !on;
        made.setAttribute("aria-pressed", on);
        act(on);
        this.draw();
      });
      made.setAttribute("aria-pressed", on);
      tools(this.figure).append(made);
    }

    get late() { return this.data.late && !this.log && !this.logX; }

    get lines() { return this.data.lines.filter(line => line.run === undefined || !chosen.hidden.has(line.run)); }

    ranges(lines) {
      const ok = v => v !== null && (v > 0 || !this.log), {data} = this;
      const xs = lines.flatMap(line => [line.x.find(x => x > 0 || !this.logX), line.x[line.x.length - 1]]).filter(x => x !== undefined);
      const x = data.names.length ? [-0.5, data.names.length - 0.5] : widened(Math.min(...xs), Math.max(...xs));
      const within = start => {
        let low = Infinity, high = -Infinity;
        for (const line of lines) for (const ys of [line.y, line.low, line.high]) if (ys)
          ys.forEach((y, i) => { if (line.x[i] >= start && ok(y)) { low = Math.min(low, y); high = Math.max(high, y); } });
        return low <= high ? [low, high] : null;
      };
      const all = within(-Infinity) || [1e-3, 1];
      let [low, high] = this.late ? within(x[0] + 0.03 * (x[1] - x[0])) || all : all;
      for (const [, value] of data.references) if (ok(value)) { low = Math.min(low, value); high = Math.max(high, value); }
      if (this.log) {
        const [a, b] = widened(Math.log10(low), Math.log10(high)), margin = 0.04 * (b - a);
        return [x, [10 ** (a - margin), 10 ** (b + margin)]];
      }
      const positive = low >= 0;
      [low, high] = widened(low, high);
      const margin = 0.05 * (high - low);
      if (positive) return [x, [data.zero ? 0 : Math.max(low - margin, 0), high + margin]];
      return [x, [low - margin, data.zero ? Math.max(high + margin, 0) : high + margin]];
    }

    draw() {
      const {svg, data, lines} = this, shownWidth = svg.clientWidth || document.querySelector("main").clientWidth - 50;
      // On a narrow screen the drawing has the screen's own units, so that its labels stay readable.
      const width = shownWidth < 520 ? Math.max(shownWidth, 240) : 600, height = 250, bottom = height - BOTTOM, right = width - RIGHT;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.drawn = true;
      const cut = this.figure.querySelector(".cut");
      if (cut) cut.hidden = !this.late;
      if (!lines.length) {
        svg.innerHTML = `<text x="${width / 2}" y="${height / 2}" text-anchor="middle">no run chosen</text>`;
        this.x = null;
        return this.name(lines);
      }
      const [[x0, x1], [y0, y1]] = this.ranges(lines);
      const x = this.x = scale(x0, x1, LEFT, right, this.logX, data.whole), y = this.y = scale(y0, y1, bottom, TOP, this.log);
      const parts = [], path = (xs, ys) => {
        let text = "", on = false;
        xs.forEach((v, i) => {
          const fits = ys[i] !== null && (ys[i] > 0 || !this.log) && (v > 0 || !this.logX);
          if (fits) text += `${on ? "L" : "M"}${x(v).toFixed(1)} ${Math.min(Math.max(y(ys[i]), -1e5), 1e5).toFixed(1)}`;
          on = fits;
        });
        return text;
      };
      const yTicks = y.ticks(5), yLabels = tickLabels(yTicks);
      yTicks.forEach((tick, i) => parts.push(`<line class="grid" x1="${LEFT}" x2="${right}" y1="${y(tick).toFixed(1)}" y2="${y(tick).toFixed(1)}"/>` +
        `<text x="${LEFT - 6}" y="${(y(tick) + 3.5).toFixed(1)}" text-anchor="end">${yLabels[i]}</text>`));
      const room = Math.max(2, Math.round(width / 95)), names = data.names, every = Math.ceil(names.length / Math.min(12, 2 * room)) || 1;
      const ticks = names.length ? names.map((_, i) => i).filter(i => i % every === 0) : x.ticks(room);
      const labels = names.length ? ticks.map(i => names[i]) : tickLabels(ticks);
      ticks.forEach((tick, i) => parts.push(`<text x="${Math.min(x(tick), width - 2).toFixed(1)}" y="${bottom + 14}" text-anchor="` +
        `${x(tick) > width - 24 ? "end" : "middle"}">${escape(labels[i])}</text>`));
      parts.push(`<line class="axis" x1="${LEFT}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`,
        `<text class="axis-label" x="${(LEFT + right) / 2}" y="${height - 5}" text-anchor="middle">${escape(data.label)}</text>`);
      for (const [at, text, kind] of data.marks) if (at >= x0 && at <= x1)
        parts.push(`<line class="mark ${kind}" x1="${x(at).toFixed(1)}" x2="${x(at).toFixed(1)}" y1="${TOP}" y2="${bottom}"><title>${escape(text)}</title></line>`);
      const frame = `y="${TOP - 2}" width="${width}" height="${bottom - TOP + 5}" viewBox="0 ${TOP - 2} ${width} ${bottom - TOP + 5}"`;
      parts.push(`<svg ${frame}>`);
      for (const line of lines) {
        const soft = chosen.smooth > 0 && smoothable(line), of = line.run === undefined ? "" : ` data-run="${line.run}"`;
        const style = `stroke="${colourOf(line)}"${line.dash ? ` stroke-dasharray="${line.dash}"` : ""}${of}`;
        if (line.low && !soft) {
          const stretches = [[]];  // the indices of neighbouring points at which the band is drawn
          line.x.forEach((v, i) => {
            if (path([v], [line.low[i]]) && path([v], [line.high[i]])) stretches[stretches.length - 1].push(i);
            else stretches.push([]);
          });
          const edges = stretches.filter(part => part.length).map(part => {
            const back = [...part].reverse(), at = (ys, order) => path(order.map(i => line.x[i]), order.map(i => ys[i]));
            return `${at(line.high, part)}L${at(line.low, back).slice(1)}Z`;
          });
          parts.push(`<path class="band" d="${edges.join("")}" fill="${colourOf(line)}"${of}/>`);
        }
        if (soft) parts.push(`<path class="line raw" d="${path(line.x, line.y)}" ${style}/>`);
        if (line.joined !== false) parts.push(`<path class="line" d="${path(line.x, soft ? smoothed(line.y) : line.y)}" ${style}/>`);
        const points = line.y.filter(v => v !== null).length;
        if (line.dots && line.x.length <= 60 || points === 1) line.x.forEach((v, i) => {
          if (line.y[i] !== null && (line.y[i] > 0 || !this.log) && (v > 0 || !this.logX))
            parts.push(`<circle cx="${x(v).toFixed(1)}" cy="${y(line.y[i]).toFixed(1)}" r="2.5" fill="${colourOf(line)}"${of}/>`);
        });
      }
      parts.push("</svg>");
      for (const [label, value] of data.references) if (value > 0 || !this.log) {
        const at = y(value), below = at - TOP < 12 || data.references.some(([, other]) => at - y(other) > 0 && at - y(other) < 13);
        parts.push(`<line class="reference" x1="${LEFT}" x2="${right}" y1="${at.toFixed(1)}" y2="${at.toFixed(1)}"/>` +
          `<text class="reference" x="${right - 2}" y="${(at + (below ? 11 : -4)).toFixed(1)}" text-anchor="end">${escape(label)}</text>`);
      }
      svg.innerHTML = parts.join("");
      this.name(lines);
      if (this.pin !== null) this.mark(this.pin, "pin");
    }

    name(lines) {  // the legend
      if (!this.legend) {
        this.legend = document.createElement("div");
        this.legend.className = "legend";
        this.svg.before(this.legend);
      }
      const labelled = lines.filter(line => line.label), named = labelled.length <= MOST ? labelled : [];
      this.legend.innerHTML = named.map(line => `<span><svg width="18" height="8"><path d="M0 4H18" stroke="${colourOf(line)}" stroke-width="2.5"` +
        `${line.dash ? ` stroke-dasharray="${line.dash}"` : ""}/></svg>${escape(line.label)}</span>`).join("");
    }

    at(place) {  // the values at a place of the x axis, and the x that is nearest to it
      const wanted = this.x.value(place.x);
      const found = this.lines.filter(line => line.x.length).map(line => {
        const i = nearest(line.x, wanted);
        return {label: line.label, colour: colourOf(line), x: line.x[i], y: line.y[i]};
      });
      if (!found.length) return null;
      const closest = found.reduce((a, b) => Math.abs(b.x - wanted) < Math.abs(a.x - wanted) ? b : a).x;
      const distance = f => f.y === null ? Infinity : Math.abs(this.y(f.y) - place.y);
      const shown = found.length > MOST ? [...found].sort((a, b) => distance(a) - distance(b)).slice(0, MOST) : found;
      const where = this.data.names.length ? this.data.names[Math.round(closest)] : number(closest);
      const rows = [row(this.data.label, where), ...shown.map(f => row(f.label || "value", number(f.y), f.colour))];
      if (shown.length < found.length) rows.push(row(`${found.length - shown.length} more lines`, ""));
      return {rows, x: closest};
    }

    mark(x, name) {
      this.svg.querySelector(`.${name}`)?.remove();
      if (x === null || !this.x) return;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      line.setAttribute("class", `axis ${name}`);
      for (const [key, value] of [["x1", this.x(x)], ["x2", this.x(x)], ["y1", this.y.begin], ["y2", this.y.end]]) line.setAttribute(key, value);
      this.svg.append(line);
    }

    point(place) {
      if (!this.drawn) this.draw();
      if (!this.x || place.x < this.x.begin - 4 || place.x > this.x.end + 4) return null;
      const found = this.at(place);
      this.mark(found && found.x, "cursor");
      return found;
    }

    leave() { this.mark(null, "cursor"); }

    hold(x) {  // shows the values at x below the chart until they are closed
      if (!this.drawn) this.draw();
      if (!this.x) return;
      const found = this.at({x: this.x(x), y: 0});
      if (!found) return;
      this.pin = found.x;
      this.mark(this.pin, "pin");
      this.box?.remove();
      this.box = document.createElement("div");
      this.box.className = "pinned";
      this.box.append(...found.rows, button("×", "close", () => {
        this.box.remove();
        this.mark(this.pin = null, "pin");
        history.replaceState(null, "", " ");
      }));
      this.figure.append(this.box);
      history.replaceState(null, "", `#${this.figure.id}@${this.pin}`);
    }

    save() {
      const names = this.data.names;
      save(this.figure.id, [["line", this.data.label, "value", "lowest", "highest"], ...this.lines.flatMap(line =>
        line.x.map((x, i) => [line.label, names.length ? names[x] : x, line.y[i], (line.low || line.y)[i], (line.high || line.y)[i]]))]);
    }
  }

  // ---- Heatmaps

  class Heatmap {
    constructor(figure, svg, data) {
      Object.assign(this, {figure, svg, data});
      tools(figure).append(button("CSV", "the values as a file", () => save(figure.id, [[...data.names, "value"],
        ...data.rows.flatMap((name, i) => data.columns.map((column, j) => [name, column, data.values[i][j]]))])));
    }

    point(place) {
      const {data} = this, [x0, x1, y0, y1] = data.box;
      const column = Math.floor((place.x - x0) / (x1 - x0) * data.columns.length);
      const line = Math.floor((place.y - y0) / (y1 - y0) * data.rows.length);
      if (column < 0 || line < 0 || column >= data.columns.length || line >= data.rows.length) return null;
      return {rows: [row(data.names[0], data.rows[line]), row(data.names[1], data.columns[column]), row("value", number(data.values[line][column]))]};
    }

    leave() {}
  }

  const tools = figure => {
    let found = figure.querySelector(".tools");
    if (!found) {
      found = document.createElement("span");
      found.className = "tools";
      figure.querySelector("figcaption").append(found);
    }
    return found;
  };
  const save = (name, rows) => {
    const cell = value => {
      if (typeof value === "number") return value;
      const text = value === null || value === undefined ? "" : String(value);
      return `"${(/^[=+\-@]/.test(text) ? "'" : "") + text.replace(/"/g, '""')}"`;  // a spreadsheet reads no formula
    };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([rows.map(cells => cells.map(cell).join(",")).join("\n") + "\n"], {type: "text/csv"}));
    link.download = `${name}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  };

  // ---- Pointing

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const place = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return {x: (event.clientX - box.left) / box.width * view.width, y: (event.clientY - box.top) / box.height * view.height};
  };
  const charts = [], ids = new Set();
  for (const figure of document.querySelectorAll("figure")) {
    const slug = "chart-" + figure.querySelector("figcaption").textContent.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
    let id = slug;
    for (let i = 2; ids.has(id); i++) id = `${slug}-${i}`;
    ids.add(figure.id = id);
    const svg = figure.querySelector("svg.chart"), source = figure.querySelector("script");
    if (!svg || !source) continue;
    const data = JSON.parse(source.textContent);
    const chart = figure.dataset.kind === "lines" ? new Chart(figure, svg, data) : new Heatmap(figure, svg, data);
    if (chart instanceof Chart) charts.push(chart);
    svg.addEventListener("pointermove", event => {
      const found = chart.point(place(svg, event));
      tip.hidden = !found;
      if (!found) return chart.leave();
      tip.replaceChildren(...found.rows);
      const left = event.clientX + 16 + tip.offsetWidth > window.innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
      tip.style.left = `${Math.max(left, 4)}px`;
      tip.style.top = `${Math.max(Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 6), 4)}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; chart.leave(); });
    if (chart instanceof Chart) svg.addEventListener("click", event => {
      const found = chart.point(place(svg, event));
      if (found) chart.hold(found.x);
    });
  }

  let waiting = false;
  const drawAll = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; charts.forEach(chart => chart.draw()); });
  };
  const slider = document.getElementById("smoothing");
  slider.parentElement.hidden = !charts.some(chart => chart.data.lines.some(smoothable));
  slider.addEventListener("input", event => { chosen.smooth = Number(event.target.value); drawAll(); });

  // ---- The table of runs

  const list = document.getElementById("runs-table");
  if (list) {
    const rows = [...list.tBodies[0].rows], settings = JSON.parse(document.getElementById("settings").textContent);
    const names = Object.keys(settings), search = document.getElementById("search"), colour = document.getElementById("colour");
    const groups = document.getElementById("groups"), box = tr => tr.querySelector("input"), run = tr => Number(tr.dataset.run);
    const wanted = tr => search.value.toLowerCase().split(/\s+/).filter(Boolean).every(word => word.includes("=")
      ? names.some(name => `${name}=${settings[name][run(tr)]}`.toLowerCase().endsWith(word))
      : tr.cells[0].textContent.toLowerCase().includes(word));
    const choose = () => {
      chosen.hidden.clear();
      for (const tr of rows) {
        tr.hidden = !wanted(tr);
        if (tr.hidden || !box(tr).checked) chosen.hidden.add(run(tr));
      }
      const values = colour.value === "" ? null : settings[names[Number(colour.value)]];
      const distinct = values && [...new Set(values)];
      chosen.group = values && values.map(value => distinct.indexOf(value));
      for (const tr of rows) tr.querySelector("i").style.background = series(chosen.group ? chosen.group[run(tr)] : run(tr));
      groups.innerHTML = distinct ? distinct.map((value, i) => `<span><i style="background:${series(i)}"></i>${escape(value)}</span>`).join("") : "";
      document.getElementById("chosen").textContent = `${rows.length - chosen.hidden.size} of ${rows.length} runs`;
      for (const part of document.querySelectorAll("[data-run]:is(figure, div, details)")) part.hidden = chosen.hidden.has(Number(part.dataset.run));
      drawAll();
    };
    search.addEventListener("input", choose);
    colour.addEventListener("change", choose);
    list.addEventListener("change", choose);
    for (const [id, checked] of [["all", true], ["none", false]]) document.getElementById(id).addEventListener("click", () => {
      for (const tr of rows) if (!tr.hidden) box(tr).checked = checked;
      choose();
    });
    const style = document.createElement("style");  // the line of the row under the pointer stands out
    document.head.append(style);
    list.addEventListener("pointerover", event => {
      const tr = event.target.closest("tbody tr");
      style.textContent = tr ? `svg [data-run]:not([data-run="${tr.dataset.run}"]) { opacity: .1 }` : "";
    });
    list.addEventListener("pointerleave", () => { style.textContent = ""; });
    const value = cell => {
      const text = cell.textContent, unit = {k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18}[text.slice(-1)] || 1;
      const amount = parseFloat(text.replace(/,/g, ""));
      return Number.isNaN(amount) ? text : amount * unit;
    };
    [...list.tHead.rows[0].cells].forEach((head, i) => {
      head.title = "sort";
      head.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of list.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = [...rows].sort((a, b) => {
          const [p, q] = [value(a.cells[i]), value(b.cells[i])];
          const less = typeof p === typeof q ? p < q ? -1 : p > q ? 1 : 0 : typeof p === "number" ? -1 : 1;
          return up ? less : -less;
        });
        list.tBodies[0].append(...order);
      });
    });
    choose();
  }

  // ---- Width, and links to a point

  let width = 0;
  const fit = () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    if (charts.some(chart => chart.drawn || chart.svg.clientWidth && chart.svg.clientWidth < 520)) charts.forEach(chart => chart.draw());
  };
  window.addEventListener("resize", fit);
  fit();
  const follow = () => {
    const [, id, x] = decodeURIComponent(location.hash).match(/^#(chart-.+)@(-?[\d.e+-]+)$/) || [];
    const chart = charts.find(chart => chart.figure.id === id);
    if (!chart) return;
    for (let part = chart.figure.parentElement; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    chart.hold(Number(x));
    chart.figure.scrollIntoView({block: "center"});
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
