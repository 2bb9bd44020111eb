// Incidents as they come.

import { byId, el, fill, prose } from "./dom.js";
import { count, whole } from "./format.js";

const MOST = 50;

let drawn = "";

// Only when there is something new, so that no click is lost.
export function drawIncidents(state, runs, open) {
  const { incidents } = state;
  const steps = runs.reduce((sum, run) => sum + (run.steps ?? 0), 0);
  const now = JSON.stringify([incidents, runs.map(({ id, name }) => [id, name]), incidents.length ? 0 : steps]);
  if (now === drawn) return;
  drawn = now;
  const focused = document.activeElement?.dataset?.incident;
  const title = el("h2", { id: "incidents-title", text: incidents.length ? count(incidents.length, "incident") : "Incidents" });
  const items = incidents.slice(0, MOST).map((each) => item(each, state, runs, open));
  const more = incidents.length - items.length;
  byId("incidents").className = incidents.length ? "panel incidents some" : "panel incidents";
  fill(byId("incidents"), title,
    incidents.length ? el("ol", { class: "incident-list" }, ...items) : calm(steps),
    more > 0 ? el("p", { class: "muted", text: `and ${whole(more)} earlier` }) : null);
  if (focused) byId("incidents").querySelector(`[data-incident="${focused}"]`)?.focus();
}

function calm(steps) {
  const text = steps ? `None: no NaN or Inf reached an update in ${count(steps, "step")}.` : "None so far.";
  return el("p", { class: "calm", text });
}

function item(each, state, runs, open) {
  const run = runs.find(({ id }) => id === each.run);
  const isFresh = state.fresh?.has(`${each.run}-${each.step}-${each.rank}`);
  const button = el("button", {
    type: "button",
    class: `incident${isFresh ? " fresh" : ""}`,
    data: { incident: `${each.run}-${each.number}` },
    on: { click: () => open(each.run, each.number) },
  },
  el("span", { class: "incident-step" }, el("small", { text: "step" }), whole(each.step)),
  el("span", { class: "incident-body" },
    el("span", { class: "incident-headline", text: each.headline }),
    el("span", { class: "incident-where" },
      each.spot ? el("code", { text: each.spot }) : null,
      runs.length > 1 && run ? el("span", { class: `chip color-${run.place % 6} tinted`, text: run.name }) : null),
    each.why ? el("span", { class: "incident-why" }, ...prose(each.why)) : null),
  el("span", { class: "incident-side" },
    each.cause ? el("span", { class: "chip bad", text: each.cause }) : null,
    each.done ? el("span", { class: "muted small-text", text: each.done }) : null,
    el("span", { class: "open-hint", text: "Open the report" })));
  return el("li", {}, button);
}
