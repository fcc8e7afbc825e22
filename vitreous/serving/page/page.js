// Parts of the page by their id, new ones, and what is said in words.

export const part = (id) => document.getElementById(id);

/** A new element; its text is text, whatever characters it has. */
export function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** A share in [0, 1] with three digits at least: 63.2 %, 0.0412 %. */
export function percent(share) {
  const value = 100 * share;
  const close = value >= 99.95 && value < 100; // to one, and not one
  const text = value === 0 || value >= 9.995 ? value.toFixed(close ? 3 : 1) : value >= 0.001 ? value.toPrecision(3) : value.toExponential(1);
  return `${text}\u00a0%`;
}

/** Say a sentence to screen readers, once nothing else is being said. */
export function say(text) {
  part("said").textContent = text;
}

/** The one of some radio buttons that is chosen. */
export const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

/** Show a problem with what to do about it; `again`, if there is one, is what its button does. */
export function trouble(message, hint = "", again = null) {
  const box = make("div", "trouble-box");
  box.append(make("b", "", message));
  if (hint) box.append(make("span", "", sentence(hint)));
  const tools = make("div", "tools");
  if (again) {
    const button = make("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", () => { calm(); again(); });
    tools.append(button);
  }
  const close = make("button", "quiet", "Close");
  close.type = "button";
  close.addEventListener("click", calm);
  tools.append(close);
  box.append(tools);
  part("trouble").replaceChildren(box);
}

/** With a capital letter and a full stop. */
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** No problem any more. */
export function calm() {
  part("trouble").replaceChildren();
}
