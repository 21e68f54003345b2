// Puts the page together: what is shown goes by the address, and changes with the cluster.

import { ago, setText } from "./dom.js";
import { follow } from "./live.js";
import { name, overview, updateOverview } from "./overview.js";
import { gone, rootView, updateRoot } from "./root.js";
import { owners } from "./ring.js";
import { search } from "./search.js";

const RENEWAL = 5000;

const [live, age, view, changes] = ["live", "age", "view", "changes"].map(id => document.getElementById(id));
let page, shown, staleSince;

// The root that the address names; undefined: all of them.
function wanted() {
  return location.hash.match(/^#\/root\/([a-z0-9.-]+\/[a-z0-9.-]+)$/)?.[1];
}

function show() {
  if (!page) return;
  const title = wanted();
  const root = page.roots.find(one => name(one) === title);
  const kind = title === undefined ? "overview" : root ? `root ${title}` : `gone ${title}`;
  if (shown?.kind !== kind) {
    shown = title === undefined ? overview() : root ? rootView(title) : { node: gone(title) };
    shown.kind = kind;
    view.replaceChildren(shown.node);
    document.title = title ? `${title} - ctrlmesh` : "ctrlmesh";
  }
  if (title === undefined) updateOverview(shown, page);
  else if (root) updateRoot(shown, root, page);
}

// Says what has moved, for those who do not see it.
function announce(before, after) {
  const moved = after.roots.flatMap(root => {
    const former = before?.roots.find(one => name(one) === name(root));
    if (!former) return [];
    const [then, now] = [owners(former), owners(root)];
    const count = [...now].filter(([slot, owner]) => then.get(slot) !== owner).length;
    return count > 0 ? [`${name(root)}: ${count} slots have another owner`] : [];
  });
  if (moved.length === 0) return;
  // The same words again are announced only where they are new.
  setText(changes, "");
  requestAnimationFrame(() => setText(changes, moved.join(". ")));
}

// What a screen reader says once. The age beside it grows without a word.
function state(kind, since, text) {
  staleSince = since;
  live.dataset.state = kind;
  setText(live, text);
  showAge();
}

function showAge() {
  setText(age, staleSince ? `for ${ago(staleSince)}` : "");
}

function lost(why) {
  state("stale", staleSince ?? new Date().toISOString(), `not renewed: ${why}`);
}

function changed(next) {
  announce(page, next);
  page = next;
  if (next.stale) state("stale", next.stale.since, `not renewed: ${next.stale.error}`);
  else state("live", undefined, "live");
  show();
}

function renew() {
  showAge();
  show();
}

addEventListener("hashchange", show);
search(document.getElementById("search"), document.getElementById("explanation"));
setInterval(renew, RENEWAL);
follow(changed, lost);
