// The history of one layer.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { ask } from "./api.js";
import { byId, cssColor, el, fill } from "./dom.js";
import { number, whole } from "./format.js";
import { keepAll, logRange, logSplits } from "./logs.js";
import { closeButton } from "./report.js";

export async function openLayer(run, name, optimizer) {
  const found = await ask("layer", { run, name, optimizer }).catch(() => null);
  if (!found) return;
  const dialog = byId("dialog");
  const plots = [
    ["Gradient norm", "norms", "--run-0", true],
    ["Headroom, doublings until it overflows", "headroom", "--run-2", false],
  ].map(([title, key, color, isLog]) => ({ title, values: found[key], color, isLog, node: el("div", { class: "plot" }) }));
  fill(dialog, closeButton(dialog),
    el("p", { class: "kicker muted", text: "Layer" }),
    el("h2", { id: "dialog-title", class: "mono", text: found.layer }),
    el("p", { class: "muted", text: summary(found) }),
    ...plots.flatMap(({ title, node }) => [el("h3", { text: title }), node]));
  if (!dialog.open) dialog.showModal();
  for (const each of plots) draw(found.steps, each);
}

function summary({ steps, norms }) {
  const bad = norms.filter((value) => typeof value === "string").length;
  const known = norms.filter((value) => typeof value === "number");
  const range = known.length ? `norm between ${number(Math.min(...known))} and ${number(Math.max(...known))}` : "no finite norm";
  return `${whole(steps.length)} samples from step ${whole(steps[0])} to ${whole(steps.at(-1))}, ${range}${bad ? `, ${bad} not finite` : ""}`;
}

function draw(steps, { values, color, isLog, node }) {
  const [line, muted, stroke] = [cssColor("--line"), cssColor("--muted"), cssColor(color)];
  const usable = values.map((value) => (typeof value !== "number" || (isLog && value <= 0) ? null : value));
  const isBad = values.map((value) => typeof value === "string");
  const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 }, font: "12px system-ui, sans-serif" };
  new uPlot({
    width: node.clientWidth || 600, height: 180, legend: { show: false },
    scales: { x: { time: false }, y: isLog ? { distr: 3, range: logRange } : {} },
    axes: [
      { ...axis, values: (plot, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? whole(tick) : "")) },
      { ...axis, size: 62, ...(isLog ? { splits: logSplits, filter: keepAll } : {}), values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) },
    ],
    series: [{}, { stroke, width: 1.75, spanGaps: true, points: { show: steps.length < 60 } }],
    hooks: { draw: [(plot) => marks(plot, steps, isBad)] },
  }, [steps, usable], node);
}

function marks(plot, steps, isBad) {
  plot.ctx.fillStyle = cssColor("--bad");
  steps.forEach((step, at) => {
    if (isBad[at]) plot.ctx.fillRect(plot.valToPos(step, "x", true) - 2, plot.bbox.top, 4, plot.bbox.height);
  });
}
