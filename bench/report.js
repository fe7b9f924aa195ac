
"use strict";
// Draws each figure when it comes into view, in the page's colours; without scripts the tables remain.
document.documentElement.classList.remove("plain");
const config = { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] };
const drawn = new Set();

function draw(figure) {
  const style = getComputedStyle(document.documentElement);
  const text = figure.querySelector("script").textContent;
  const chart = JSON.parse(text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()));
  if (matchMedia("(pointer: coarse)").matches) chart.layout.dragmode = false;  // a finger scrolls the page
  if (!drawn.has(figure)) {
    drawn.add(figure);
    figure.append(document.createElement("div"));
  }
  Plotly.react(figure.lastChild, chart.data, chart.layout, config);
}

const figures = document.querySelectorAll("figure");
const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
  seen.unobserve(entry.target);
  draw(entry.target);
}), { rootMargin: "600px" });
figures.forEach((figure) => seen.observe(figure));
addEventListener("beforeprint", () => figures.forEach(draw));

const night = matchMedia("(prefers-color-scheme: dark)"), theme = document.getElementById("theme");
const repaint = () => drawn.forEach(draw);
night.addEventListener("change", repaint);
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = (root.dataset.theme ? root.dataset.theme === "dark" : night.matches) ? "light" : "dark";
  repaint();
});
