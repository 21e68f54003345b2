// Shows one root: its ring, its shards, and what moves, is wrong, is refused or is tried.

import { ago, element, ranges, setAttribute, setRows, setText, table } from "./dom.js";
import { divides, verdict } from "./overview.js";
import { mark, ring, updateRing } from "./ring.js";

const HEADS = ["Shard", "Slots", "Namespaces", "Pods", "Nodes", "Epoch", "Contact"];
const RATES = ["Requests/s", "Writes/s", "Events/s", "P99"];

export function rootView(title) {
  const parts = {
    drawing: ring(true),
    state: element("p", { class: "verdict" }),
    about: element("p", { class: "about" }),
    chosen: element("p", { class: "chosen" }, "Choose a slot to see its owner."),
    legend: element("ul", { class: "legend", "aria-label": "Colours of shards" }),
    shards: table("shards", "Shards, and what they own", HEADS),
    noRates: element("p", { class: "note" }),
    moving: table("moving", "On the way: taken, and not given yet", ["Slots, or namespace", "From"]),
    problems: table("problems", "What is wrong", ["Of", "Condition", "Reason", "For", "Message"]),
    breakers: table("breakers", "Breakers that refuse requests now", ["Breaker", "Limit", "Pod"]),
    trial: element("p", { class: "note" }),
    checks: table("checks", "Checks of the version that is tried", ["Revision", "Step", "Verdict", "When", "Message"]),
  };
  const { drawing, chosen } = parts;
  parts.shares = element("div", { class: "shares" }, drawing, element("div", {}, chosen, parts.legend));
  const choose = event => {
    if (event.target.dataset?.slot === undefined) return;
    chosen.dataset.slot = event.target.dataset.slot;
    showChosen(parts);
  };
  drawing.addEventListener("focusin", choose);
  drawing.addEventListener("pointerover", choose);
  const node = element("article", { class: "root", "data-root": title, "aria-label": `Root ${title}` },
    element("h2", {}, title), parts.state, parts.about,
    parts.shares,
    wide(parts.shards), parts.noRates, wide(parts.moving), wide(parts.problems), wide(parts.breakers), parts.trial,
    wide(parts.checks));
  return { node, ...parts };
}

// The owner may have changed since the slot was chosen.
function showChosen({ drawing, chosen }) {
  const slot = chosen.dataset.slot;
  if (slot !== undefined) setText(chosen, drawing.children[Number(slot)].getAttribute("aria-label"));
}

// A wide table scrolls by itself, also with the keyboard.
function wide(content) {
  const label = content.querySelector("caption").textContent;
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, content);
}

export function updateRoot(view, root, page) {
  const [says, isBad] = verdict(root);
  setText(view.state, says);
  setAttribute(view.state, "data-bad", String(isBad));
  setText(view.about, `${root.workload ?? "A shard by hand"}, epoch ${root.epoch ?? "-"}`);
  view.shares.hidden = !divides(root);
  updateRing(view.drawing, root);
  showChosen(view);
  setLegend(view.legend, root);
  setShards(view, root, page);
  fill(view.moving, moving(root));
  fill(view.problems, root.problems.map(one => [one.of, one.condition, one.reason, ago(one.since), one.message]));
  fill(view.breakers, root.openBreakers.map(one => [one.breaker, one.limit, one.pod]));
  setTrial(view, root);
}

// By former owner.
function moving(root) {
  const slots = new Map();
  for (const [slot, owner] of Object.entries(root.moving)) slots.set(owner, [...slots.get(owner) ?? [], slot]);
  const namespaces = Object.entries(root.movingNamespaces).map(([namespace, owner]) => [namespace, owner]);
  return [...[...slots].map(([owner, slots]) => [ranges(slots), owner]), ...namespaces];
}

function setLegend(legend, root) {
  const names = root.shards.map(shard => shard.name);
  if (legend.dataset.names === names.join()) return;
  legend.dataset.names = names.join();
  legend.replaceChildren(...names.map((shard, at) => element("li", { class: mark(at) }, shard)));
}

// Without rates there are no columns for them.
function setShards(view, root, page) {
  const hasRates = Object.keys(root.rates).length > 0;
  const heads = hasRates ? [...HEADS, ...RATES] : HEADS;
  const row = view.shards.querySelector("thead tr");
  if (row.children.length !== heads.length) {
    row.replaceChildren(...heads.map(head => element("th", { scope: "col" }, head)));
  }
  setText(view.noRates, page.noRates ? `Rates are missing: ${page.noRates}` : "");
  setRows(view.shards.querySelector("tbody"), root.shards.map(shard => {
    const of = field => shard.pods.map(pod => pod[field] ?? "-").join(", ") || "-";
    const contact = shard.pods.map(pod => ago(pod.lastContact)).join(", ") || "-";
    const cells = [shard.name, ranges(shard.slots), shard.namespaces.join(", ") || "-", of("name"), of("node"),
      of("epoch"), contact];
    return hasRates ? [...cells, ...rates(root.rates[shard.name])] : cells;
  }));
}

function rates(rates) {
  if (!rates) return RATES.map(() => "-");
  const number = value => value.toFixed(1);
  const time = rates.p99Seconds === undefined ? "-" :
    rates.p99Seconds === null ? "long" : `${(rates.p99Seconds * 1000).toFixed(0)} ms`;
  return [number(rates.requests), number(rates.writes), number(rates.events), time];
}

function setTrial(view, root) {
  const trial = root.rollout?.trial;
  const steps = root.trial?.steps;
  setText(view.trial, trial ? `Revision ${trial.revision} is tried: ${trial.phase}, step ${trial.step} of ${steps}, ` +
    `since ${ago(trial.stepStartedAt)}; ${trial.passed} checks passed, ${trial.failed} failed. ${trial.message}` : "");
  const checks = root.rollout?.checks ?? [];
  fill(view.checks, checks.map(one => [one.revision, String(one.step), one.verdict, ago(one.at), one.message]));
}

// A table without rows is not shown.
function fill(content, rows) {
  content.parentElement.hidden = rows.length === 0;
  setRows(content.querySelector("tbody"), rows);
}

export function gone(title) {
  return element("p", { class: "none" }, `There is no root ${title} that you may read. `,
    element("a", { href: "#/" }, "All roots"));
}
