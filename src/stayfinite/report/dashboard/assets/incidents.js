// Incidents and forecasts as they come.

import { breakable, byId, el, fill, prose } from "./dom.js";
import { count, whole } from "./format.js";

const MOST = 50;

let drawn = "";
let foretold = "";

// The place has no room before there is a forecast.
export function drawForecasts({ forecasts }, runs) {
  const now = JSON.stringify([forecasts, runs.map(({ id, name }) => [id, name])]);
  if (now === foretold) return;
  foretold = now;
  const more = forecasts.length - MOST;
  const spikes = forecasts.filter((each) => each.is_spike).length;
  const told = [[forecasts.length - spikes, "forecast"], [spikes, "spike"]].filter(([number]) => number);
  byId("forecasts").hidden = !forecasts.length;
  fill(byId("forecasts"),
    el("h2", { id: "forecasts-title", text: told.map(([number, noun]) => count(number, noun)).join(", ") }),
    el("ol", { class: "incident-list" }, ...forecasts.slice(0, MOST).map((each) => forecast(each, runs))),
    more > 0 ? el("p", { class: "muted", text: `and ${whole(more)} more` }) : null);
}

function forecast(each, runs) {
  const run = runs.find(({ id }) => id === each.run);
  return el("li", { class: "incident" },
    el("span", { class: "incident-step" }, el("small", { text: "step" }), whole(each.step)),
    el("span", { class: "incident-body" },
      el("span", { class: "incident-headline", text: each.words }),
      el("span", { class: "incident-where" },
        el("span", { text: expected(each) }),
        each.rank ? el("span", { text: `rank ${each.rank}` }) : null,
        runs.length > 1 && run ? el("span", { class: `chip color-${run.place % 6} tinted` }, ...breakable(run.name)) : null)),
    el("span", { class: "incident-side" },
      el("span", { class: `chip severity-${each.severity}`, text: each.severity }),
      each.done ? el("span", { class: "muted small-text", text: each.done }) : null,
      el("span", {
        class: "muted small-text",
        text: each.next_bad_step === null ? "no bad step since" : `next bad step: ${whole(each.next_bad_step)}`,
      })));
}

function expected(each) {
  const at = (steps) => whole(each.step + steps);
  if (each.steps_left === null) return "";
  const about = `expected about step ${at(each.steps_left)}`;
  if (each.steps_low === null) return about;
  return each.steps_high === null
    ? `${about}, ${at(each.steps_low)} or later`
    : `${about}, between ${at(each.steps_low)} and ${at(each.steps_high)}`;
}

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
      each.spot ? el("code", { class: "place", text: each.spot }) : null,
      each.library ? el("code", { class: "place muted library", text: each.library }) : null,
      runs.length > 1 && run ? el("span", { class: `chip color-${run.place % 6} tinted` }, ...breakable(run.name)) : null),
    each.why ? el("span", { class: "incident-why" }, ...prose(each.why)) : null),
  el("span", { class: "incident-side" },
    each.cause ? el("span", { class: "chip bad", text: each.cause }) : null,
    each.done ? el("span", { class: "muted small-text", text: each.done }) : null,
    el("span", { class: "open-hint", text: "Open the report" })));
  return el("li", {}, button);
}
