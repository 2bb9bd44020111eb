// What is shown stands in the address, so that a reload shows it again. The token does not stay.

export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (location.search) history.replaceState(null, "", `/${location.hash}`);
  const zoom = (words.get("steps") ?? "").split("-").map(Number);
  return {
    selected: (words.get("runs") ?? "").split(",").filter((id) => /^[0-9a-f]{12}$/.test(id)),
    view: words.get("view") === "compare" ? "compare" : "live",
    zoom: zoom.length === 2 && zoom.every(Number.isInteger) && zoom[0] < zoom[1] ? zoom : null,
  };
}

export function writeAddress({ selected, view, zoom }) {
  const words = [`runs=${selected.join(",")}`];
  if (view !== "live") words.push(`view=${view}`);
  if (zoom) words.push(`steps=${zoom.join("-")}`);
  history.replaceState(null, "", `/#${words.join("&")}`);
}
