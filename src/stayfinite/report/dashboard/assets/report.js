// One incident, in the five parts of every report.

import { ask } from "./api.js";
import { byId, el, fill, prose } from "./dom.js";
import { number } from "./format.js";

export async function openReport(run, index) {
  const dialog = byId("dialog");
  fill(dialog, el("p", { class: "muted", text: "Reading the report …" }));
  if (!dialog.open) dialog.showModal();
  try {
    const found = await ask("incident", { run, number: index });
    fill(dialog, ...parts(found, run));
    dialog.scrollTop = 0;
    dialog.querySelector(".close").focus();
  } catch {
    fill(dialog, closeButton(dialog), el("h2", { id: "dialog-title", text: "This report cannot be read now" }),
      el("p", { text: "The server does not answer, or the run is gone." }));
  }
}

export const closeButton = (dialog) => el("button", {
  type: "button", class: "close", "aria-label": "Close", text: "×", on: { click: () => dialog.close() },
});

function parts(found, run) {
  const dialog = byId("dialog");
  return [
    closeButton(dialog),
    el("p", { class: "kicker" }, el("span", { class: "chip bad", text: found.cause || "unexplained" })),
    el("h2", { id: "dialog-title", text: found.headline }),
    part("First bad operation", firstOperation(found.first)),
    part("Root cause", rootCause(found)),
    part("Input statistics", statistics(found.tensors)),
    part("Fix", fix(found)),
    part("Verification", verification(found)),
    el("p", {}, el("a", { href: `/runs/${run}/report`, target: "_blank", rel: "noopener", text: "Open the whole report" })),
  ];
}

const part = (title, nodes) => el("section", { class: "part" }, el("h3", { text: title }), ...nodes);

const note = (text) => el("p", { class: "muted", text });

function firstOperation(first) {
  if (!first) return [note("The line was not found.")];
  const rows = first.source.map(({ number: line, parts: [before, marked, after] }) =>
    el("span", { class: marked ? "source-line guilty" : "source-line" },
      el("span", { class: "line-number", text: line === null ? "" : String(line) }),
      el("code", {}, before, el("mark", { text: marked }), after)));
  const hops = first.path.map((hop) => el("li", { class: `hop ${hop.kind}`, text: hop.words }));
  return [
    el("p", { class: "scroll" }, el("code", { class: "place", text: first.spot })),
    first.library ? el("p", { class: "scroll muted" }, el("code", { class: "place", text: first.library })) : null,
    rows.length ? el("pre", { class: "source", tabindex: "0" }, ...rows) : null,
    first.birth ? el("p", { class: "birth", text: first.birth }) : null,
    first.op ? el("p", { class: "muted" }, el("code", { text: first.op })) : null,
    first.exact ? null : note("This place was inferred, not seen; the true origin may be earlier."),
    hops.length ? el("ol", { class: "lineage", "aria-label": "From the first bad value to what was noticed" },
      ...hops, el("li", { class: "hop reached", text: `reached ${first.reached}` })) : null,
  ];
}

function rootCause(found) {
  if (!found.why) return [note("No rule explains it.")];
  return [el("p", {}, ...prose(found.why)), el("p", { class: "muted", text: `How sure: ${found.confidence}` })];
}

function statistics(tensors) {
  if (!tensors) return [note("The tensors were not seen.")];
  const head = el("tr", {}, ...["", "tensor", ...tensors.columns, "values"].map((name) => el("th", { scope: "col", text: name })));
  const rows = tensors.rows.map((row) => el("tr", { class: row.bad ? "bad-row" : "" },
    el("td", { class: "muted", text: row.role }), el("th", { scope: "row", text: row.name }),
    ...row.cells.map((text) => el("td", { text })),
    el("td", {}, row.histogram.length ? histogram(row) : row.remark)));
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Input statistics" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)))];
}

// Bars of the counts between limits, which are powers of two.
function histogram(row) {
  const most = Math.max(...row.histogram.map(([, total]) => total), 1);
  const wide = 4;
  const space = "http://www.w3.org/2000/svg";
  const drawn = document.createElementNS(space, "svg");
  const ends = [row.histogram[0][0], row.histogram.at(-1)[0]].map((limit) => number(limit, 2));
  drawn.setAttribute("width", String(row.histogram.length * wide));
  drawn.setAttribute("height", "24");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `finite values up to ${ends[0]} … ${ends[1]}`);
  drawn.setAttribute("class", "histogram");
  row.histogram.forEach(([, total], at) => {
    const bar = document.createElementNS(space, "rect");
    const height = total ? Math.max(1.5, 24 * Math.sqrt(total / most)) : 0;
    for (const [name, value] of Object.entries({ x: at * wide, y: 24 - height, width: wide - 1, height })) {
      bar.setAttribute(name, String(value));
    }
    drawn.append(bar);
  });
  return drawn;
}

function fix(found) {
  if (!found.fix && !found.patch.length) return [note("No fix is known.")];
  const kinds = { "+": "added", "-": "removed", "@": "place" };
  const lines = found.patch.map((line) => el("span", {
    class: /^(\+\+\+|---) /.test(line) ? "diff place" : `diff ${kinds[line[0]] ?? ""}`, text: line,
  }));
  return [found.fix ? el("p", {}, ...prose(found.fix)) : null,
    lines.length ? el("pre", { class: "source", tabindex: "0" }, ...lines) : null];
}

function verification(found) {
  const seen = found.evidence.map((text) => el("li", { text }));
  return [
    seen.length ? el("ul", {}, ...seen) : note("The fix was not tried out on this step."),
    found.done ? el("p", {}, el("strong", { text: "Done: " }), found.done) : null,
    found.noticed.length ? el("details", {}, el("summary", { text: "What was not finite" }),
      el("ul", {}, ...found.noticed.map((text) => el("li", { text })))) : null,
  ];
}
