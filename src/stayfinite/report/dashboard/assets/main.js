// Holds what is shown, and asks for what has changed.

import { Stream, ask } from "./api.js";
import { Charts } from "./charts.js";
import { drawCompare } from "./compare.js";
import { byId, el, fill } from "./dom.js";
import { count } from "./format.js";
import { HeatMap } from "./heat.js";
import { drawForecasts, drawIncidents } from "./incidents.js";
import { openLayer } from "./layer.js";
import { drawHead, drawNotices } from "./overview.js";
import { openReport } from "./report.js";
import { drawRuns } from "./runs.js";
import { readAddress, writeAddress } from "./address.js";
import { bindTheme } from "./themes.js";

const PAUSE = 250; // milliseconds between two answers
const READING_PAUSE = 1200; // while a long run is read, which should not wait for us
const HEAT_PAUSE = 1500;
const MOST_SHOWN = 6;

const state = {
  runs: [], places: [], selected: [], view: "live", zoom: null, optimizer: null,
  series: null, incidents: [], forecasts: [], known: null, ...readAddress(),
};
const charts = new Charts((zoom) => change({ zoom }));
const heat = new HeatMap({
  onLayer: (name) => openLayer(state.selected[0], name, state.optimizer),
  onKind: () => { asked.heat = ""; refresh(); },
});
const asked = { series: "", incidents: "", heat: "", heatAt: 0, compare: "" };
let isAsking = false;
let isStale = false;

const stream = new Stream(onRuns, onConnection);

function onRuns(list) {
  const there = new Set(list.runs.map((run) => run.id));
  const kept = state.selected.filter((id) => there.has(id));
  if (!list.looked && kept.length < state.selected.length) return; // it will come
  state.runs = list.runs;
  state.places = list.places;
  if (!kept.length && list.runs.length) kept.push(list.runs[0].id);
  if (list.looked || kept.length) show(kept, list.looked);
}

function show(selected, hasLooked) {
  const isNew = selected.join() !== state.selected.join();
  state.selected = selected;
  drawShell(hasLooked);
  if (isNew || !stream.source) stream.open(selected);
  if (selected.length) refresh();
}

function drawShell(hasLooked) {
  drawRuns(state, actions);
  const main = mainRun();
  byId("content").hidden = !main;
  byId("blank").hidden = Boolean(main);
  if (!main) return drawBlank(hasLooked);
  document.title = `${main.incidents ? `(${main.incidents}) ` : ""}${main.name} – stayfinite`;
  drawHead(main, state.series);
  drawNotices(shownRuns());
  for (const view of ["live", "compare"]) {
    byId(view).hidden = state.view !== view;
    byId(`view-${view}`).setAttribute("aria-pressed", String(state.view === view));
  }
  byId("reset").hidden = !state.zoom;
  for (const [id, value] of [["from", state.zoom?.[0]], ["to", state.zoom?.[1]]]) {
    if (document.activeElement !== byId(id)) byId(id).value = value ?? "";
  }
}

function drawBlank(hasLooked) {
  const places = state.places.map((place) => el("code", { text: place }));
  fill(byId("blank"),
    el("div", { class: "pulse", "aria-hidden": "true" }),
    el("h1", { text: hasLooked ? "No runs yet" : "Looking for runs" }),
    hasLooked ? el("p", {}, "A run appears here by itself as soon as it is written to ", ...places, ".") : null,
    hasLooked ? el("p", { class: "muted", text: "To make one:" }) : null,
    hasLooked ? el("pre", { text: "stayfinite run train.py" }) : null);
}

const mainRun = () => state.runs.find((run) => run.id === state.selected[0]);

const shownRuns = () => state.selected
  .map((id, place) => ({ ...state.runs.find((run) => run.id === id), place }))
  .filter((run) => run.name);

const actions = {
  only: (id) => change({ selected: [id], zoom: null }),
  toggle(id) {
    const without = state.selected.filter((each) => each !== id);
    const selected = without.length < state.selected.length ? without : [...without, id].slice(-MOST_SHOWN);
    change({ selected: selected.length ? selected : [id] });
  },
};

function change(news) {
  const { selected, ...others } = news;
  Object.assign(state, others);
  if (selected && selected.join() !== state.selected.join()) state.known = null;
  writeAddress({ ...state, selected: selected ?? state.selected });
  show(selected ?? state.selected, true);
}

// One round of questions at a time; what changes meanwhile is asked in the next.
async function refresh() {
  isStale = true;
  if (isAsking) return;
  isAsking = true;
  while (isStale) {
    isStale = false;
    try {
      await round();
    } catch { /* the stream tells that the server is gone, and asks again */
      Object.assign(asked, { series: "", incidents: "", heat: "", compare: "" });
    }
    const isReading = shownRuns().some((run) => run.progress < 1);
    await new Promise((done) => setTimeout(done, isReading ? READING_PAUSE : PAUSE));
  }
  isAsking = false;
}

