// Helpers for page elements and for formatting numbers.

/** The element with an id. */
export const part = (id) => document.getElementById(id);

/** Create an element; `text` is inserted as plain text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** Create an element with the name of a file or a class, in which lines may break after / \ - _ . : */
export function makeName(tag, className, name) {
  const element = make(tag, className);
  element.append(...name.split(/(?<=[/\\\-_.:])/).flatMap((piece, index) => (index ? [document.createElement("wbr"), piece] : [piece])));
  return element;
}

/** Format a fraction in [0, 1] as a percentage with two significant digits: 63 %, 4.1 %, 0.041 %. Only 1 is 100 %. */
export function percent(share) {
  const value = 100 * share;
  return `${digits(value)}\u00a0%`;
}

/** Format a percentage with two significant digits; values below 100 are not rounded up to 100. */
function digits(value) {
  if (value === 0 || value >= 100) return value.toFixed(0);
  if (value >= 99.9999) return ">99.9999";
  if (value < 0.001) return value.toExponential(1);
  let text = value < 99.5 ? value.toPrecision(2) : "100";
  for (let places = 1; Number(text) === 100; places++) text = value.toFixed(places);
  return text;
}

/** Format the values of targets with five significant digits: age 31.5, height 1.8. */
export const described = (values) => Object.entries(values).map(([name, value]) => `${name} ${rounded(value)}`).join(", ");

/** Format a number with five significant digits. */
export const rounded = (value) => String(Number(value.toPrecision(5)));

/** Format a position [row, column], which counts from 0, counted from 1. */
export const at = ([row, column]) => `row ${row + 1}, column ${column + 1}`;

/** Announce a sentence to screen readers only. */
export function say(text) {
  part("said").textContent = text;
}

/** The value of the checked radio button of a group. */
export const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

/** Show an error with a hint, and a button "Try again" that calls `again`, if it is set. */
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

/** Make a sentence of a text: a capital letter at the start, a full stop at the end. */
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** Remove the error that is shown. */
export function calm() {
  part("trouble").replaceChildren();
}
