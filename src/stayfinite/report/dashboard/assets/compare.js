// Runs side by side: the first is what the others are held against.

import { breakable, byId, el, fill } from "./dom.js";
import { duration, number, whole } from "./format.js";

export function drawCompare(found, runs) {
  if (!found || !found.pairs.length) {
    fill(byId("compare"), el("div", { class: "panel empty" },
      el("h2", { text: "Choose two runs" }),
      el("p", { class: "muted", text: "Tick a second run in the list; the first is the one before." })));
    return;
  }
  const named = (id) => runs.find((run) => run.id === id);
  fill(byId("compare"), measures(found, named), ...found.pairs.map((pair) => changes(pair, named)));
}

function measures(found, named) {
  const head = el("tr", {}, el("th", { scope: "col", text: "Measure" }),
    runHead(named(found.before)), ...found.pairs.map((pair) => runHead(named(pair.run))));
  const names = [...new Set(found.pairs.flatMap((pair) => pair.lines.map((line) => line.name)))];
  const rows = names.map((name) => {
    const lines = found.pairs.map((pair) => pair.lines.find((line) => line.name === name));
    const known = lines.find(Boolean);
    return el("tr", {}, el("th", { scope: "row", text: name[0].toUpperCase() + name.slice(1) }),
      el("td", { text: shown(name, known.before) }), ...lines.map((line) => after(name, line)));
  });
  return el("div", { class: "panel" }, el("h2", { text: "Before and after" }),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Before and after" },
      el("table", { class: "measures" }, el("thead", {}, head), el("tbody", {}, ...rows))));
}

const runHead = (run) => el("th", { scope: "col", class: `color-${(run?.place ?? 0) % 6}` },
  el("i", { class: "swatch run-swatch", "aria-hidden": "true" }), ...breakable(run?.name ?? ""));

function after(name, line) {
  if (!line) return el("td", { text: "–" });
  const isNumber = typeof line.before === "number" && typeof line.after === "number";
  const change = isNumber ? line.after - line.before : 0;
  const verdict = !line.better || !change ? "" : Math.sign(change) === line.better ? "better" : "worse";
  const words = isNumber && line.before && change
    ? `${change > 0 ? "+" : "−"}${number(Math.abs((100 * change) / line.before), 3)} %` : "";
  return el("td", {}, shown(name, line.after), " ",
    verdict || words ? el("span", { class: `delta ${verdict}`, text: [words, verdict].filter(Boolean).join(", ") }) : null);
}

function shown(name, value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : number(String(value));
  if (name.startsWith("seconds")) return duration(value);
  return Number.isInteger(value) ? whole(value) : number(value);
}

function changes(pair, named) {
  const title = `What is not the same in ${named(pair.run)?.name ?? ""}`;
  if (!pair.changes.length) {
    return el("div", { class: "panel" }, el("h2", { text: title }),
      el("p", { class: "muted", text: "Nothing that was recorded: options, versions and files are the same." }));
  }
  const rows = pair.changes.map((change) => el("tr", {},
    el("td", { class: "muted", text: change.kind }), el("th", { scope: "row", text: change.name }),
    el("td", {}, code(change.before)), el("td", {}, code(change.after))));
  const head = el("tr", {}, ...["", "Name", "Before", "After"].map((name) => el("th", { scope: "col", text: name })));
  return el("div", { class: "panel" }, el("h2", { text: title }),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
}

const code = (value) => el("code", {}, ...breakable(plain(value)));

const plain = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
