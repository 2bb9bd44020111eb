// The server: questions, and a stream that finds its way back.

export async function ask(path, values = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined) words.set(name, value);
  }
  const answer = await fetch(`/api/${path}?${words}`, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

const AGAIN = 1000;

export class Stream {
  // Calls onRuns with each new list, onState with "live", "waiting" or "refused".
  constructor(onRuns, onState) {
    this.onRuns = onRuns;
    this.onState = onState;
    this.opened = "";
    this.source = null;
    this.timer = 0;
  }

  open(ids) {
    const wanted = ids.join(",");
    if (this.source && wanted === this.opened) return;
    this.opened = wanted;
    this.connect();
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    const source = new EventSource(`/api/events?runs=${encodeURIComponent(this.opened)}`);
    this.source = source;
    source.addEventListener("open", () => this.onState("live"));
    source.addEventListener("runs", (event) => this.onRuns(JSON.parse(event.data)));
    source.addEventListener("error", () => this.lost(source));
  }

  async lost(source) {
    if (source !== this.source) return;
    source.close();
    this.source = null;
    this.onState(await this.isRefused() ? "refused" : "waiting");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), AGAIN);
  }

  async isRefused() {
    try {
      const answer = await fetch("/api/incidents", { credentials: "same-origin" });
      return answer.status === 403;
    } catch {
      return false;
    }
  }
}
