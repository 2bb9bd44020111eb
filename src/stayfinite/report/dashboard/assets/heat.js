// Layers x sampled steps: where gradients grow, vanish, or are not finite.

import { byId, cssColor, el, fill } from "./dom.js";
import { count, number, whole } from "./format.js";
import { isDark, ramp } from "./ramp.js";

const KINDS = { norm: "gradient norm", headroom: "headroom" };
const HINTS = {
  norm: "The norm of each layer's gradient, on a logarithmic scale.",
  headroom: "The doublings that are left until a layer's largest gradient overflows its dtype.",
};
const [ROW, TALLEST, FOOT] = [18, 420, 20];

export class HeatMap {
  constructor({ onLayer, onKind }) {
    Object.assign(this, { onLayer, onKind, kind: "norm", data: null, rows: [], cell: null });
    this.title = el("h2", { id: "heat-title", text: "Layers" });
    this.about = el("p", { class: "muted", text: HINTS.norm });
    this.filter = el("input", {
      type: "search", placeholder: "Find layers", "aria-label": "Find layers by name",
      on: { input: () => this.repaint() },
    });
    this.buttons = Object.entries(KINDS).map(([kind, name]) => el("button", {
      type: "button", text: name, "aria-pressed": String(kind === this.kind), data: { kind },
      on: { click: () => this.choose(kind) },
    }));
    this.canvas = el("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "heat map",
      on: {
        mousemove: (event) => this.point(event), mouseleave: () => this.leave(),
        click: () => this.open(), keydown: (event) => this.key(event), blur: () => this.leave(),
      },
    });
    this.mark = el("div", { class: "heat-mark", hidden: true });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.stage = el("div", { class: "heat-stage" }, this.canvas, this.mark, this.tip);
    this.key_ = el("div", { class: "heat-key" });
    this.empty = el("p", { class: "muted", text: "Gradients are sampled every few steps; no sample was recorded yet." });
    fill(byId("heat"),
      el("div", { class: "chart-head" }, this.title,
        el("div", { class: "tabs", role: "group", "aria-label": "What the colors show" }, ...this.buttons),
        this.filter),
      this.about, this.empty, this.stage, this.key_);
    new ResizeObserver(() => this.repaint()).observe(this.stage);
  }

  choose(kind) {
    this.kind = kind;
    this.about.textContent = HINTS[kind];
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    this.onKind();
  }

  draw(found, name) {
    const bytes = Uint8Array.from(atob(found.values), (letter) => letter.charCodeAt(0));
    this.data = { ...found, values: new Float32Array(bytes.buffer), kind: this.kind };
    this.unknown = Math.fround(found.unknown);
    this.title.textContent = found.layers.length ? `${count(found.layers.length, "layer")}` : "Layers";
    this.canvas.setAttribute("aria-label",
      `${KINDS[this.kind]} of ${count(found.layers.length, "layer")} of ${name} at ${count(found.steps.length, "sampled step")}. Arrow keys move, Enter opens the history of a layer.`);
    this.repaint();
  }

  repaint() {
    const { data } = this;
    const isEmpty = !data || !data.layers.length || !data.steps.length;
    this.empty.hidden = !isEmpty;
    this.stage.hidden = this.key_.hidden = isEmpty;
    if (isEmpty || !this.stage.clientWidth) return;
    const wanted = this.filter.value.trim().toLowerCase();
    this.rows = data.layers.flatMap((name, at) => (name.toLowerCase().includes(wanted) ? [at] : []));
    this.measure();
    this.paint();
    this.drawKey();
    if (this.cell) this.mark.hidden = this.tip.hidden = true;
  }

  measure() {
    const width = this.stage.clientWidth;
    const left = width > 620 ? Math.min(260, width * 0.28) : 0;
    const height = Math.max(ROW, Math.min(TALLEST, this.rows.length * ROW));
    this.box = { left, width: width - left, height };
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round((height + FOOT) * ratio);
    this.canvas.style.height = `${height + FOOT}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  paint() {
    const { data, rows, box, context } = this;
    const columns = data.steps.length;
    const lines = Math.max(1, Math.min(rows.length, Math.floor(box.height)));
    const image = new ImageData(columns, lines);
    const colorOf = this.scale();
    for (let line = 0; line < lines; line += 1) {
      const [from, to] = [Math.floor((line * rows.length) / lines), Math.floor(((line + 1) * rows.length) / lines)];
      for (let column = 0; column < columns; column += 1) {
        const color = colorOf(this.worst(from, Math.max(to, from + 1), column));
        image.data.set(color, 4 * (line * columns + column));
      }
    }
    const small = new OffscreenCanvas(columns, lines);
    small.getContext("2d").putImageData(image, 0, 0);
    context.clearRect(0, 0, box.left + box.width, box.height + FOOT);
    context.imageSmoothingEnabled = false;
    if (rows.length) context.drawImage(small, box.left, 0, box.width, box.height);
    this.labels();
  }

  at(row, column) {
    return this.data.values[this.rows[row] * this.data.steps.length + column];
  }

  // Of several layers in one line of pixels the worst is shown, so that none hides.
  worst(from, to, column) {
    let found = this.at(from, column);
    for (let row = from + 1; row < to && row < this.rows.length; row += 1) {
      const value = this.at(row, column);
      if (value === this.unknown || Number.isNaN(found)) continue;
      const isWorse = this.data.kind === "headroom" ? value < found : value > found;
      if (found === this.unknown || Number.isNaN(value) || isWorse) found = value;
    }
    return found;
  }

  scale() {
    const { kind, values } = this.data;
    const isNorm = kind === "norm";
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (!Number.isFinite(value) || value === this.unknown || (isNorm && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) [low, high] = isNorm ? [1e-3, 1] : [0, 1];
    this.limits = [low, high];
    const colors = ramp(isDark() ? "dark" : "light");
    const [from, to] = isNorm ? [Math.log10(low), Math.log10(high)] : [low, high];
    const bad = hexColor(cssColor("--bad"));
    return (value) => {
      if (value === this.unknown) return [0, 0, 0, 0];
      if (!Number.isFinite(value)) return bad;
      const place = isNorm ? Math.log10(Math.max(value, low)) : value;
      const part = to > from ? (place - from) / (to - from) : 0.5;
      return [...colors[Math.round(255 * (isNorm ? part : 1 - part))], 255];
    };
  }

  labels() {
    const { data, rows, box, context } = this;
    context.font = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    context.fillStyle = cssColor("--muted");
    context.textBaseline = "middle";
    const each = Math.max(1, Math.ceil((ROW - 2) / (box.height / Math.max(rows.length, 1))));
    for (let row = Math.floor(each / 2); box.left && row < rows.length; row += each) {
      context.textAlign = "right";
      const name = shortened(context, data.layers[rows[row]], box.left - 14);
      context.fillText(name, box.left - 8, Math.max(7, ((row + 0.5) * box.height) / rows.length));
    }
    context.font = "12px system-ui, sans-serif";
    const most = Math.max(1, Math.floor(box.width / 90));
    const gap = Math.max(1, Math.ceil(data.steps.length / most));
    for (let column = 0; column < data.steps.length; column += gap) {
      const across = box.left + ((column + 0.5) * box.width) / data.steps.length;
      context.textAlign = across < box.left + 30 ? "left" : across > box.left + box.width - 30 ? "right" : "center";
      context.fillText(whole(data.steps[column]), across, box.height + FOOT / 2 + 2);
    }
  }

  drawKey() {
    const [low, high] = this.limits;
    const isNorm = this.data.kind === "norm";
    const ends = (isNorm ? [low, high] : [high, low]).map((value) => number(value, 3));
    const bar = el("canvas", { width: "160", height: "1", class: "heat-bar", "aria-hidden": "true" });
    const context = bar.getContext("2d");
    ramp(isDark() ? "dark" : "light", 160).forEach(([red, green, blue], at) => {
      context.fillStyle = `rgb(${red} ${green} ${blue})`;
      context.fillRect(at, 0, 1, 1);
    });
    fill(this.key_, el("span", { text: ends[0] }), bar, el("span", { text: ends[1] }),
      el("span", {}, el("i", { class: "swatch bad-swatch", "aria-hidden": "true" }), "not finite"),
      this.rows.length < this.data.layers.length
        ? el("span", { class: "muted", text: `${whole(this.rows.length)} of ${count(this.data.layers.length, "layer")}` }) : null);
  }

  point(event) {
    const { box, rows, data } = this;
    if (!data || !rows.length) return;
    const edge = this.canvas.getBoundingClientRect();
    const [across, down] = [event.clientX - edge.left - box.left, event.clientY - edge.top];
    if (across < 0 || down < 0 || down >= box.height) return this.leave();
    const column = Math.min(data.steps.length - 1, Math.floor((across / box.width) * data.steps.length));
    const row = Math.min(rows.length - 1, Math.floor((down / box.height) * rows.length));
    this.point_at(row, column);
  }

  point_at(row, column) {
    const { box, data, rows } = this;
    this.cell = { row, column };
    const [wide, high] = [box.width / data.steps.length, box.height / rows.length];
    const [left, top] = [box.left + column * wide, row * high];
    Object.assign(this.mark.style, {
      left: `${left}px`, top: `${top}px`, width: `${Math.max(wide, 3)}px`, height: `${Math.max(high, 3)}px`,
    });
    const value = this.at(row, column);
    const text = value === this.unknown ? "not recorded"
      : `${number(value)}${data.kind === "headroom" ? " doublings" : ""}`;
    fill(this.tip, el("b", { text: data.layers[rows[row]] }),
      el("span", { text: `step ${whole(data.steps[column])} · ${KINDS[data.kind]} ${text}` }));
    this.mark.hidden = this.tip.hidden = false;
    const half = this.tip.offsetWidth / 2;
    const room = this.stage.clientWidth;
    this.tip.style.left = `${Math.min(room - half - 2, Math.max(half + 2, left + wide / 2))}px`;
    this.tip.style.top = `${top - 6}px`;
  }

  leave() {
    this.mark.hidden = this.tip.hidden = true;
  }

  open() {
    if (this.cell && !this.tip.hidden) this.onLayer(this.data.layers[this.rows[this.cell.row]]);
  }

  key(event) {
    const { row, column } = this.cell ?? { row: 0, column: 0 };
    const moves = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1], Home: [row, 0], End: [row, Infinity],
      PageUp: [row - 20, column], PageDown: [row + 20, column],
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open();
    } else if (moves[event.key] && this.rows.length) {
      event.preventDefault();
      const [down, across] = moves[event.key];
      const within = (value, size) => Math.min(size - 1, Math.max(0, value));
      this.point_at(within(down, this.rows.length), within(across, this.data.steps.length));
    }
  }
}

function shortened(context, name, room) {
  if (context.measureText(name).width <= room) return name;
  let kept = name;
  while (kept.length > 4 && context.measureText(`…${kept}`).width > room) kept = kept.slice(1);
  return `…${kept}`;
}

function hexColor(hex) {
  const digits = hex.replace("#", "");
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16)).concat(255);
}
