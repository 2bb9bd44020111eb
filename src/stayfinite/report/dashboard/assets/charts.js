// The curves: one panel for each measure, all runs over the same steps, one cursor for all.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { byId, cssColor, el, fill } from "./dom.js";
import { number, whole } from "./format.js";
import { keepAll, logRange, logSplits } from "./logs.js";

const MEASURES = [
  { key: "loss", title: "Loss" },
  { key: "norm", title: "Gradient norm", isLog: true },
  { key: "scale", title: "Loss scale", isLog: true, isOptional: true },
  { key: "lr", title: "Learning rate" },
  { key: "seconds", title: "Step time, seconds", isOptional: true },
];
const SKIPPING = new Set(["norm", "scale"]); // where skipped steps are marked
const HEIGHT = 208;
const MOST_MARKS = 400;
const MOST_BANDS = 20;

export const runColor = (place) => cssColor(`--run-${place % 6}`);

export class Charts {
  constructor(onZoom) {
    this.onZoom = onZoom;
    this.panels = new Map();
    this.sync = uPlot.sync("steps");
    // Each for itself: a panel that comes later makes room for itself beside the others.
    this.observer = new ResizeObserver(() => this.panels.forEach((panel) => panel.resize()));
  }

  // `runs` in their order, each with its place, which is its color.
  draw(series, runs, marks) {
    const wanted = measuresOf(series, runs);
    for (const [key, panel] of this.panels) {
      if (!wanted.some((measure) => measure.key === key)) this.drop(key, panel);
    }
    for (const measure of wanted) {
      if (!this.panels.has(measure.key)) {
        const panel = new Panel(measure, this.sync, this.onZoom);
        this.panels.set(measure.key, panel);
        this.observer.observe(panel.canvas);
      }
    }
    const nodes = wanted.map((measure) => this.panels.get(measure.key).node);
    const shown = [...byId("charts").children];
    if (nodes.some((node, at) => node !== shown[at]) || nodes.length !== shown.length) {
      fill(byId("charts"), ...nodes);
    }
    for (const measure of wanted) this.panels.get(measure.key).draw(series, runs, marks);
    drawKey(series, runs, marks);
  }

  // After a change of theme.
  repaint() {
    this.panels.forEach((panel) => panel.rebuild());
  }

  drop(key, panel) {
    this.observer.unobserve(panel.canvas);
    panel.destroy();
    this.panels.delete(key);
  }
}

// What the marks mean, as far as there are any.
function drawKey(series, runs, marks) {
  const shown = runs.map(({ id }) => series.runs[id]).filter(Boolean);
  const isBad = shown.some((run) => Object.values(run.curves).some((curve) => curve.bad));
  const entries = [
    marks.steps.length ? ["key-line", "incident"] : null,
    marks.bands.length ? ["key-expected", "steps in which a forecast expects values that are not finite"] : null,
    isBad ? ["key-bad", "value that is not finite"] : null,
    shown.some((run) => run.skips) ? ["key-skip", "skipped step"] : null,
    series.width > 1 ? ["key-band", `least to largest of ${whole(series.width)} steps, with their mean`] : null,
  ];
  fill(byId("key"), ...entries.filter(Boolean).map(([kind, text]) =>
    el("span", {}, el("i", { class: kind, "aria-hidden": "true" }), text)));
}

function measuresOf(series, runs) {
  const has = (key) => runs.some(({ id }) => {
    const curve = series.runs[id]?.curves[key];
    return curve && (curve.bad || curve.mid.some((value) => value !== null));
  });
  const terms = new Set(runs.flatMap(({ id }) =>
    Object.keys(series.runs[id]?.curves ?? {}).filter((key) => key.startsWith("term:"))));
  const others = [...terms].sort().map((key) => ({ key, title: `Loss term ${key.slice(5)}` }));
  return [...MEASURES, ...others].filter((measure) => !measure.isOptional || has(measure.key));
}

