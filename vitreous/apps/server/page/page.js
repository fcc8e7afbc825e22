// Helpers for page elements and for formatting numbers.

export const part = (id) => document.getElementById(id);

/** Create an element; `text` is inserted as plain text. */
export function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Create an element with a file or class name, with line breaks allowed after / \ - _ . : */
export function makeName(tag, className, name) {
  const made = make(tag, className);
  made.append(...name.split(/(?<=[/\\\-_.:])/).flatMap((piece, place) => (place ? [document.createElement("wbr"), piece] : [piece])));
  return made;
}

/** A share in [0, 1] with two significant digits, as `format_share` of the reports: 63 %, 4.1 %, 0.041 %; 100 % is 1 exactly. */
export function percent(share) {
  const value = 100 * share;
  return `${digits(value)}\u00a0%`;
}

function digits(value) {
  if (value === 0 || value >= 100) return value.toFixed(0);
  if (value >= 99.9999) return ">99.9999";
  if (value < 0.001) return value.toExponential(1);
  let text = value < 99.5 ? value.toPrecision(2) : "100";
  for (let places = 1; Number(text) === 100; places++) text = value.toFixed(places);
  return text;
}

/** Format target values with five significant digits: age 31.5, height 1.8. */
export const described = (values) => Object.entries(values).map(([name, value]) => `${name} ${rounded(value)}`).join(", ");

/** A number with five significant digits. */
export const rounded = (value) => String(Number(value.toPrecision(5)));

/** Format a [row, column], counted from 1. */
export const at = ([row, column]) => `row ${row + 1}, column ${column + 1}`;

/** Announce a sentence to screen readers. */
export function say(text) {
  part("said").textContent = text;
}

/** The value of the checked radio button. */
export const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

/** Show an error with a hint; `again`, if set, is the action of its button. */
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

/** Add a capital letter and a full stop. */
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** Remove the error. */
export function calm() {
  part("trouble").replaceChildren();
}
