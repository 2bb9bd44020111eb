// The list of runs: a name shows one alone, a tick lays it over the others.

import { breakable, byId, el, fill } from "./dom.js";
import { SHORT_STATES, clock, compact, count, duration } from "./format.js";

// Items stay while their words change, so that no click is lost while a run is written.
const items = new Map();

export function drawRuns(state, actions) {
  byId("shelf-count").textContent = state.runs.length ? String(state.runs.length) : "";
  for (const run of state.runs) {
    if (!items.has(run.id)) items.set(run.id, new Item(run.id, actions));
    items.get(run.id).draw(run, state.selected.indexOf(run.id));
  }
  const nodes = state.runs.map((run) => items.get(run.id).node);
  const shown = [...byId("runs").children];
  if (nodes.length !== shown.length || nodes.some((node, at) => node !== shown[at])) {
    fill(byId("runs"), ...nodes);
  }
}

class Item {
  constructor(id, actions) {
    this.said = "";
    this.tick = el("input", { type: "checkbox", on: { change: () => actions.toggle(id) } });
    this.title = el("span", { class: "run-title" });
    this.facts = el("span", { class: "run-facts" });
    this.chips = el("span", { class: "run-chips" });
    this.name = el("button", { type: "button", class: "run-name", on: { click: () => actions.only(id) } },
      this.title, this.facts, this.chips);
    this.node = el("li", { class: "run" }, this.tick, this.name);
  }

  draw(run, place) {
    const isShown = place >= 0;
    this.tick.checked = isShown;
    this.node.className = isShown ? `run shown color-${place % 6}` : "run";
    if (place === 0) this.name.setAttribute("aria-current", "true");
    else this.name.removeAttribute("aria-current");
    const said = `${run.name}|${facts(run)}|${run.state}|${run.incidents}`;
    if (said === this.said) return;
    this.said = said;
    this.tick.setAttribute("aria-label", `Show ${run.name}`);
    fill(this.title, ...breakable(run.name));
    this.facts.textContent = facts(run);
    fill(this.chips, stateChip(run), incidentChip(run));
  }
}

function facts(run) {
  if (run.state === "unreadable") return "see why";
  if (run.state === "starting") return "nothing written yet";
  return [`${compact(run.steps)} ${run.steps === 1 ? "step" : "steps"}`, duration(run.lasted), clock(run.started)]
    .filter((word) => word && word !== "–").join(" · ");
}

const stateChip = (run) => (run.state === "incident" && run.incidents ? null
  : el("span", { class: `chip state-${run.state}`, text: SHORT_STATES[run.state] ?? run.state }));

const incidentChip = (run) =>
  run.incidents ? el("span", { class: "chip bad", text: count(run.incidents, "incident") }) : null;