class Panel {
  constructor(measure, sync, onZoom) {
    Object.assign(this, { measure, sync, onZoom, plot: null, shape: "", at: null });
    this.isLog = measure.isLog ?? false;
    this.readouts = el("span", { class: "readouts" });
    this.log = el("button", {
      type: "button", class: "quiet small", text: "log", "aria-pressed": String(this.isLog),
      "aria-label": `Logarithmic scale for ${measure.title}`, on: { click: () => this.toggleLog() },
    });
    this.canvas = el("div", { class: "plot", role: "img" });
    this.node = el("div", { class: "panel chart", data: { measure: measure.key } },
      el("div", { class: "chart-head" }, el("h2", { text: measure.title }), this.readouts, this.log),
      this.canvas);
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.rebuild();
  }

  draw(series, runs, marks) {
    Object.assign(this, { series, runs, marks });
    const shape = runs.map(({ id, place }) => `${id}:${place}`).join() + this.isLog;
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.rebuild();
    } else {
      this.plot.setData(this.data());
    }
    this.read();
    this.canvas.setAttribute("aria-label", this.described());
  }

  data() {
    const usable = (value) => (value === null || (this.isLog && value <= 0) ? null : value);
    const columns = [this.series.steps];
    for (const { id } of this.runs) {
      const curve = this.curve(id);
      const mid = curve.mid.map(usable);
      columns.push(mid, (curve.low ?? mid).map(usable), (curve.high ?? mid).map(usable));
    }
    return columns;
  }

  curve(id) {
    const none = new Array(this.series.steps.length).fill(null);
    return this.series.runs[id]?.curves[this.measure.key] ?? { mid: none, bad: 0 };
  }

  rebuild() {
    if (!this.series) return;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), this.data(), this.canvas);
  }

  options() {
    const [line, muted] = [cssColor("--line"), cssColor("--muted")];
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 } };
    const series = [{}];
    const bands = [];
    for (const { place } of this.runs) {
      const color = runColor(place);
      const first = series.length;
      const isFew = (plot) => plot.data[0].length < 40;
      series.push({
        stroke: color, width: 1.75, spanGaps: true,
        points: { show: isFew, size: 5, fill: color },
      });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [first + 2, first + 1], fill: `color-mix(in srgb, ${color} 22%, transparent)` });
    }
    const font = "12px system-ui, sans-serif";
    return {
      width: Math.max(this.canvas.clientWidth, 200),
      height: HEIGHT,
      legend: { show: false },
      padding: [10, 24, 0, 0],
      cursor: {
        sync: { key: this.sync.key, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
      },
      scales: { x: { time: false, range: (plot, low, high) => this.across(low, high) }, y: { distr: this.isLog ? 3 : 1, range: this.isLog ? logRange : padded } },
      axes: [
        { ...axis, font, size: 34, space: 70, values: (plot, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? whole(tick) : "")) },
        { ...axis, font, size: 62, space: 34, ...(this.isLog ? { splits: logSplits, filter: keepAll } : {}), values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) },
      ],
      series,
      bands,
      hooks: {
        drawAxes: [(plot) => this.markBands(plot)],
        draw: [(plot) => this.mark(plot)],
        setCursor: [(plot) => this.moved(plot)],
        setSelect: [(plot) => this.zoomed(plot)],
      },
    };
  }

  // An incident after the last recorded step is in view too.
  across(low, high) {
    if (low === null) return [0, 1];
    const { steps, width } = this.series;
    const isWhole = !this.marks.isZoomed;
    const end = isWhole ? Math.max(high, ...this.marks.steps.slice(0, MOST_MARKS), this.foretold(low, high)) : high;
    return steps.length > 1 || end > low ? [low, end] : [low - width, low + width];
  }

  // What is expected after the last step is in view, but takes no more than a fifth of it.
  foretold(low, high) {
    const ends = this.marks.bands.slice(0, MOST_BANDS).map(({ to }) => to);
    return Math.min(Math.max(high, ...ends), high + Math.ceil((high - low) / 4));
  }

  // Lies under the curves.
  markBands(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const [left, right] = [bbox.left, bbox.left + bbox.width];
    const across = (step) => plot.valToPos(step, "x", true);
    ctx.save();
    ctx.fillStyle = `color-mix(in srgb, ${cssColor("--odd")} 20%, transparent)`;
    ctx.strokeStyle = cssColor("--odd");
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([1.5 * ratio, 2.5 * ratio]);
    for (const { from, to, about } of this.marks.bands.slice(0, MOST_BANDS)) {
      const [start, end] = [Math.max(across(from), left), Math.min(across(to), right)];
      if (end < start) continue;
      ctx.fillRect(start, bbox.top, Math.max(end - start, 2 * ratio), bbox.height);
      if (about === null || across(about) < left || across(about) > right) continue;
      ctx.beginPath();
      ctx.moveTo(across(about), bbox.top);
      ctx.lineTo(across(about), bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Incidents are lines, values that are not finite ticks at the top, skipped steps at the bottom.
  mark(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const across = (step) => plot.valToPos(step, "x", true);
    const isInside = (at) => at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = cssColor("--bad");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    for (const step of this.marks.steps.slice(0, MOST_MARKS)) {
      const at = across(step);
      if (!isInside(at)) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    for (const { id } of this.runs) {
      const { bad } = this.curve(id);
      if (bad) this.ticks(plot, bad, bbox.top, 6 * ratio, across);
    }
    ctx.fillStyle = cssColor("--odd");
    for (const { id } of SKIPPING.has(this.measure.key) ? this.runs : []) {
      const skipped = this.series.runs[id]?.skipped ?? [];
      this.ticks(plot, skipped, bbox.top + bbox.height - 5 * ratio, 5 * ratio, across);
    }
    ctx.restore();
  }

  ticks(plot, counts, top, height, across) {
    const width = 2 * devicePixelRatio;
    counts.forEach((total, at) => {
      if (total) plot.ctx.fillRect(across(this.series.steps[at]) - width / 2, top, width, height);
    });
  }

  moved(plot) {
    this.at = plot.cursor.idx ?? null;
    this.read();
  }

  read() {
    const parts = this.runs.map(({ id, place }) => {
      const { mid, bad } = this.curve(id);
      const at = this.at ?? lastKnown(mid, bad);
      const isBad = bad && bad[at];
      const text = isBad ? "not finite" : number(mid[at] ?? null);
      return el("span", { class: `readout color-${place % 6}` },
        el("i", { "aria-hidden": "true" }), el("b", { class: isBad ? "bad-text" : "", text }));
    });
    const step = this.at === null ? null : this.series.steps[this.at];
    const width = this.series.width;
    const where = step === null || step === undefined ? null
      : el("span", { class: "muted", text: width > 1 ? `steps ${whole(step)}–${whole(step + width - 1)}` : `step ${whole(step)}` });
    fill(this.readouts, where, ...parts);
  }

  described() {
    const said = this.runs.map(({ id, name }) => {
      const known = this.curve(id).mid.filter((value) => value !== null);
      if (!known.length) return `${name}: nothing recorded`;
      const [low, high] = [Math.min(...known), Math.max(...known)];
      return `${name}: from ${number(known[0])} to ${number(known.at(-1))}, between ${number(low)} and ${number(high)}`;
    });
    return `${this.measure.title}. ${said.join(". ")}.`;
  }

  zoomed(plot) {
    if (plot.select.width < 4) return;
    const from = Math.round(plot.posToVal(plot.select.left, "x"));
    const to = Math.round(plot.posToVal(plot.select.left + plot.select.width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (to > from) this.onZoom([Math.max(0, from), to]);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  destroy() {
    this.plot?.destroy();
    this.node.remove();
  }
}

function lastKnown(mid, bad) {
  for (let at = mid.length - 1; at >= 0; at -= 1) {
    if (mid[at] !== null || (bad && bad[at])) return at;
  }
  return mid.length - 1;
}

function padded(plot, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = (high - low) * 0.07;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
