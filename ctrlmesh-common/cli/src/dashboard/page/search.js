// Explains to whom an object belongs.

import { element } from "./dom.js";
import { ask } from "./live.js";

export function search(form, place) {
  let asked = 0;
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const number = ++asked;
    const show = (...content) => {
      // A later question has been asked meanwhile.
      if (number === asked) place.replaceChildren(...content, close(place, form));
    };
    const query = new URLSearchParams(new FormData(form));
    place.hidden = false;
    place.replaceChildren(element("p", {}, "Asking the API server …"));
    try {
      const answer = await ask(`/api/explain?${query}`);
      const content = await answer.json();
      show(...(answer.ok ? explained(content) : [failed(content.error)]));
    } catch (error) {
      show(failed(error.message));
    }
  });
}

function explained({ object, steps }) {
  const step = ({ title, lines }) => element("li", {},
    element("strong", {}, title), ...lines.map(line => line.includes("\n")
      ? element("pre", { tabindex: "0", "aria-label": title }, line) : element("p", {}, line)));
  return [element("h2", {}, object), element("ol", {}, ...steps.map(step))];
}

function failed(why) {
  return element("p", { class: "verdict", "data-bad": "true", role: "alert" }, why);
}

function close(place, form) {
  const button = element("button", { type: "button" }, "Close the explanation");
  button.addEventListener("click", () => {
    place.hidden = true;
    form.elements.resource.focus();
  });
  return button;
}
