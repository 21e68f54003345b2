// Makes elements, and changes them in place. Texts are texts: no name from the cluster becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function graphic(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== undefined && child !== null));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Gives `parent` one child for each item, in their order. Children whose key is there already are kept, and updated.
export function keyed(parent, items, key, make, update) {
  const kept = new Map([...parent.children].map(child => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = kept.get(name);
    kept.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  kept.forEach(child => child.remove());
}

// Makes the rows of a table anew, if one of their cells has changed.
export function setRows(body, rows) {
  const state = JSON.stringify(rows);
  if (body.dataset.rows === state) return;
  body.dataset.rows = state;
  body.replaceChildren(...rows.map(([head, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, head), ...cells.map(cell => element("td", {}, cell)))));
}

export function table(id, caption, heads) {
  const row = element("tr", {}, ...heads.map(head => element("th", { scope: "col" }, head)));
  return element("table", { id },
    element("caption", {}, caption), element("thead", {}, row), element("tbody"));
}

// Neighbours as one range: `0-3,7`.
export function ranges(slots) {
  const parts = [];
  for (const slot of slots.map(Number).sort((one, other) => one - other)) {
    const last = parts.at(-1);
    if (last && last[1] + 1 === slot) last[1] = slot;
    else parts.push([slot, slot]);
  }
  return parts.map(([first, last]) => first === last ? `${first}` : `${first}-${last}`).join(",") || "-";
}

export function ago(time) {
  if (!time) return "-";
  const seconds = Math.max(0, Math.round((Date.now() - Date.parse(time)) / 1000));
  if (seconds < 60) return `${seconds}s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)}h` : `${Math.floor(seconds / 86400)}d`;
}
