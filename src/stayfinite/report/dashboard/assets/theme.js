// Before the page is painted, so that it does not flash.
"use strict";
(() => {
  let kept = null;
  try { kept = localStorage.getItem("stayfinite-theme"); } catch { /* not kept */ }
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
