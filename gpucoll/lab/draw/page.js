"use strict";
// `frame` counts rounds; while `progress` is below 1 the messages that lead to
// `frame` are under way and what the ranks hold is still that of the moment before.
const root = document.documentElement;
root.classList.remove("plain");
const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const LAST = data.last;
const WIDTH = data.scratch + data.outputs;
const COLUMNS = Math.max(WIDTH, ...data.inputs.map((row) => row.length));
const MANY = data.size > 24;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const [SENDER, RECEIVER, ROUND, CHUNKS, CONTENT, LABEL] = [0, 1, 2, 3, 4, 5];

const held = snapshots();
const flights = data.changes.map((_, frame) => data.messages.filter((message) => message[ROUND] === frame));
let frame = 0, progress = 1, playing = false, speed = 1, before = 0;

function snapshots() {
  let now = new Int32Array(data.size * WIDTH).fill(-1);
  return data.changes.map((changes) => {
    now = now.slice();
    for (const [rank, output, first, contents] of changes) {
      now.set(contents, rank * WIDTH + (output ? data.scratch : 0) + first);
    }
    return now;
  });
}

const crowds = data.contents;

function need(rank, column) {
  if (column < data.scratch) return data.reduces ? data.size : 1;
  const wanted = data.wanted[rank][column - data.scratch];
  return wanted < 0 ? 1 : crowds[wanted].length;
}

function complete(rank, state) {
  return data.wanted[rank].filter((wanted, chunk) =>
    wanted < 0 || held[state][rank * WIDTH + data.scratch + chunk] === wanted).length;
}

// ---------------------------------------------------------------- the stage: ranks, links, messages

const stage = document.querySelector(".stage svg");
const layers = ["links", "arrows", "nodes", "packets"].map((name) => make("g", { class: name }, stage));
data.groups.forEach(bubble);
links();
const nodes = data.places.map(node);

