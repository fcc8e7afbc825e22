// Requests to the server; error responses are raised as `Refused`.

const KEPT = "vitreous-token";
const PATIENCE = 600_000; // deadline in milliseconds of a sampling request

/** An error response of the server: message, hint, code, and seconds until a retry. */
export class Refused extends Error {
  constructor(message, hint = "", code = "", retry = 0) {
    super(message);
    Object.assign(this, { hint, code, retry });
  }

  /** Whether a retry of the same request may succeed. */
  get passing() {
    return this.retry > 0 || ["gone", "deadline", "too_slow", "unauthorised"].includes(this.code);
  }
}

let token = sessionStorage.getItem(KEPT) ?? "";
let wanted = null;

/** `ask(wrong)` is called if the server requires a token; it resolves to a token, or to an empty string. */
let ask = async () => "";
export const onToken = (function_) => { ask = function_; };

/** One dialog for all requests that were refused in the meantime. */
function another() {
  wanted ??= ask(token !== "").then((given) => {
    wanted = null;
    if (given) sessionStorage.setItem(KEPT, token = given);
    return Boolean(given);
  });
  return wanted;
}

async function question(path, body, signal, more = {}) {
  for (;;) {
    const used = token;
    const headers = used ? { ...more, Authorization: `Bearer ${used}` } : more;
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, credentials: "omit", redirect: "error", cache: "no-store" });
    } catch (error) {
      throw gone(error);
    }
    if (answer.status === 401 && (used !== token || (await another()))) continue;
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }
}

function gone(error) {
  if (error.name === "AbortError") return error;
  return new Refused("No response from the server.", "Check that it is running, then try again.", "gone");
}

async function refusal(answer) {
  const retry = Number(answer.headers.get("Retry-After")) || 0;
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch { /* a response from a proxy */ }
  return refused(told, answer.status, retry);
}

function refused(told, status, retry = 0) {
  const wait = retry ? `Try again in ${retry} ${retry === 1 ? "second" : "seconds"}.` : "";
  const message = told.message || `The server responded with status ${status}.`;
  return new Refused(message, wait || told.hint, told.code || String(status), retry);
}

/** GET or POST with a JSON response. */
export async function numbers(path, body = null, signal = undefined) {
  const answer = await question(path, body, signal);
  try {
    return await answer.json();
  } catch (error) {
    throw gone(error);
  }
}

/** POST of a document with a response in JSON lines: `take` receives each preview; the last line is returned. */
export async function lines(path, document, signal, take) {
  const headers = { "Content-Type": "application/json", Accept: "application/x-ndjson", "X-Deadline-Ms": String(PATIENCE) };
  const answer = await question(path, JSON.stringify(document), signal, headers);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const pieces = (rest + value).split("\n");
      rest = pieces.pop();
      for (const line of pieces.map((piece) => JSON.parse(piece))) {
        if (line.event === "error") throw refused(line.error, answer.status);
        if (line.event === "result") return line;
        take(line);
      }
    }
  } catch (error) {
    throw error instanceof Refused ? error : gone(error);
  }
  throw gone(new Error("the response ended before its last line"));
}

/** GET with a file as response. */
export async function blob(path) {
  return (await question(path)).blob();
}

/** POST of a file with an image as response. */
export async function picture(path, file, name) {
  return (await question(path, upload(file, name))).blob();
}

/** A file as a multipart request body, with its bytes unchanged. */
export function upload(file, name) {
  const form = new FormData();
  form.append("image", file, name);
  return form;
}