async function round() {
  const runs = shownRuns();
  const ids = state.selected.join();
  const version = runs.map((run) => `${run.version}${run.progress}`).join() + ids;
  const view = `${version}|${state.zoom}|${state.optimizer}|${byId("charts").clientWidth > 900}`;
  const [first, last] = state.zoom ?? [null, null];
  const common = { first, last, optimizer: state.optimizer };
  if (asked.series !== view) {
    state.series = await ask("series", { runs: ids, points: 800, ...common });
    asked.series = view;
  }
  const noted = runs.map((run) => `${run.incidents}-${run.forecasts}${run.state}${run.progress}`).join() + ids;
  if (asked.incidents !== noted) {
    const found = await ask("incidents", { runs: ids });
    asked.incidents = noted;
    takeIncidents(found, ids);
  }
  if (ids !== state.selected.join()) return;
  drawAll();
  if (state.view === "compare" && asked.compare !== version) {
    const byAge = [...runs].sort((one, other) => one.started - other.started).map(({ id }) => id);
    drawCompare(runs.length > 1 ? await ask("compare", { runs: byAge.join() }) : null, runs);
    asked.compare = version;
  }
  await roundOfHeat(view, common);
}

async function roundOfHeat(view, common) {
  const wait = asked.heatAt + HEAT_PAUSE - performance.now();
  const wanted = `${view}|${heat.kind}`;
  if (state.view !== "live" || asked.heat === wanted) return;
  if (wait > 0 && asked.heat.split("|").slice(1).join() === wanted.split("|").slice(1).join()) {
    setTimeout(refresh, wait);
    return;
  }
  const found = await ask("heat", { run: state.selected[0], kind: heat.kind, ...common });
  Object.assign(asked, { heat: wanted, heatAt: performance.now() });
  heat.draw(found, mainRun()?.name ?? "");
}

function takeIncidents(found, ids) {
  const keyOf = (each) => `${each.run}-${each.step}-${each.rank}`;
  const keys = new Set(found.incidents.map(keyOf));
  const fresh = state.known ? found.incidents.filter((each) => !state.known.has(keyOf(each))) : [];
  if (ids === state.selected.join()) state.known = keys;
  Object.assign(state, found);
  state.fresh = new Set(fresh.map(keyOf));
  if (fresh.length) {
    byId("spoken").textContent = fresh.length === 1
      ? `New incident: ${fresh[0].headline}` : `${count(fresh.length, "new incident")}, the last: ${fresh[0].headline}`;
  }
}

function drawAll() {
  const runs = shownRuns();
  const main = mainRun();
  if (!main) return;
  drawHead(main, state.series);
  drawOptimizers(state.series.optimizers);
  drawIncidents(state, runs, openReport);
  drawForecasts(state, runs);
  charts.draw(state.series, runs, {
    steps: state.incidents.map((each) => each.step), bands: state.forecasts.map(bandOf).filter(Boolean),
    isZoomed: Boolean(state.zoom),
  });
  document.documentElement.dataset.painted = String(state.series.steps.length);
}

// Between which steps values that are not finite are expected, and about when.
function bandOf({ step, steps_left: left, steps_low: low, steps_high: high }) {
  const ends = [low, left, high].filter((end) => end !== null).map((end) => step + end);
  if (!ends.length) return null;
  return { from: Math.min(...ends), to: Math.max(...ends), about: left === null ? null : step + left };
}

function drawOptimizers(numbers) {
  byId("optimizer-field").hidden = numbers.length < 2;
  const chosen = byId("optimizer");
  if (chosen.children.length !== numbers.length) {
    fill(chosen, ...numbers.map((each) => el("option", { value: each, text: String(each) })));
  }
  chosen.value = String(state.optimizer ?? numbers[0] ?? "");
}

function onConnection(connection) {
  const words = { live: "Live", waiting: "Reconnecting", refused: "Token expired" };
  const shown = byId("connection");
  if (shown.dataset.state !== connection) {
    shown.textContent = words[connection];
    shown.dataset.state = connection;
    shown.title = connection === "refused" ? "Open the address that stayfinite ui printed." : "";
  }
}

function bind() {
  byId("view-live").addEventListener("click", () => change({ view: "live" }));
  byId("view-compare").addEventListener("click", () => { asked.compare = ""; change({ view: "compare" }); });
  byId("reset").addEventListener("click", () => change({ zoom: null }));
  byId("optimizer").addEventListener("change", (event) => change({ optimizer: Number(event.target.value) }));
  for (const id of ["from", "to"]) byId(id).addEventListener("change", typedRange);
  if (matchMedia("(max-width: 900px)").matches) byId("shelf").open = false;
  bindTheme(byId("theme"), () => { charts.repaint(); heat.repaint(); });
}

function typedRange() {
  const read = (id) => (/^\d+$/.test(byId(id).value.trim()) ? Number(byId(id).value) : null);
  const [from, to] = [read("from"), read("to")];
  const isRange = (from !== null || to !== null) && !(from !== null && to !== null && from >= to);
  change({ zoom: isRange ? [from, to] : null });
}

bind();
stream.open(state.selected);
