// Light, dark, or as the system has it.

const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function bindTheme(button, onChange) {
  const root = document.documentElement;
  const now = () => root.dataset.theme ?? "auto";
  const say = () => { button.textContent = `Theme: ${now()}`; };
  button.addEventListener("click", () => {
    const next = NEXT[now()];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try { localStorage.setItem("stayfinite-theme", next); } catch { /* not kept */ }
    say();
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  say();
}
