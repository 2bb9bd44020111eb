// The list of runs: a name shows one alone, a tick lays it over the others.

import { byId, el, fill } from "./dom.js";
import { SHORT_STATES, clock, compact, count, duration } from "./format.js";

export function drawRuns(state, actions) {
  byId("shelf-count").textContent = state.runs.length ? String(state.runs.length) : "";
  const focused = document.activeElement?.dataset?.key;
  fill(byId("runs"), ...state.runs.map((run) => item(run, state, actions)));
  if (focused) byId("runs").querySelector(`[data-key="${focused}"]`)?.focus();
}

function item(run, state, actions) {
  const place = state.selected.indexOf(run.id);
  const isShown = place >= 0;
  const tick = el("input", {
    type: "checkbox",
    "aria-label": `Show ${run.name}`,
    data: { key: `tick-${run.id}` },
    on: { change: () => actions.toggle(run.id) },
  });
  tick.checked = isShown;
  const name = el(
    "button",
    {
      type: "button",
      class: "run-name",
      "aria-current": isShown && place === 0 ? "true" : null,
      data: { key: `name-${run.id}` },
      on: { click: () => actions.only(run.id) },
    },
    el("span", { class: "run-title", text: run.name }),
    el("span", { class: "run-facts", text: facts(run) }),
  );
  const chips = el("span", { class: "run-chips" }, stateChip(run), incidentChip(run));
  name.append(chips);
  return el("li", { class: isShown ? `run shown color-${place % 6}` : "run" }, tick, name);
}

function facts(run) {
  if (run.state === "unreadable") return "see why";
  if (run.state === "starting") return "nothing written yet";
  return [`${compact(run.steps)} steps`, duration(run.lasted), clock(run.started)]
    .filter((word) => word && word !== "–").join(" · ");
}

export const stateChip = (run) =>
  el("span", { class: `chip state-${run.state}`, text: SHORT_STATES[run.state] ?? run.state });

const incidentChip = (run) =>
  run.incidents ? el("span", { class: "chip bad", text: count(run.incidents, "incident") }) : null;
