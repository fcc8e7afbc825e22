// Requests to the server; error responses are raised as `Refused`.

const KEPT = "vitreous-token"; // key of the access token in the session storage of the tab
const PATIENCE = 600_000; // deadline of a sampling request in milliseconds

/** An error response of the server: message, hint, code, and seconds until a retry. */
export class Refused extends Error {
  constructor(message, hint = "", code = "", retry = 0) {
    super(message);
    Object.assign(this, { hint, code, retry });
  }

  /** Whether the same request may succeed if it is sent again. */
  get passing() {
    return this.retry > 0 || ["gone", "deadline", "too_slow", "unauthorised"].includes(this.code);
  }
}

let token = sessionStorage.getItem(KEPT) ?? "";
let wanted = null; // the dialog that asks for a token, as a promise; null if it is closed

/** Called if the server requires a token, with whether the current token is wrong; resolves to a token, or to an empty string. */
let ask = async () => "";
export const onToken = (function_) => { ask = function_; };

/** Ask the user for a token. Requests that are refused in the meantime share the dialog. Resolves to whether there is a new token. */
function another() {
  wanted ??= ask(token !== "").then((newToken) => {
    wanted = null;
    if (newToken) sessionStorage.setItem(KEPT, token = newToken);
    return Boolean(newToken);
  });
  return wanted;
}

/** Send a request: POST if there is a body, else GET. Resolves to a successful response; raises `Refused` otherwise. */
async function question(path, body, signal, extraHeaders = {}) {
  for (;;) {
    const usedToken = token;
    const headers = usedToken ? { ...extraHeaders, Authorization: `Bearer ${usedToken}` } : extraHeaders;
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, credentials: "omit", redirect: "error", cache: "no-store" });
    } catch (error) {
      throw gone(error);
    }
    if (response.status === 401 && (usedToken !== token || (await another()))) continue;
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

/** Convert an exception of `fetch`: no response, or a request that the page has aborted. */
function gone(error) {
  if (error.name === "AbortError") return error;
  return new Refused("No response from the server.", "Check that it is running, then try again.", "gone");
}

/** Convert an error response to `Refused`. */
async function refusal(response) {
  const retry = Number(response.headers.get("Retry-After")) || 0;
  let errorFields = {};
  try {
    errorFields = (await response.json()).error ?? {};
  } catch { /* the response of a proxy is not JSON */ }
  return refused(errorFields, response.status, retry);
}

/** Convert the `error` of a JSON response to `Refused`. */
function refused(errorFields, status, retry = 0) {
  const wait = retry ? `Try again in ${retry} ${retry === 1 ? "second" : "seconds"}.` : "";
  const message = errorFields.message || `The server responded with status ${status}.`;
  return new Refused(message, wait || errorFields.hint, errorFields.code || String(status), retry);
}

/** Request a JSON document: POST if there is a body, else GET. */
export async function numbers(path, body = null, signal = undefined) {
  const response = await question(path, body, signal);
  try {
    return await response.json();
  } catch (error) {
    throw gone(error);
  }
}

/** POST a JSON document, and read a response of JSON lines: `take` is called with each preview; the last line is returned. */
export async function lines(path, document, signal, take) {
  const headers = { "Content-Type": "application/json", Accept: "application/x-ndjson", "X-Deadline-Ms": String(PATIENCE) };
  const response = await question(path, JSON.stringify(document), signal, headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incompleteLine = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const completeLines = (incompleteLine + value).split("\n");
      incompleteLine = completeLines.pop();
      for (const line of completeLines.map((text) => JSON.parse(text))) {
        if (line.event === "error") throw refused(line.error, response.status);
        if (line.event === "result") return line;
        take(line);
      }
    }
  } catch (error) {
    throw error instanceof Refused ? error : gone(error);
  }
  throw gone(new Error("the response ended before its last line"));
}

/** GET a file. */
export async function blob(path) {
  return (await question(path)).blob();
}

/** POST a file, and return the image in the response. */
export async function picture(path, file, name) {
  return (await question(path, upload(file, name))).blob();
}

/** Put a file, with its bytes unchanged, into a multipart request body. */
export function upload(file, name) {
  const form = new FormData();
  form.append("image", file, name);
  return form;
}
