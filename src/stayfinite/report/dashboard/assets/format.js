// Numbers, times and states in words.

export const STATES = {
  running: "running",
  starting: "starting",
  finite: "finished, all finite",
  recovered: "finished, recovered",
  incident: "ended with an incident",
  "script-error": "ended with an error",
  killed: "was killed",
  unreadable: "cannot be read",
};

export const SHORT_STATES = {
  running: "running",
  starting: "starting",
  finite: "finished",
  recovered: "recovered",
  incident: "incident",
  "script-error": "error",
  killed: "killed",
  unreadable: "unreadable",
};

const WORDS = { nan: "NaN", inf: "Inf", "-inf": "-Inf" };

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return WORDS[value] ?? value;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size >= 1e4 && size < 1e7) return whole(value);
  if (size >= 1e6 || size < 1e-3) return trimmed(value.toExponential(digits - 2));
  return String(Number(value.toPrecision(digits)));
}

const trimmed = (text) => text.replace(/\.?0+e/, "e").replace("e+", "e");

export const whole = (value) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en-US");

export function compact(value) {
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) {
    if (value >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return String(value);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || typeof seconds === "string") return "–";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(seconds) {
  if (!seconds) return "";
  const date = new Date(seconds * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (isToday) return `today ${time}`;
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
  return `${day}, ${time}`;
}

export const count = (total, noun) => `${whole(total)} ${noun}${total === 1 ? "" : "s"}`;
