// The head of the page: what was run, where it stands, and what is odd about its record.

import { breakable, el, fill, byId } from "./dom.js";
import { STATES, clock, count, duration, number, whole } from "./format.js";

export function drawHead(run, series) {
  fill(
    byId("head"),
    el("div", { class: "title" },
      el("h1", {}, ...breakable(run.name)),
      el("span", { class: `chip big state-${run.state}`, text: STATES[run.state] ?? run.state })),
    el("p", { class: "muted facts", text: facts(run) }),
    run.steps === undefined ? null : tiles(run, series),
  );
}

function facts(run) {
  const torch = run.versions?.torch;
  return [
    run.script,
    run.started ? `started ${clock(run.started)}` : "",
    run.lasted ? `trained ${duration(run.lasted)}` : "",
    run.world > 1 ? count(run.world, "rank") : "",
    run.host ? `on ${run.host}` : "",
    torch ? `torch ${torch}` : "",
    run.commit ? `commit ${run.commit.slice(0, 8)}${run.dirty ? ", changed" : ""}` : "",
    run.seed ? `seed ${run.seed}` : "",
  ].filter(Boolean).join(" · ");
}

function tiles(run, series) {
  const shown = series?.runs[run.id];
  const skips = shown?.skips ?? 0;
  const pace = lastOf(shown, "seconds");
  const last = (name) => run.last[name] ?? lastOf(shown, name);
  const all = [
    tile("Steps", whole(run.steps)),
    tile("Loss", number(last("loss")), isBad(last("loss"))),
    tile("Gradient norm", number(last("norm")), isBad(last("norm"))),
    tile("Learning rate", number(last("lr"))),
    last("scale") === null ? null : tile("Loss scale", number(last("scale"))),
    tile("Step time", duration(pace)),
    tile("Skipped", whole(skips), false, skips > 0),
    tile("Incidents", whole(run.incidents), run.incidents > 0),
    run.forecasts > run.spikes ? tile("Forecasts", whole(run.forecasts - run.spikes), false, true) : null,
  ];
  return el("dl", { class: "tiles" }, ...all.filter(Boolean));
}

const isBad = (value) => typeof value === "string";

function lastOf(shown, name) {
  const values = shown?.curves[name]?.mid ?? [];
  for (let at = values.length - 1; at >= 0; at -= 1) {
    if (values[at] !== null) return values[at];
  }
  return null;
}

const tile = (name, value, isBadOne = false, isOdd = false) =>
  el("div", { class: `tile${isBadOne ? " bad" : isOdd ? " odd" : ""}` },
    el("dt", { text: name }), el("dd", { text: value }));

export function drawNotices(runs) {
  fill(byId("notices"), ...runs.flatMap(noticesOf));
}

function noticesOf(run) {
  const found = [];
  if (run.state === "unreadable") {
    found.push(notice("bad", `${run.name} cannot be shown.`, run.problem));
  }
  if (run.state === "starting") {
    found.push(notice("wait", `${run.name} has begun.`, "Its first line is not written yet."));
  }
  if (run.broken) {
    const lines = run.broken === 1 ? "1 line" : `${whole(run.broken)} lines`;
    found.push(notice("odd", `${lines} of ${run.name} cannot be read.`,
      "They were passed over; all others are shown."));
  }
  if (run.progress !== null && run.progress !== undefined && run.progress < 1) {
    found.push(reading(run));
  }
  if (run.steps === 0 && run.state === "running") {
    found.push(notice("wait", `${run.name} is running.`, "No training step was recorded yet."));
  }
  if (run.steps === 0 && run.state !== "running") {
    found.push(notice("odd", `${run.name} has no training step.`,
      "No update of an optimizer was seen before it ended."));
  }
  return found;
}

function reading(run) {
  const bar = el("progress", { max: "1", "aria-label": `Reading ${run.name}` });
  bar.value = run.progress;
  const made = notice("wait", `Reading ${run.name}`, `${Math.round(run.progress * 100)} %`);
  made.append(bar);
  return made;
}

const notice = (kind, title, text) =>
  el("div", { class: `notice ${kind}` }, el("strong", { text: title }), " ", el("span", { text }));
