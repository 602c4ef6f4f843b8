"use strict";
// Draws the curves. Everything that comes from a run's files goes in as text, never as markup.
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  const single = runs.length === 1;
  const HEIGHT = 250, MARGIN = { top: 16, right: 12, bottom: 34, left: 52 };
  const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const metrics = [...new Set(runs.map((run) => run.metric))];
  const sentence = (words) => words[0].toUpperCase() + words.slice(1);
  const CHARTS = [
    { title: "Loss", log: true, keys: { train_loss: "training", test_loss: "test", gate_loss: "gate's loss", gate_level: "gate: prune below" } },
    { title: `${sentence(metrics.join(" / "))} on the test set`, unit: metrics.length === 1 ? runs[0].unit : "", focus: true, keys: { score: metrics.join(" / ") } },
    { title: "What is left of the network", unit: " %", zero: true, keys: { weights_percent: "weights", flops_percent: "FLOPs" } },
  ];
  let axis = "epoch", cursor = null;
  const charts = [];
  const home = document.getElementById("charts");
  const hiddenRuns = new Set(), runsLegend = html("ul", { class: "legend" }); // for all charts, when there are several runs

  function html(tag, attributes = {}, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }
  function svg(tag, attributes = {}, ...children) {
    return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const color = (number) => `var(--c${number % 8})`;
  const shown = (value, unit = "") => {
    if (value === null || value === undefined) return "–";
    return (unit ? value.toFixed(2) : Math.abs(value) >= 0.001 || value === 0 ? String(Number(value.toPrecision(4))) : value.toExponential(2)) + unit;
  };
  const at = (x) => (axis === "epoch" ? `epoch ${x}` : duration(x));
  function duration(seconds) {
    if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
    return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }
  function nearest(values, x) {
    let best = 0;
    values.forEach((value, index) => { if (Math.abs(value - x) < Math.abs(values[best] - x)) best = index; });
    return best;
  }

  // --- scales ---------------------------------------------------------------------------------------------------------

  function ticks(low, high, wanted) {
    const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
    const marks = [];
    for (let mark = Math.ceil(low / step - 1e-9) * step; mark <= high + step * 1e-9; mark += step) marks.push(Number(mark.toPrecision(12)));
    return marks;
  }
  function logTicks(low, high) {
    const marks = [], decades = Math.log10(high / low);
    const factors = decades > 3 ? [1] : decades > 2 ? [1, 3] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors) marks.push(Number((factor * 10 ** power).toPrecision(6)));
    return marks.filter((mark) => mark >= low && mark <= high);
  }
  /** The values that an axis is made for: all, or those of the last part of each run, where the result is. */
  function wanted(curves, chart) {
    const end = (values) => (chart.focused ? values.slice(-Math.max(2, Math.ceil(values.length * 0.6))) : values);
    const drawable = (value) => typeof value === "number" && (!chart.logarithmic || value > 0);
    const all = curves.flatMap((curve) => curve.values.filter(drawable)), values = curves.flatMap((curve) => end(curve.values).filter(drawable));
    if (!chart.focused || !values.length) return all;
    // Not so close that noise looks like news: what lies within four points, or hundredths, of the end is shown too.
    const low = Math.min(...values), high = Math.max(...values), room = chart.unit ? 4 : 0.04 * Math.max(Math.abs(low), Math.abs(high));
    return all.filter((value) => value >= Math.min(low, high - room) && value <= Math.max(high, low + room));
  }
  function range(values, chart) {
    let low = Math.min(...values), high = Math.max(...values);
    if (chart.logarithmic) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    if (chart.zero) return [0, Math.max(100, high)];
    return [low - margin, chart.unit ? Math.min(high + margin, Math.max(100, high)) : high + margin];
  }

  // --- one chart --------------------------------------------------------------------------------------------------------

  class Chart {
    constructor({ title, unit = "", log = false, zero = false, focus = false, keys }) {
      this.height = HEIGHT; this.focus = this.focused = focus;
      this.title = title; this.unit = unit; this.zero = zero; this.logarithmic = log; this.keys = keys;
      this.key = Object.keys(keys)[0]; // the one that is compared, when there are several runs
      if (!single && keys.test_loss) this.key = "test_loss";
      this.hidden = single ? new Set() : hiddenRuns;
      const identity = `chart-${charts.length}`;
      this.bar = html("div", { class: "bar" }, html("h3", { id: identity }, title));
      this.plot = html("div", { class: "plot", tabindex: "0", role: "slider", "aria-labelledby": identity, "aria-roledescription": "chart, walked with the arrow keys", "aria-valuemin": "0" });
      this.tip = html("div", { class: "tip", hidden: "" });
      this.legend = single ? html("ul", { class: "legend" }) : runsLegend;
      this.numbers = html("details", {}, html("summary", { class: "small" }, "The numbers"));
      this.element = html("div", { class: "chart" }, this.bar, this.plot, ...(single ? [this.legend] : []), this.numbers);
      this.controls();
      this.listen();
      charts.push(this);
    }

    controls() {
      const names = Object.entries(this.keys);
      if (!single && names.length > 1) {
        const select = html("select", { "aria-label": `${this.title}: which` }, ...names.map(([key, name]) => html("option", { value: key }, name)));
        select.value = this.key;
        select.addEventListener("change", () => { this.key = select.value; this.draw(); });
        this.bar.append(select);
      }
      if (this.logarithmic) {
        const box = html("input", { type: "checkbox", checked: "" });
        box.addEventListener("change", () => { this.logarithmic = box.checked; this.draw(); });
        this.bar.append(html("label", { class: "choice" }, box, "logarithmic"));
      }
      if (this.focused) {
        const box = html("input", { type: "checkbox" });
        box.addEventListener("change", () => { this.focused = !box.checked; this.draw(); });
        this.bar.append(html("label", { class: "choice" }, box, "from the start"));
      }
      this.numbers.addEventListener("toggle", () => this.list());
    }

    listen() {
      const point = (event) => {
        const box = this.plot.getBoundingClientRect();
        const x = this.x && this.x.from(event.clientX - box.left);
        if (x !== undefined) choose(this.snap(x), this);
      };
      this.plot.addEventListener("pointermove", point);
      this.plot.addEventListener("pointerdown", point);
      this.plot.addEventListener("pointerleave", () => { if (document.activeElement !== this.plot) choose(null, this); });
      this.plot.addEventListener("blur", () => choose(null, this));
      this.plot.addEventListener("focus", () => { if (cursor === null) choose(this.steps()[this.steps().length - 1], this); });
      this.plot.addEventListener("keydown", (event) => {
        const steps = this.steps();
        const here = cursor === null ? steps.length - 1 : nearest(steps, cursor);
        const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowDown: here - 1, ArrowUp: here + 1, PageDown: here - 10, PageUp: here + 10, Home: 0, End: steps.length - 1 };
        if (event.key === "Escape") choose(null, this);
        else if (event.key in moves) choose(steps[Math.max(0, Math.min(steps.length - 1, moves[event.key]))], this);
        else return;
        event.preventDefault();
      });
    }

    /** The curves: of one run all kinds (dashed where they may lie upon each other), of several runs one kind. */
    series() {
      const curves = single
        ? Object.entries(this.keys).map(([key, name], number) => ({ run: runs[0], name, number, dash: DASHES[this.zero ? (number + Math.floor(number / 8)) % DASHES.length : Number(key === "gate_level")], values: this.values(runs[0], key), steps: key === "gate_level" }))
        : runs.map((run, number) => ({ run, name: run.label, number, dash: DASHES[Math.floor(number / 8) % DASHES.length], values: this.values(run, this.key), steps: this.key === "gate_level" }));
      return curves.filter((curve) => curve.values.some((value) => value !== null && value !== undefined));
    }
    values(run, key) {
      if (key in run.series) return run.series[key];
      const layer = run.layers.find((candidate) => `layer ${candidate.name}` === key);
      return layer ? layer.values : [];
    }
    visible() { return this.series().filter((curve) => !this.hidden.has(curve.name)); }
    steps() { return [...new Set(this.series().flatMap((curve) => curve.run[axis]))].sort((a, b) => a - b); }
    snap(x) { const steps = this.steps(); return steps[nearest(steps, x)]; }

    draw() {
      const curves = this.visible(), width = Math.max(240, this.plot.clientWidth);
      const all = wanted(curves, this);
      const picture = svg("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
      this.plot.replaceChildren(picture, this.tip);
      this.drawLegend();
      const xs = this.steps();
      this.plot.setAttribute("aria-valuemax", String(Math.max(0, xs.length - 1)));
      if (!all.length) {
        picture.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show yet"));
        this.x = null;
        return;
      }
      const [low, high] = range(all, this), [first, last] = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1];
      const left = MARGIN.left, right = width - MARGIN.right, top = MARGIN.top, bottom = HEIGHT - MARGIN.bottom;
      const bend = this.logarithmic ? Math.log : (value) => value;
      this.x = Object.assign((x) => left + ((x - first) / (last - first)) * (right - left), { from: (pixel) => first + ((pixel - left) / (right - left)) * (last - first) });
      this.y = (y) => bottom - ((bend(y) - bend(low)) / (bend(high) - bend(low))) * (bottom - top);
      for (const mark of this.logarithmic ? logTicks(low, high) : ticks(low, high, 6))
        picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: this.y(mark), y2: this.y(mark) }), svg("text", { x: left - 8, y: this.y(mark) + 4, "text-anchor": "end" }, String(mark)));
      for (const mark of ticks(first, last, Math.min(8, width / 70)).filter((mark) => axis !== "epoch" || Number.isInteger(mark)))
        picture.append(svg("text", { x: this.x(mark), y: bottom + 16, "text-anchor": "middle" }, axis === "epoch" ? String(mark) : duration(mark)));
      picture.append(svg("text", { x: right, y: HEIGHT - 3, "text-anchor": "end" }, axis === "epoch" ? "epoch" : "training time"));
      if (single) this.drawEvents(picture, runs[0], top, bottom);
      // What lies outside of the axis is cut off at its edge.
      const inside = svg("svg", { x: left, y: top - 8, width: right - left + MARGIN.right, height: bottom - top + 16, viewBox: `${left} ${top - 8} ${right - left + MARGIN.right} ${bottom - top + 16}`, overflow: "hidden" });
      picture.append(inside);
      for (const curve of curves) this.drawCurve(inside, curve);
      this.shows = (value) => value >= low && value <= high;
      if (single && this.focus) this.drawEnd(picture, curves[0], right);
      this.overlay = svg("g", {});
      picture.append(this.overlay);
      this.mark(cursor, null);
    }

    /** The last value, in words. */
    drawEnd(picture, curve, right) {
      const value = curve.values[curve.values.length - 1];
      if (typeof value !== "number" || !this.shows(value)) return;
      const below = this.y(value) < MARGIN.top + 22;
      picture.append(svg("text", { class: "end", x: right, y: this.y(value) + (below ? 20 : -9), "text-anchor": "end" }, shown(value, this.unit)));
    }
    drawEvents(picture, run, top, bottom) {
      for (const event of run.events) {
        const x = this.x(run[axis][event.epoch - 1]);
        if (Number.isNaN(x)) continue;
        picture.append(svg("line", { class: "event", x1: x, x2: x, y1: top, y2: bottom }), this.flag(x, top, event));
      }
    }
    flag(x, y, event) {
      const back = event.kind === "roll-back";
      return svg("path", { class: back ? "flag back" : "flag", d: back ? `M${x - 5} ${y} h10 l-5 -8 z` : `M${x - 5} ${y - 8} h10 l-5 8 z` });
    }

    drawCurve(picture, curve) {
      const xs = curve.run[axis], drawable = (value) => typeof value === "number" && (!this.logarithmic || value > 0);
      let path = "", open = false;
      curve.values.forEach((value, index) => {
        if (!drawable(value)) { open = false; return; }
        const x = this.x(xs[index]).toFixed(1), y = this.y(value).toFixed(1);
        path += !open ? `M${x} ${y}` : curve.steps ? `H${x}V${y}` : `L${x} ${y}`;
        open = true;
      });
      picture.append(svg("path", { class: "curve", d: path, stroke: color(curve.number), "stroke-dasharray": curve.dash }));
      if (xs.length === 1) picture.append(svg("circle", { cx: this.x(xs[0]), cy: this.y(curve.values[0]), r: 3, fill: color(curve.number) }));
      if (single) return;
      for (const event of curve.run.events) {
        const value = curve.values[event.epoch - 1];
        if (drawable(value)) picture.append(svg("circle", { class: "dot", cx: this.x(xs[event.epoch - 1]), cy: this.y(value), r: 3.5, fill: color(curve.number) }));
      }
    }

    drawLegend() {
      const curves = single ? this.series() : runs.map((run, number) => ({ name: run.label, number, dash: DASHES[Math.floor(number / 8) % DASHES.length] }));
      const entries = curves.map((curve) => {
        const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: color(curve.number), "stroke-width": 3, "stroke-dasharray": curve.dash }));
        const button = html("button", { type: "button", "aria-pressed": String(!this.hidden.has(curve.name)) }, sample, curve.name);
        button.addEventListener("click", () => {
          if (!this.hidden.delete(curve.name)) this.hidden.add(curve.name);
          (single ? [this] : charts).forEach((chart) => chart.draw());
          const again = [...this.legend.querySelectorAll("button")].find((candidate) => candidate.textContent === curve.name);
          if (again) again.focus();
        });
        return html("li", {}, button);
      });
      this.legend.replaceChildren(...entries);
    }

    /** Shows where the cursor is; the chart that moved it says in words what is there. */
    mark(x, source) {
      if (!this.overlay || !this.x) return;
      this.overlay.replaceChildren();
      this.tip.hidden = true;
      if (x === null || x === undefined) return;
      const place = this.x(x);
      this.overlay.append(svg("line", { class: "cursor", x1: place, x2: place, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
      const rows = [], events = [];
      for (const curve of this.visible()) {
        const xs = curve.run[axis], index = nearest(xs, x), value = curve.values[index];
        if (x > xs[xs.length - 1]) continue; // this run has ended before
        for (const event of curve.run.events)
          if (event.epoch === curve.run.epoch[index]) events.push(`${single ? "" : `${curve.name}, `}${event.kind === "roll-back" ? "rolled back" : "pruned"}: ${event.text}`);
        if (typeof value !== "number") continue;
        rows.push([curve, value]);
        if (this.shows(value) && (!this.logarithmic || value > 0)) this.overlay.append(svg("circle", { class: "dot", cx: this.x(xs[index]), cy: this.y(value), r: 4.5, fill: color(curve.number) }));
      }
      if (source !== this) return;
      const happened = [...new Set(events)];
      const most = rows.length > 12 ? 11 : 12, more = rows.length - most;
      const lines = rows.slice(0, most).map(([curve, value]) => html("p", {}, html("span", {}, html("span", { class: `swatch s${curve.number % 8}` }), curve.name), html("b", {}, shown(value, this.unit))));
      this.tip.replaceChildren(html("strong", {}, at(x)), ...lines, ...(more > 0 ? [html("span", { class: "what" }, `and ${more} more layers`)] : []), ...happened.map((text) => html("span", { class: "what" }, text)));
      this.tip.hidden = false;
      this.place(place);
      this.plot.setAttribute("aria-valuenow", String(nearest(this.steps(), x)));
      this.plot.setAttribute("aria-valuetext", [at(x), ...rows.map(([curve, value]) => `${curve.name} ${shown(value, this.unit)}`), ...happened].join(", "));
    }

    /** Puts the words beside the cursor, or below the curves where there is no room beside it. */
    place(x) {
      const room = this.plot.clientWidth, narrow = room < 480;
      const left = x < room / 2 ? x + 14 : x - 14 - this.tip.offsetWidth;
      Object.assign(this.tip.style, narrow ? { left: "0", right: "0", top: `${this.height + 4}px` } : { left: `${left}px`, right: "auto", top: "0" });
    }

    /** The same as a table, made when it is asked for. */
    list() {
      const old = this.numbers.querySelector(".scroll");
      if (old) old.remove();
      if (!this.numbers.open) return;
      const curves = this.series();
      const head = html("tr", {}, html("th", { scope: "col" }, axis === "epoch" ? "epoch" : "time"), ...curves.map((curve) => html("th", { scope: "col" }, curve.name)));
      const body = this.steps().map((x) => html("tr", {}, html("th", { scope: "row" }, axis === "epoch" ? String(x) : duration(x)),
        ...curves.map((curve) => html("td", {}, shown(curve.values[curve.run[axis].indexOf(x)], this.unit)))));
      this.numbers.append(html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.title}: the numbers` }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...body))));
    }
  }

  /** A strip for each layer, the darker the more is left of it: lines would lie upon each other. */
  class Strips extends Chart {
    constructor(options) {
      super(options);
      this.plot.classList.add("strip");
      this.legend.remove();
    }
    drawLegend() {}
    drawEvents() {}
    draw() {
      const curves = this.series(), width = Math.max(240, this.plot.clientWidth), xs = this.steps();
      const row = Math.max(12, Math.min(26, 480 / (curves.length || 1)));
      const names = Math.min(width * 0.42, Math.max(...curves.map((curve) => curve.name.length), 4) * 6.8);
      const left = names + 8, right = width - 52, top = MARGIN.top, bottom = top + row * curves.length;
      this.height = bottom + MARGIN.bottom;
      const picture = svg("svg", { height: this.height, viewBox: `0 0 ${width} ${this.height}`, "aria-hidden": "true" });
      this.plot.replaceChildren(picture, this.tip);
      this.plot.setAttribute("aria-valuemax", String(Math.max(0, xs.length - 1)));
      if (!xs.length) { this.x = null; return; }
      // A cell ends where its epoch does; by time, epochs are as wide as they were long.
      const start = axis === "epoch" ? xs[0] - 1 : 0, end = xs[xs.length - 1];
      this.x = Object.assign((x) => left + ((x - start) / (end - start || 1)) * (right - left), { from: (pixel) => start + ((pixel - left) / (right - left)) * (end - start) });
      this.shows = () => false;
      curves.forEach((curve, number) => {
        const y = top + row * number, values = curve.values, last = values[values.length - 1];
        for (let index = 0, next; index < values.length; index = next) {
          for (next = index + 1; next < values.length && values[next] === values[index]; ) next++;
          if (typeof values[index] !== "number") continue;
          const from = this.x(index ? xs[index - 1] : start), to = this.x(xs[next - 1]);
          picture.append(svg("rect", { x: from, y: y + 1, width: Math.max(0, to - from), height: row - 2, "fill-opacity": (0.06 + 0.94 * Math.min(1, values[index] / 100)).toFixed(3) }));
        }
        const middle = y + row / 2 + 4;
        picture.append(svg("text", { x: left - 8, y: middle, "text-anchor": "end" }, fitting(curve.name, names)), svg("text", { class: "end", x: right + 6, y: middle }, typeof last === "number" ? `${Number(last.toPrecision(3))} %` : "–"));
      });
      for (const mark of ticks(axis === "epoch" ? xs[0] : 0, end, Math.min(8, (right - left) / 70)).filter((mark) => axis !== "epoch" || Number.isInteger(mark)))
        picture.append(svg("text", { x: this.x(mark), y: bottom + 16, "text-anchor": "middle" }, axis === "epoch" ? String(mark) : duration(mark)));
      picture.append(svg("text", { x: right, y: this.height - 3, "text-anchor": "end" }, axis === "epoch" ? "epoch" : "training time"));
      for (const event of runs[0].events) {
        const x = this.x(runs[0][axis][event.epoch - 1]);
        if (!Number.isNaN(x)) picture.append(this.flag(x, top - 2, event));
      }
      this.overlay = svg("g", {});
      picture.append(this.overlay);
      this.mark(cursor, null);
    }
  }
  /** A name that fits into so many pixels: its middle is left out, as its ends tell layers apart. */
  function fitting(name, room) {
    const most = Math.max(5, Math.floor(room / 6.8));
    if (name.length <= most) return name;
    const back = Math.ceil((most - 1) * 0.6);
    return `${name.slice(0, most - 1 - back)}…${name.slice(-back)}`;
  }

  function choose(x, source) {
    cursor = x === undefined ? null : x;
    for (const chart of charts) chart.mark(cursor, source);
  }

  // --- the page -----------------------------------------------------------------------------------------------------------

  const names = [...new Set(runs.flatMap((run) => run.layers.map((layer) => layer.name)))];
  if (names.length) CHARTS.push({ title: "Channels left, layer by layer", unit: " %", zero: true, strips: true, keys: Object.fromEntries(names.map((name) => [`layer ${name}`, name])) });
  if (!single) home.before(runsLegend);
  for (const chart of CHARTS) home.append(new (single && chart.strips ? Strips : Chart)(chart).element);
  const redraw = () => charts.forEach((chart) => { chart.draw(); chart.list(); });
  const choice = document.getElementById("x-choice");
  choice.hidden = false;
  choice.addEventListener("change", (event) => { axis = event.target.value; cursor = null; redraw(); });
  let width = home.clientWidth;
  redraw();
  new ResizeObserver(() => {
    if (home.clientWidth !== width) { width = home.clientWidth; redraw(); }
  }).observe(home);

  const every = Number(document.body.dataset.reload);
  if (every) {
    const pause = document.getElementById("reload-pause"), text = document.getElementById("reload-text");
    let paused = false;
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.textContent = paused ? "Go on" : "Pause";
      text.textContent = paused ? "This page stands still." : `This page looks for news every ${every} seconds.`;
    });
    // Not under the hands of someone who is reading off a curve.
    setInterval(() => { if (!paused && cursor === null) location.reload(); }, every * 1000);
  }
})();