function make(kind, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

function bubble(ranks) {
  const d = `M${ranks.map((rank) => data.places[rank].join(" ")).join("L")}Z`, width = 2 * data.radius + (MANY ? 12 : 30);
  make("path", { class: "group rim", d, "stroke-width": width + 2 }, layers[0]);
  make("path", { class: "group", d, "stroke-width": width }, layers[0]);
}

function links() {
  const pairs = new Map(data.messages.map(([one, other]) => [Math.min(one, other) * 64 + Math.max(one, other), [one, other]]));
  if (pairs.size > 300) return;
  for (const [one, other] of pairs.values()) {
    const [[x, y], [z, w]] = [data.places[one], data.places[other]];
    make("path", { class: "link", d: `M${x} ${y}L${z} ${w}` }, layers[0]);
  }
}

function node([x, y], rank) {
  const group = make("g", { class: "node", "data-rank": rank, transform: `translate(${x} ${y})` }, layers[2]);
  const radius = data.radius, ring = radius + (MANY ? 3 : 6), width = MANY ? 2.5 : 6;
  make("circle", { r: ring + width / 2 + (MANY ? 0 : 2), style: "fill:var(--paper)" }, group);
  const face = make("g", { class: "face" }, group);
  make("circle", { r: radius, class: `r${rank}` }, face);
  if (data.wanted[rank].length) {
    make("circle", { r: ring, class: "track", "stroke-width": width, style: `stroke-width:${width}` }, group);
    make("circle", { r: ring, class: "gained", pathLength: 100, transform: "rotate(-90)", style: `stroke-width:${width}` }, group);
  }
  if (radius >= 17) {
    const size = Math.max(22, radius * 0.8);
    make("text", { class: "disc", "text-anchor": "middle", y: size * 0.36, "font-size": size }, face).textContent = rank;
  } else if (rank % (data.size > 32 ? 8 : 4) === 0) {
    name(group, x, y, rank);
  }
  return group;
}

function name(group, x, y, rank) {
  const middle = stage.viewBox.baseVal.width / 2, far = Math.hypot(x - middle, y - middle) || 1;
  const away = data.layout === "circle" || data.layout === "hub" ? [(x - middle) / far, (y - middle) / far] : [0, -1];
  const room = data.radius + 16;
  make("text", { class: "name", "text-anchor": "middle", "font-size": 22, x: away[0] * room, y: away[1] * room + 7 }, group).textContent = rank;
}

// A message bends to the right of its way, so that both directions of a link are seen.
function curve(message) {
  const [x, y] = data.places[message[SENDER]], [z, w] = data.places[message[RECEIVER]];
  const far = Math.hypot(z - x, w - y), bend = passes(message) ? 4 * data.radius : Math.min(0.14 * far, 46);
  const middle = [(x + z) / 2 - bend * (w - y) / far, (y + w) / 2 + bend * (z - x) / far];
  const room = Math.min(data.radius + (MANY ? 7 : 13), far / 3);
  return [toward([x, y], middle, room), middle, toward([z, w], middle, room)];
}

// In a grid a way round the torus passes by the ranks between.
function passes(message) {
  const [[x, y], [z, w]] = [data.places[message[SENDER]], data.places[message[RECEIVER]]];
  return data.layout === "grid" && data.places.some(([u, v], rank) => rank !== message[SENDER] && rank !== message[RECEIVER] &&
    Math.hypot(x - u, y - v) + Math.hypot(z - u, w - v) - Math.hypot(x - z, y - w) < 1);
}

function toward([x, y], [z, w], room) {
  const far = Math.hypot(z - x, w - y);
  return [x + (z - x) * room / far, y + (w - y) * room / far];
}

function along([a, b, c], part) {
  return [0, 1].map((axis) => (1 - part) ** 2 * a[axis] + 2 * part * (1 - part) * b[axis] + part ** 2 * c[axis]);
}

function arrow(message) {
  const path = curve(message), [[x, y], [u, v], [z, w]] = path, colour = data.colours[message[SENDER]];
  const turn = Math.atan2(w - v, z - u) * 180 / Math.PI, size = MANY ? 5 : 11;
  make("path", { class: "arrow", d: `M${x} ${y}Q${u} ${v} ${z} ${w}`, style: `stroke:${colour}` }, layers[1]);
  make("path", { d: `M${-size} ${-size * 0.7}L1 0L${-size} ${size * 0.7}Z`, transform: `translate(${z} ${w}) rotate(${turn})`, style: `fill:${colour}` }, layers[1]);
  return path;
}

function packet(message) {
  const group = make("g", { class: "packet" }, layers[3]);
  if (MANY || flights[frame].length > 48) {
    make("circle", { r: MANY ? 3.5 : 6, style: `fill:${data.colours[message[SENDER]]}` }, group);
    return group;
  }
  const text = message[LABEL], width = 22 + (text ? 10 + 12.5 * text.length : 4), left = -width / 2;
  make("rect", { class: "frame", x: left, y: -15, width, height: 30, rx: 7 }, group);
  swatch(group, message[CONTENT], left + 5);
  make("text", { x: left + 26, y: 8, "font-size": 22 }, group).textContent = text;
  return group;
}

function swatch(group, content, x) {
  const crowd = content < 0 ? [] : crowds[content], all = data.reduces ? data.size : 1;
  make("rect", { x, y: -10, width: 16, height: 20, class: crowd.length === data.size && data.size > 1 ? "everybody" : "cell" }, group);
  if (crowd.length === data.size && data.size > 1) return;
  crowd.forEach((rank, turn) => make("rect", { x, y: 10 - 20 * (turn + 1) / all, width: 16, height: 20 / all, class: `r${rank}` }, group));
}

let moving = [], drawn = -1;
function drawStage() {
  if (drawn !== frame) {
    layers[1].replaceChildren();
    layers[3].replaceChildren();
    stage.classList.toggle("many", MANY || flights[frame].length > 48);
    moving = flights[frame].map((message) => [arrow(message), packet(message)]);
    drawn = frame;
  }
  for (const [path, group] of moving) {
    const [x, y] = along(path, 0.22 + 0.48 * progress * progress * (3 - 2 * progress));
    group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  }
}

function drawNodes(state) {
  const busy = new Set(flights[frame].flatMap((message) => [message[SENDER], message[RECEIVER]]));
  nodes.forEach((group, rank) => {
    const done = complete(rank, state), all = data.wanted[rank].length;
    group.classList.toggle("rests", frame > 0 && !busy.has(rank));
    Object.assign(group.dataset, { complete: done, of: all });
    const gained = group.querySelector(".gained");
    if (gained) gained.setAttribute("stroke-dasharray", `${done ? 100 * done / all : 0} 200`);
    if (gained) gained.style.visibility = done ? "visible" : "hidden";
  });
}

// ---------------------------------------------------------------- the cells: what each rank holds

const canvas = document.querySelector("canvas");
const context = canvas.getContext("2d");
let sizes = null, stamps = new Map();

function measure() {
  const room = canvas.parentElement.clientWidth, gap = data.scratch && data.outputs ? 18 : 0;
  const left = 40, right = 30, widest = COLUMNS > 8 ? 40 : COLUMNS > 2 ? 64 : 120;
  const across = Math.max(6, Math.min(widest, (room - left - right - gap) / Math.max(1, COLUMNS)));
  const down = data.size > 32 ? 11 : data.size > 16 ? 16 : data.size > 8 ? 25 : 36;
  const space = across > 14 ? 3 : 1, top = 44;
  sizes = { left, top, gap, across, down, space, width: left + COLUMNS * across + gap + right, height: top + data.size * down + 4 };
  const dense = devicePixelRatio || 1;
  canvas.width = Math.round(sizes.width * dense);
  canvas.height = Math.round(sizes.height * dense);
  canvas.style.width = `${sizes.width}px`;
  canvas.style.height = `${sizes.height}px`;
  context.setTransform(dense, 0, 0, dense, 0, 0);
  stamps = new Map();
}

function colour(role) {
  return getComputedStyle(root).getPropertyValue(`--${role}`).trim();
}

// Before the first message the inputs are shown: what a rank will contribute.
function showsInputs() {
  return shown() === 0 && LAST > 0 && !data.barrier;
}

function cellX(column) {
  return sizes.left + column * sizes.across + (column >= data.scratch && !showsInputs() ? sizes.gap : 0);
}

// A cell as a picture of its own, made once: 64 ranks hold thousands.
function stamp(content, wanted, palette) {
  const key = content * 65 + wanted;
  if (!stamps.has(key)) {
    const made = document.createElement("canvas"), dense = devicePixelRatio || 1;
    const width = sizes.across - sizes.space, height = sizes.down - sizes.space;
    made.width = Math.max(1, Math.round(width * dense));
    made.height = Math.max(1, Math.round(height * dense));
    fill(made, content < 0 ? [] : crowds[content], wanted, palette);
    stamps.set(key, made);
  }
  return stamps.get(key);
}

function fill(made, crowd, wanted, palette) {
  const pen = made.getContext("2d"), stripe = made.height / wanted;
  pen.beginPath();
  pen.roundRect(0, 0, made.width, made.height, Math.min(4, made.width / 5) * (devicePixelRatio || 1));
  pen.clip();
  pen.fillStyle = crowd.length === data.size && data.size > 1 ? palette.done : palette.cell;
  pen.fillRect(0, 0, made.width, made.height);
  if (crowd.length === data.size && data.size > 1) return;
  crowd.forEach((rank, turn) => {
    pen.fillStyle = data.colours[rank];
    pen.fillRect(0, made.height - (turn + 1) * stripe, made.width, stripe + (turn ? 0.6 : 0));
  });
}

function drawCells(state) {
  const palette = Object.fromEntries(["cell", "done", "ink", "muted", "focus", "axis", "paper"].map((role) => [role, colour(role)]));
  const { across, down, space } = sizes, width = across - space, height = down - space;
  context.clearRect(0, 0, sizes.width, sizes.height);
  drawHeads(palette);
  for (let rank = 0; rank < data.size; rank++) {
    const y = sizes.top + rank * down;
    drawRank(rank, y, palette, state);
    if (showsInputs()) {
      drawInput(rank, y, width, height);
      continue;
    }
    for (let column = 0; column < data.scratch + data.wanted[rank].length; column++) {
      const content = held[state][rank * WIDTH + column];
      if (content >= 0 || column >= data.scratch) {
        context.drawImage(stamp(content, need(rank, column), palette), cellX(column), y, width, height);
      }
    }
  }
  if (!showsInputs()) outline(state, palette, width, height);
}

function drawInput(rank, y, width, height) {
  data.inputs[rank].forEach((name, column) => {
    context.fillStyle = data.colours[rank];
    context.beginPath();
    context.roundRect(cellX(column), y, width, height, Math.min(4, width / 5));
    context.fill();
    if (width < 20 || height < 14) return;
    context.fillStyle = "#12161b";
    context.fillText(name, cellX(column) + width / 2, y + height / 2 + 5);
  });
}

function outline(state, palette, width, height) {
  context.strokeStyle = palette.focus;
  context.lineWidth = sizes.across > 14 ? 2.5 : 1;
  for (const [rank, output, first, contents] of state ? data.changes[state] : []) {
    const x = cellX((output ? data.scratch : 0) + first), y = sizes.top + rank * sizes.down;
    context.beginPath();
    context.roundRect(x - 0.5, y - 0.5, (contents.length - 1) * sizes.across + width + 1, height + 1, sizes.across > 14 ? 4.5 : 1);
    context.stroke();
  }
}

function drawHeads(palette) {
  context.font = "600 13px system-ui, sans-serif";
  context.fillStyle = palette.ink;
  context.textAlign = "left";
  const inputs = showsInputs();
  if (inputs) context.fillText(headName("input"), cellX(0), 14);
  else {
    if (data.scratch) context.fillText("scratch", cellX(0), 14);
    if (data.outputs) context.fillText(data.wanted.some((wanted) => wanted.length) ? headName("output") : "", cellX(data.scratch), 14);
  }
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = palette.muted;
  context.textAlign = "center";
  const every = [1, 2, 4, 8, 16, 32].find((step) => step * sizes.across >= 22) || 64;
  for (let column = 0; column < (inputs ? COLUMNS : WIDTH); column++) {
    const chunk = inputs || column < data.scratch ? column : column - data.scratch;
    if (chunk % every === 0) context.fillText(chunk, cellX(column) + (sizes.across - sizes.space) / 2, 36);
  }
}

function headName(what) {
  return data.barrier ? "arrivals" : COLUMNS * sizes.across > 150 ? `${what}, by chunk` : what;
}

function drawRank(rank, y, palette, state) {
  const middle = y + (sizes.down - sizes.space) / 2, radius = Math.min(13, sizes.down / 2 - 1);
  context.beginPath();
  context.arc(16, middle, radius, 0, 2 * Math.PI);
  context.fillStyle = data.colours[rank];
  context.fill();
  context.textAlign = "center";
  context.textBaseline = "middle";
  if (radius > 9) {
    context.fillStyle = "#12161b";
    context.font = "600 13px system-ui, sans-serif";
    context.fillText(rank, 16, middle + 1);
  }
  context.textBaseline = "alphabetic";
  if (!showsInputs() && data.wanted[rank].length && complete(rank, state) === data.wanted[rank].length) tick(middle, palette);
}

function tick(middle, palette) {
  const x = cellX(WIDTH) + 4, size = Math.min(6, sizes.down / 3);
  context.beginPath();
  context.moveTo(x, middle);
  context.lineTo(x + size * 0.7, middle + size * 0.7);
  context.lineTo(x + size * 2, middle - size * 0.8);
  context.strokeStyle = palette.ink;
  context.lineWidth = size / 2.4;
  context.stroke();
}

canvas.addEventListener("pointermove", (event) => {
  const place = canvas.getBoundingClientRect();
  const rank = Math.floor((event.clientY - place.top - sizes.top) / sizes.down);
  const x = event.clientX - place.left;
  const column = Array.from({ length: COLUMNS }, (_, one) => one).find((one) => x >= cellX(one) && x < cellX(one) + sizes.across);
  find("cell").textContent = rank >= 0 && rank < data.size && column !== undefined ? cellText(rank, column) : "";
});

function cellText(rank, column) {
  if (showsInputs()) return column in data.inputs[rank] ? `Rank ${rank}, input chunk ${column}: ${data.inputs[rank][column] || "its own"}` : "";
  if (column >= WIDTH) return "";
  const content = held[shown()][rank * WIDTH + column], output = column >= data.scratch;
  if (output && !data.wanted[rank].length) return `Rank ${rank} has no output`;
  const where = `Rank ${rank}, ${output ? "output" : "scratch"} chunk ${output ? column - data.scratch : column}`;
  if (content < 0) return `${where}: empty`;
  const done = output && content === data.wanted[rank][column - data.scratch];
  return `${where}: from ${crowdText(content)}${done ? ", complete" : ""}`;
}

function crowdText(content) {
  const crowd = crowds[content], runs = [];
  if (crowd.length === data.size && data.size > 1) return "all ranks";
  for (const rank of crowd) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  return `rank${crowd.length > 1 ? "s" : ""} ${runs.map(([first, last]) => (first === last ? first : `${first}–${last}`)).join(", ")}`;
}

// ---------------------------------------------------------------- lanes and words

const over = document.querySelector(".over"), band = document.querySelector(".band");

function drawBand() {
  band.style.left = `${frame ? 100 * (frame - 1) / LAST : 0}%`;
  band.style.width = frame ? `max(${100 / LAST}%, 4px)` : "4px";
}

function frameAt(clientX) {
  const place = over.getBoundingClientRect();
  return Math.ceil(LAST * (clientX - place.left) / place.width);
}

over.addEventListener("pointerdown", (event) => {
  over.setPointerCapture(event.pointerId);
  go(frameAt(event.clientX));
});
over.addEventListener("pointermove", (event) => {
  if (event.buttons) go(frameAt(event.clientX));
});

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function say() {
  const ends = complete_everywhere() ? " Every output is complete." : "";
  const resting = frame ? `${Math.round(100 * data.idle[frame - 1])} % idle` : "";
  find("load").textContent = frame ? plural(data.busiest[frame - 1], "chunk") : "";
  find("idle").textContent = resting;
  const title = `Round ${frame} of ${LAST}`;
  if (!frame) return `Before the start: ${data.barrier ? "each rank knows of its own arrival" : "each input in the colour of its rank"}.${ends}`;
  const told = data.told[frame - 1];
  return `${title}: ${plural(flights[frame].length, "message")}${told ? `, ${told}` : ""}; ${resting}.${ends}`;
}

function complete_everywhere() {
  return data.wanted.every((wanted, rank) => complete(rank, shown()) === wanted.length);
}

function listMessages() {
  if (!document.querySelector("details").open) return;
  const lines = flights[frame].slice(0, 300).map((message) => {
    const line = document.createElement("li"), chunks = message[LABEL] === "" ? "" : `, chunk ${message[LABEL]}`;
    line.textContent = `${message[SENDER]} → ${message[RECEIVER]}${chunks}${message[CONTENT] < 0 ? "" : `, from ${crowdText(message[CONTENT])}`}`;
    return line;
  });
  find("messages").replaceChildren(...lines);
}

document.querySelector("details").addEventListener("toggle", listMessages);

// ---------------------------------------------------------------- the player

function shown() {
  return progress < 1 ? frame - 1 : frame;
}

let painted = -1;
function paint() {
  drawStage();
  const state = shown();
  if (painted !== state * 2 + (progress < 1)) {
    painted = state * 2 + (progress < 1);
    drawNodes(state);
    drawCells(state);
    drawBand();
    listMessages();
    find("said").textContent = say();
    find("scrub").value = frame;
    find("scrub").setAttribute("aria-valuetext", `round ${frame} of ${LAST}`);
    Object.assign(root.dataset, { frame: state, moving: String(progress < 1) });
  }
}

function repaint() {
  painted = drawn = -1;
  measure();
  paint();
}

function seconds() {
  return Math.min(1.1, Math.max(0.22, 24 / LAST)) / speed;
}

function tickOn(moment) {
  if (progress >= 1) return;
  progress = Math.min(1, progress + (moment - before) / 1000 / (playing ? seconds() : 0.45));
  before = moment;
  if (progress === 1 && playing && frame < LAST) {
    paint();
    frame += 1;
    progress = 0;
  } else if (progress === 1) {
    setPlaying(false);
  }
  paint();
  if (progress < 1) requestAnimationFrame(tickOn);
}

function setPlaying(on) {
  playing = on;
  root.classList.toggle("playing", on);
}

function go(place) {
  setPlaying(false);
  frame = Math.max(0, Math.min(LAST, place));
  progress = 1;
  paint();
}

function fly() {
  const resting = progress >= 1;
  frame += 1;
  progress = 0;
  before = performance.now();
  paint();
  if (resting) requestAnimationFrame(tickOn);
}

function stepOn() {
  const next = progress < 1 && playing ? frame : frame + 1;
  go(progress < 1 ? frame : next - 1);
  if (next > LAST) return;
  if (calm.matches || frame >= next) go(next);
  else fly();
}

function playOrPause() {
  if (playing) return go(frame);
  if (!LAST) return undefined;
  if (frame === LAST) go(0);
  setPlaying(true);
  return progress < 1 ? undefined : fly();
}

const actions = { " ": playOrPause, ArrowRight: stepOn, ArrowLeft: () => go(shown() - 1), Home: () => go(0), End: () => go(LAST) };
const buttons = { play: " ", step: "ArrowRight", back: "ArrowLeft", first: "Home", end: "End" };
for (const [id, key] of Object.entries(buttons)) find(id).addEventListener("click", () => actions[key]());
document.addEventListener("keydown", (event) => {
  const native = event.key === " " && event.target.closest("button, summary, a");
  if (!(event.key in actions) || native || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  actions[event.key]();
});
find("scrub").addEventListener("input", () => go(Number(find("scrub").value)));
find("speed").addEventListener("click", () => {
  speed = { 1: 2, 2: 4, 4: 0.5, 0.5: 1 }[speed];
  find("speed").textContent = `${speed === 0.5 ? "½" : speed}×`;
});

const theme = find("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(repaint).observe(canvas.parentElement);
repaint();
