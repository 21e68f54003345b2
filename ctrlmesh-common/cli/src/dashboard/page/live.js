// Follows the server, and asks it. The token came with the address, and is kept as long as the tab is open.

const AGAIN = 2000;

function take() {
  const given = location.hash.match(/^#token=([0-9a-f]+)$/);
  if (!given) return;
  sessionStorage.setItem("token", given[1]);
  history.replaceState(null, "", "#/");
}

take();
addEventListener("hashchange", take);

export async function ask(path) {
  return fetch(path, { headers: { Authorization: `Bearer ${sessionStorage.getItem("token") ?? ""}` } });
}

// Calls `changed` with each state, and `lost` with the reason when there is none.
export async function follow(changed, lost) {
  for (;;) {
    try {
      const answer = await ask("/api/events");
      if (!answer.ok) throw new Error((await answer.json()).error);
      await messages(answer.body, text => changed(JSON.parse(text)));
      lost("the server has ended the stream");
    } catch (error) {
      lost(error.message);
    }
    await new Promise(done => setTimeout(done, AGAIN));
  }
}

// Server-sent events: lines `data: …`, and an empty line after each message. Other lines are comments.
async function messages(body, each) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) each(part.slice("data: ".length));
      }
    }
  } finally {
    // Else the connection would stay open, and a browser has only six.
    reader.cancel().catch(() => {});
  }
}
