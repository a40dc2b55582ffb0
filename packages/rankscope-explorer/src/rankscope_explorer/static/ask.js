// Asking the server: one answer at a time, the latest setting wins, parts are handed on as they come.

const visitor = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const PATIENCE = 700; // milliseconds after which an answer without a curve gives way to a newer setting

let running = null;
let waiting = null;

// While the curve is on its way a newer request waits for it, so that something is seen while a slider moves.
export function ask(request, on) {
  waiting = { request, on };
  if (!running || running.curve) {
    start();
  } else if (performance.now() - running.since > PATIENCE) {
    start();
  }
}

// What is on its way is of no interest any more.
export function quiet() {
  waiting = null;
  if (running) running.stop.abort();
  running = null;
}

function start() {
  if (running) running.stop.abort();
  const { request, on } = waiting;
  waiting = null;
  const own = (running = { stop: new AbortController(), since: performance.now(), curve: false });
  follow(request, on, own).finally(() => {
    if (running === own) { running = null; if (waiting) start(); }
  });
}

async function follow(request, on, own) {
  on.start();
  try {
    let whole = false;
    for await (const part of answered("/api/answer", request, own.stop.signal)) {
      if (own.stop.signal.aborted) return;
      whole = part.part === "end";
      on.part(part, performance.now() - own.since);
      if (part.part === "curve") {
        own.curve = true;
        if (waiting) { start(); return; }
      }
    }
    if (!whole) throw new TypeError("the answer broke off");
    if (running === own) on.end();
  } catch (error) {
    if (own.stop.signal.aborted || running !== own) return;
    const gone = error instanceof TypeError;
    on.error(gone ? GONE : error.message);
  }
}

export const GONE = "The explorer does not answer: is rankscope explore still running?";

// The parts of an answer as they come; what the server refuses is an Error with its sentence.
export async function* answered(address, request, signal) {
  const answer = await fetch(address, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Visitor": visitor },
    body: JSON.stringify(request),
    signal,
  });
  if (!answer.ok) {
    const error = new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
    throw Object.assign(error, { later: answer.status === 503 || answer.status === 409 });
  }
  for await (const part of lines(answer.body)) {
    if (part.part === "error") throw new Error(part.error);
    yield part;
  }
}

async function* lines(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) if (line) yield JSON.parse(line);
    if (done) return;
  }
}
