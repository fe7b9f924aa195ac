
// ---------------------------------------------------------------- the stage of a graph of links

// Every direction of a link is a line of its own. In a round the links of the routes are coloured by the time they take.
function graphLinks() {
  const { names, switches, lanes } = data.graph, room = data.radius;
  data.graph.lines = lanes.map(([src, dst, speed, width, d]) => {
    const line = make("path", { class: "lane", d, "stroke-width": width }, layers[0]);
    make("title", {}, line).textContent = `${names[src]} → ${names[dst]}: ${speed} GB/s`;
    return line;
  });
  switches.forEach(([x, y], number) => {
    const group = make("g", { class: "switch", transform: `translate(${x} ${y})` }, layers[2]), side = 1.5 * room;
    make("rect", { x: -side / 2, y: -side / 2, width: side, height: side, rx: side / 5 }, group);
    make("text", { "text-anchor": "middle", y: side / 2 + 13, "font-size": 13 }, group).textContent = names[data.size + number];
  });
}

function graphFlows() {
  const { lines, lanes, flows } = data.graph, now = frame ? flows[frame - 1] : [];
  lines.forEach((line) => line.classList.remove("used"));
  return now.map(([lane, load, share]) => {
    const place = lanes[lane][5], line = lines[lane];
    line.classList.add("used");
    line.style.setProperty("--share", `${Math.round(30 + 70 * share)}%`);
    if (place) {
      const text = make("text", { class: "load", x: place[0], y: place[1] + 4, "text-anchor": "middle", "font-size": 14 }, layers[3]);
      text.textContent = +load.toFixed(2);
    }
    const [tip, tail] = [0.66, 0.6].map((part) => line.getPointAtLength(part * line.getTotalLength()));
    const turn = Math.atan2(tip.y - tail.y, tip.x - tail.x) * 180 / Math.PI, size = 3 + lanes[lane][3];
    make("path", { class: "head", d: `M${-size} ${-size * 0.8}L${size} 0L${-size} ${size * 0.8}Z`, transform: `translate(${tip.x} ${tip.y}) rotate(${turn})` }, layers[1]);
    return [line, make("circle", { class: "dot", r: Math.max(3, data.radius / 7) }, layers[1])];
  });
}

function graphDots() {
  for (const [line, dot] of moving) {
    const { x, y } = line.getPointAtLength(progress * line.getTotalLength());
    dot.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    dot.style.visibility = progress < 1 ? "visible" : "hidden";
  }
}

function graphLoad() {
  const now = data.graph.flows[frame - 1], slowest = now.reduce((best, one) => (one[2] > best[2] ? one : best));
  const [src, dst, speed] = data.graph.lanes[slowest[0]], { names } = data.graph;
  return `${plural(now.length, "link")} in use; longest ${names[src]} → ${names[dst]}, ${plural(+slowest[1].toFixed(2), "chunk")} at ${speed} GB/s`;
}

function graphLines() {
  const { names, lanes, flows } = data.graph;
  return (frame ? flows[frame - 1] : []).map(([lane, load, share]) => {
    const line = document.createElement("li"), [src, dst, speed] = lanes[lane];
    line.textContent = `${names[src]} → ${names[dst]}: ${plural(+load.toFixed(2), "chunk")} at ${speed} GB/s, ${Math.round(100 * share)} % of the longest time`;
    return line;
  });
}
