// Elements without markup: text is only ever set as text.

export const byId = (id) => document.getElementById(id);

export function el(tag, options = {}, ...children) {
  const { class: names, text, on, data, ...attributes } = options;
  const made = document.createElement(tag);
  if (names) made.className = names;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on ?? {})) made.addEventListener(name, listener);
  Object.assign(made.dataset, data ?? {});
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

// A sentence in which `words between backticks` are code.
export const prose = (text) => text.split("`").map((part, at) => (at % 2 ? el("code", { text: part }) : part));

// A name that may be broken behind its dashes, dots and underscores, and not inside its words.
export const breakable = (name) =>
  name.split(/(?<=[-_./])/).flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part]));

export const cssColor = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
