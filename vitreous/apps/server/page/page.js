// Parts of the page by their id, new ones, and what is said in words.

export const part = (id) => document.getElementById(id);

/** A new element; its text is text, whatever characters it has. */
export function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** A new element with the name of a file or a class, which may break after / \ - _ . : and nowhere else while there is room. */
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

/** The values of targets in words, five significant digits each: age 31.5, height 1.8. */
export const described = (values) => Object.entries(values).map(([name, value]) => `${name} ${rounded(value)}`).join(", ");

/** A number with five significant digits. */
export const rounded = (value) => String(Number(value.toPrecision(5)));

/** A [row, column] in words, counted from 1. */
export const at = ([row, column]) => `row ${row + 1}, column ${column + 1}`;

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
