// Draws the 32 slots of a root as a ring, each in the colour, and in the width, of its owner.

import { graphic, setAttribute } from "./dom.js";

const SLOTS = 32;
const COLOURS = 8;
const WIDTHS = 3;

function point(radius, turn) {
  const angle = (turn - 0.25) * 2 * Math.PI;
  return `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
}

function sector(slot, inner) {
  const [from, to] = [(slot + 0.06) / SLOTS, (slot + 0.94) / SLOTS];
  return `M ${point(48, from)} A 48 48 0 0 1 ${point(48, to)} L ${point(inner, to)} A ${inner} ${inner} 0 0 0 ${point(inner, from)} Z`;
}

// The number of each owner, by which it has its colour and its width: the place of the shard in the root's list.
export function numbers(root) {
  return new Map(root.shards.map((shard, at) => [shard.name, at]));
}

export function owners(root) {
  const owners = new Map();
  for (const shard of root.shards) shard.slots.forEach(slot => owners.set(Number(slot), shard.name));
  return owners;
}

export function mark(number) {
  return `owner-${number % COLOURS}`;
}

// `usable`: cells can be reached with the keyboard, and say what they are.
export function ring(usable) {
  const cells = Array.from({ length: SLOTS }, (_, slot) => graphic("path", { "data-slot": slot }));
  const drawing = graphic("svg", { viewBox: "-50 -50 100 100", class: "ring" }, ...cells);
  if (usable) {
    setAttribute(drawing, "role", "listbox");
    setAttribute(drawing, "aria-label", "Slots by owner. Arrow keys go from slot to slot.");
    cells.forEach((cell, slot) => {
      setAttribute(cell, "role", "option");
      setAttribute(cell, "tabindex", slot === 0 ? "0" : "-1");
    });
    drawing.addEventListener("keydown", walk);
    drawing.addEventListener("focusin", reach);
  } else {
    setAttribute(drawing, "role", "img");
  }
  return drawing;
}

function walk(event) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const at = Number(event.target.dataset?.slot);
  const ends = { Home: 0, End: SLOTS - 1 };
  const to = ends[event.key] ?? (steps[event.key] ? (at + steps[event.key] + SLOTS) % SLOTS : undefined);
  if (Number.isNaN(at) || to === undefined) return;
  event.preventDefault();
  event.currentTarget.children[to].focus();
}

// Tab leads to the cell that had the focus last.
function reach(event) {
  for (const cell of event.currentTarget.children) {
    setAttribute(cell, "tabindex", cell === event.target ? "0" : "-1");
  }
}

export function updateRing(drawing, root) {
  const [owned, number] = [owners(root), numbers(root)];
  for (let slot = 0; slot < SLOTS; slot++) {
    const [cell, owner, former] = [drawing.children[slot], owned.get(slot), root.moving[slot]];
    const at = number.get(owner) ?? 0;
    const state = owner !== undefined ? mark(at) : former !== undefined ? "moving" : "unowned";
    setAttribute(cell, "class", `slot ${state}`);
    setAttribute(cell, "d", sector(slot, owner === undefined ? 26 : 30 + 4 * (at % WIDTHS)));
    setAttribute(cell, "data-owner", owner ?? "");
    if (cell.hasAttribute("role")) {
      const says = owner ?? (former !== undefined ? `on its way from ${former}` : "nobody");
      setAttribute(cell, "aria-label", `Slot ${slot}: ${says}`);
      setAttribute(cell, "aria-selected", "false");
    }
  }
  if (drawing.getAttribute("role") === "img") {
    const shares = root.shards.map(shard => `${shard.name} ${shard.slots.length}`).join(", ");
    setAttribute(drawing, "aria-label", `Slots: ${shares || "none"}; nobody ${SLOTS - owned.size}`);
  }
}
