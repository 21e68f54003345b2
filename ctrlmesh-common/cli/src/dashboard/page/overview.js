// Shows every root on a card: its ring, and what is wrong with it.

import { element, keyed, ranges, setAttribute, setText } from "./dom.js";
import { owners, ring, updateRing } from "./ring.js";

export function name(root) {
  return `${root.namespace}/${root.name}`;
}

export function address(root) {
  return `#/root/${root.namespace}/${root.name}`;
}

// A shard by hand, and a root that is switched off, have no slots by a table.
export function divides(root) {
  return root.isRoot && !root.disabled;
}

// In a few words, and whether it is bad.
export function verdict(root) {
  if (root.disabled) return ["switched off", false];
  const problems = [...new Set(root.problems.map(one => `${one.condition}: ${one.reason}`))];
  if (root.openBreakers.length > 0) problems.push(`${root.openBreakers.length} breakers open`);
  if (root.unownedSlots.length > 0) problems.push(`slots ${ranges(root.unownedSlots)} belong to nobody now`);
  if (root.unownedNamespaces.length > 0) {
    problems.push(`namespaces ${root.unownedNamespaces.join(", ")} belong to nobody now`);
  }
  if (problems.length === 0 && !root.isWell) problems.push("not well: `ctrlmesh status` says more");
  return problems.length > 0 ? [problems.join(", "), true] : ["all is well", false];
}

export function overview() {
  const list = element("ul", { class: "roots" });
  const none = element("p", { class: "none" }, "There is no root and no shard by hand that you may read.");
  return { node: element("section", { "aria-label": "Roots" }, element("h2", {}, "Roots"), none, list), list, none };
}

export function updateOverview({ list, none }, page) {
  none.hidden = page.roots.length > 0;
  // A root that is switched off or on gets another card.
  keyed(list, page.roots, root => `${name(root)} ${divides(root)}`, card, updateCard);
}

function card(root) {
  const drawing = divides(root) ? ring(false) : undefined;
  const link = element("a", { href: address(root) }, name(root));
  const text = element("div", {},
    element("h3", {}, link), element("p", { class: "workload" }), element("p", { class: "share" }),
    element("p", { class: "verdict" }));
  return element("li", { class: "card", "data-root": name(root) }, drawing, text);
}

function updateCard(node, root) {
  const drawing = node.querySelector("svg");
  if (drawing) updateRing(drawing, root);
  const pods = root.shards.reduce((sum, shard) => sum + shard.pods.length, 0);
  const [says, isBad] = verdict(root);
  setText(node.querySelector(".workload"), root.workload ?? "a shard by hand");
  const owned = divides(root) ? `, ${owners(root).size} of 32 slots owned` : "";
  setText(node.querySelector(".share"), `${root.shards.length} shards, ${pods} pods${owned}`);
  setText(node.querySelector(".verdict"), says);
  setAttribute(node.querySelector(".verdict"), "data-bad", String(isBad));
}
