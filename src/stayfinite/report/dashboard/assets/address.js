// What is shown stands in the address, so that a reload shows it again. The token does not stay.

export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (location.search) history.replaceState(null, "", `/${location.hash}`);
  const ends = /^(\d*)-(\d*)$/.exec(words.get("steps") ?? "");
  const zoom = ends && ends.slice(1).map((end) => (end ? Number(end) : null));
  return {
    selected: (words.get("runs") ?? "").split(",").filter((id) => /^[0-9a-f]{12}$/.test(id)),
    view: words.get("view") === "compare" ? "compare" : "live",
    zoom: zoom && zoom.some((end) => end !== null) ? zoom : null,
  };
}

export function writeAddress({ selected, view, zoom }) {
  const words = [`runs=${selected.join(",")}`];
  if (view !== "live") words.push(`view=${view}`);
  if (zoom) words.push(`steps=${zoom.map((end) => end ?? "").join("-")}`);
  history.replaceState(null, "", `/#${words.join("&")}`);
}
