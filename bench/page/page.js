"use strict";
// Conveniences only: without them the page shows the same. They light up what a pointer or the arrow keys stand on,
// hide lines, and choose between light and dark.
document.documentElement.classList.remove("plain");

for (const figure of document.querySelectorAll("figure[tabindex]")) {
  const readings = JSON.parse(figure.querySelector("script").textContent);
  const output = figure.querySelector("output");
  const pictures = [...figure.querySelectorAll("svg")];
  let current = -1;
  const show = (place) => {
    current = Math.max(0, Math.min(readings.length - 1, place));
    const [size, lines] = readings[current];
    const title = document.createElement("b");
    title.textContent = size;
    output.replaceChildren(title, ...lines.filter(([key]) => !isHidden(figure, key)).flatMap(([, name, text]) => {
      const span = document.createElement("span");
      span.textContent = `${name} ${text}`;
      return [" ", span];
    }));
    pictures.forEach((picture) => moveCursor(picture, columns(picture)[current]));
  };
  for (const picture of pictures) {
    picture.addEventListener("pointermove", (event) => {
      const scale = picture.viewBox.baseVal.width / picture.getBoundingClientRect().width;
      const x = (event.clientX - picture.getBoundingClientRect().left) * scale;
      const far = columns(picture).map((column) => Math.abs(column - x));
      show(far.indexOf(Math.min(...far)));
    });
  }
  const steps = { ArrowLeft: () => current - 1, ArrowRight: () => current + 1, Home: () => 0, End: () => readings.length - 1 };
  figure.addEventListener("keydown", (event) => {
    if (event.key in steps) {
      event.preventDefault();
      show(steps[event.key]());
    }
  });
  figure.addEventListener("focus", () => { if (current < 0) show(readings.length - 1); });
}

function columns(picture) {
  return picture.dataset.columns.split(",").map(Number);
}

function moveCursor(picture, x) {
  let cursor = picture.querySelector(".cursor");
  if (!cursor) {
    cursor = document.createElementNS(picture.namespaceURI, "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", 28);
    cursor.setAttribute("y2", picture.viewBox.baseVal.height - 50);
    picture.prepend(cursor);
  }
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
}

function isHidden(figure, key) {
  const line = [...figure.querySelectorAll("g[data-line]")].find((group) => group.dataset.line === key);
  return line !== undefined && line.classList.contains("off");
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const line of button.closest("section").querySelectorAll("g[data-line]")) {
      if (line.dataset.line === button.dataset.shows) line.classList.toggle("off", !shown);
    }
  });
}

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
