// The page of a trace. Texts reach the document as text nodes only, never as markup.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const MASK = "░";
const HEAT = [[0.99, "sure"], [0.95, "good"], [0.8, "fair"], [0, "weak"]];
const REASONS = {
  above_threshold: "above the threshold",
  most_confident: "the most confident row, as no row was sure",
  next_token: "the next token, one a forward",
  draft: "a draft, to be verified",
  accepted: "a draft that the verify accepted",
  boundary: "the verify's own token behind the accepted drafts",
  min_per_pass: "to reach the least rows a pass",
  finish_gap: "to close a gap of few masks",
};
const LONGEST_TEXT = 800; // tokens of the text so far that the stage shows

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, f] of Object.entries(value)) element.addEventListener(event, f);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const sum = (list) => list.reduce((total, each) => total + each, 0);
const heat = (confidence) => HEAT.find(([bound]) => confidence >= bound)?.[1] ?? "weak";
const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 2 : 1)} %`;
const tokenText = (token) => DATA.tokens[token] ?? "";

// White space alone would be invisible.
function shown(token) {
  const text = tokenText(token).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return /^ *$/.test(text) ? "␣".repeat(Math.max(text.length, 1)) : text;
}

function describe([row, token, confidence, reason, top]) {
  const others = top.map(([other, share]) => `${percent(share)}  ${shown(other)}`);
  return [`row ${row}: ${shown(token)}, ${percent(confidence)}`, REASONS[reason] ?? `rule ${reason}`, ...others].join("\n");
}

// A cell of a block: what stands in a row after a forward; `picked` if this forward put it there.
function cell(run, token, picked, extra = "") {
  if (!picked && token === run.mask) return make("bdi", { class: `cell mask ${extra}` }, MASK);
  const kind = picked ? `picked ${heat(picked[2])}` : "kept";
  const title = picked ? describe(picked) : shown(token);
  return make("bdi", { class: `cell ${kind} ${extra}`, title, "data-row": picked ? picked[0] : null }, shown(token));
}

// The cells of a forward in the order of its rows, a list for each: two where a draft was replaced.
function cells(run, step) {
  const picked = new Map(step.picked.map((each) => [each[0], each]));
  if (step.kind === "verify") return verifyCells(run, step, picked);
  const rows = Math.max(step.before.length, ...step.picked.map(([row]) => row + 1));
  return Array.from({ length: rows }, (_, row) => [cell(run, picked.get(row)?.[1] ?? step.before[row], picked.get(row))]);
}

// Row r of a verify judges the draft in row r + 1; the boundary token takes the first rejected one's place.
function verifyCells(run, step, picked) {
  const boundary = picked.get(step.accepted);
  const last = boundary ? cell(run, boundary[1], boundary, "boundary") : null;
  const places = step.before.map((token, row) => {
    const pending = row === 0;
    const accepted = !pending && row <= step.accepted;
    const own = accepted ? cell(run, token, picked.get(row - 1), "accepted") : cell(run, token, null, pending ? "pending" : "rejected");
    if (!pending && !accepted) own.title = `${shown(token)}: a draft that the verify rejected`;
    if (pending) own.title = `${shown(token)}: the token before the drafts`;
    return row === step.accepted + 1 && last ? [last, own] : [own];
  });
  return last && step.accepted + 1 === step.before.length ? [...places, [last]] : places;
}

// Forwards that belong together: a block, a round, or a stretch of ar.
function groupsOf(run) {
  const groups = [];
  run.steps.forEach((step, index) => {
    const key = step.mode === "ar" || (step.kind === "pass" && step.before.length === 0) ? "ar" : step.block;
    const last = groups.at(-1);
    if (last && last.key === key && last.mode === step.mode && !run.choices.some(([before]) => before === index)) last.end = index + 1;
    else groups.push({ key, mode: step.mode, begin: index, end: index + 1 });
  });
  return groups;
}

function groupTitle(run, group, base) {
  const steps = run.steps.slice(group.begin, group.end);
  const first = steps[0];
  const ms = `${sum(steps.map((step) => step.ms)).toFixed(0)} ms`;
  const at = `from token ${first.start - base}`;
  if (group.key === "ar" && first.mode !== "ar") return `${first.mode} · the first token, from the forward before`;
  if (group.key === "ar") return `ar · ${plural(steps.length, "token")}, one a forward · ${at}`;
  const verify = steps.find((step) => step.kind === "verify");
  if (verify) return `draft · round ${first.block} · ${verify.accepted} of ${plural(verify.before.length - 1, "draft")} accepted, and one token more · ${at} · ${ms}`;
  const fixed = sum(steps.map((step) => step.picked.length));
  return `${first.mode} · block ${first.block} · ${plural(fixed, "row")} in ${plural(steps.length, "pass").replace("passs", "passes")} · ${at} · ${ms}`;
}

const stepName = (step) => (step.kind === "verify" ? "verify" : `pass ${step.number + 1}`);

function stepNote(step) {
  const least = Math.min(...step.coreset), most = Math.max(...step.coreset);
  const experts = step.coreset.length ? `${least === most ? most : `${least} to ${most}`} experts a layer` : null;
  return [`${step.ms.toFixed(1)} ms`, `+${step.picked.length}`, experts, ...step.controls].filter(Boolean).join(" · ");
}

// The table of passes and rows of a group; `current` is marked, a click goes to its forward.
function grid(run, group, { current = -1, choose, until = group.end }) {
  if (group.key === "ar") return make("div", { class: "flow" }, ...run.steps.slice(group.begin, until).map((step, offset) => {
    const element = cell(run, step.picked[0][1], step.picked[0], group.begin + offset === current ? "current" : "");
    element.addEventListener("click", () => choose(group.begin + offset, 0));
    return element;
  }));
  const rows = [];
  for (let index = group.begin; index < until; index += 1) {
    const step = run.steps[index];
    const row = make("tr", { class: `pass ${index === current ? "current" : ""}` },
      make("th", { scope: "row" }, stepName(step), make("small", {}, stepNote(step))),
      step.kind === "pass" && step.mode === "draft" ? make("td") : null, // where the verify has the token before the drafts
      ...cells(run, step).map((each) => make("td", {}, ...each)));
    row.addEventListener("click", (event) => choose(index, Number(event.target.dataset?.row ?? NaN)));
    rows.push(row);
  }
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("tbody", {}, ...rows)));
}

// The answer as the forwards up to `last` left it: [token, picked] by place; drafts are not in it.
function textBefore(run, last, base) {
  const text = [];
  for (const step of run.steps.slice(0, last)) {
    const at = step.start - base;
    if (step.kind === "verify") {
      text.length = Math.min(text.length, at + 1);
      step.picked.forEach((picked) => { text[at + 1 + picked[0]] = [picked[1], picked]; });
    } else if (step.mode !== "draft" || step.before.length === 0) {
      text.length = Math.min(text.length, at + step.before.length);
      step.picked.forEach((picked) => { text[at + picked[0]] = [picked[1], picked]; });
    }
  }
  return text;
}

function facts(entries) {
  return make("dl", {}, ...entries.flatMap(([name, value]) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, make("bdi", {}, value))]));
}

const folded = (title, ...children) => make("details", {}, make("summary", {}, title), ...children);

function head(run, number) {
  const picked = sum(run.steps.map((step) => step.picked.length));
  const title = DATA.runs.length > 1 ? `Run ${number + 1} of ${DATA.runs.length}` : "How this text was written";
  const ended = run.finish ? `finish reason ${run.finish}` : "cut off before its end";
  const changed = run.changed.map(([name, value, usual]) => make("li", {}, make("b", {}, name), ` ${value} `, make("small", {}, `instead of ${usual}`)));
  return [
    make("h2", {}, title),
    make("p", { class: "lead" }, make("b", {}, run.mode), " on ", make("b", {}, run.model), `: ${plural(run.steps.length, "forward")} that picked tokens, ${plural(picked, "pick")}, ${sum(run.steps.map((s) => s.ms)).toFixed(0)} ms, and ${run.commitMs.toFixed(0)} ms to commit them; ${ended}.`),
    changed.length ? make("ul", { class: "changed", "aria-label": "settings other than the model's defaults" }, ...changed) : null,
    make("div", { class: "texts" },
      make("div", {}, make("h3", {}, "Prompt"), make("pre", { class: "prompt", tabindex: "0" }, run.prompt)),
      make("div", {}, make("h3", {}, "Answer"), make("pre", { class: "answer", tabindex: "0" }, run.answer || "(none recorded)"))),
    folded("Where and with what", facts(Object.entries(run.facts))),
    folded("All settings", facts(Object.entries(run.settings))),
    Object.keys(run.stats).length ? folded("Measured", facts(Object.entries(run.stats))) : null,
  ].filter(Boolean);
}

// The panel of one picked row: why it left the mask, and what else was likely.
function panel(picked) {
  if (!picked) return [make("p", {}, "This forward fixed no row.")];
  const [row, token, confidence, reason, top] = picked;
  return [
    make("p", {}, `Row ${row}: `, make("bdi", { class: `cell picked ${heat(confidence)}` }, shown(token)), ` ${percent(confidence)}, ${REASONS[reason] ?? `by the rule ${reason}`}.`),
    make("ol", { class: "top" }, ...top.map(([other, share]) => {
      const bar = make("i", {});
      bar.style.width = percent(Math.min(share, 1)).replace(" ", "");
      return make("li", { class: other === token ? "taken" : "" }, make("bdi", {}, shown(other)), make("span", { class: "bar" }, bar), make("span", {}, percent(share)));
    })),
  ];
}

class Stage {
  constructor(run, groups, base) {
    Object.assign(this, { run, groups, base, index: 0, row: null, timer: null });
    const button = (label, name, by) => make("button", { type: "button", "aria-label": name, title: name, on: { click: () => { this.stop(); by(); } } }, label);
    this.slider = make("input", { type: "range", min: 0, max: run.steps.length - 1, value: 0, "aria-label": "forward", on: { input: () => { this.stop(); this.go(Number(this.slider.value)); } } });
    this.play = make("button", { type: "button", class: "play", "aria-label": "play", title: "play (space)", on: { click: () => this.toggle() } }, "▶");
    this.where = make("output", { "aria-live": "polite" });
    this.text = make("div", { class: "text", tabindex: "0", "aria-label": "the text so far" });
    this.grid = make("div", { class: "now" });
    this.panel = make("aside", { "aria-live": "polite" });
    this.element = make("section", { class: "stage", tabindex: "0", "aria-label": "step through the forwards", on: { keydown: (event) => this.key(event) } },
      make("div", { class: "controls" },
        button("«", "block before (page up)", () => this.block(-1)), button("‹", "forward before (left)", () => this.go(this.index - 1)), this.play,
        button("›", "next forward (right)", () => this.go(this.index + 1)), button("»", "next block (page down)", () => this.block(1)), this.slider, this.where),
      this.text, this.grid, this.panel);
  }

  key(event) {
    const moves = { ArrowLeft: () => this.go(this.index - 1), ArrowRight: () => this.go(this.index + 1), PageUp: () => this.block(-1), PageDown: () => this.block(1), Home: () => this.go(0), End: () => this.go(Infinity), ArrowUp: () => this.pick(-1), ArrowDown: () => this.pick(1), " ": () => this.toggle() };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    if (event.key !== " ") this.stop();
    move();
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.index === this.run.steps.length - 1) this.go(0);
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "pause");
    this.timer = setInterval(() => (this.index < this.run.steps.length - 1 ? this.go(this.index + 1) : this.stop()), 350);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "play");
  }

  block(by) {
    const here = this.groups.findIndex((group) => this.index < group.end);
    const back = by < 0 && this.index > this.groups[here].begin;
    this.go(this.groups[Math.min(Math.max(back ? here : here + by, 0), this.groups.length - 1)].begin);
  }

  pick(by) {
    const rows = this.run.steps[this.index].picked.map((each) => each[0]);
    const next = rows[Math.min(Math.max(rows.indexOf(this.row) + by, 0), rows.length - 1)];
    this.go(this.index, next);
  }

  go(index, row = NaN) {
    this.index = Math.min(Math.max(index, 0), this.run.steps.length - 1);
    const step = this.run.steps[this.index];
    const picked = step.picked.find((each) => each[0] === row) ?? step.picked.reduce((least, each) => (least && least[2] <= each[2] ? least : each), null);
    this.row = picked?.[0] ?? null;
    this.slider.value = this.index;
    const number = this.groups.findIndex((group) => this.index < group.end), group = this.groups[number];
    this.where.textContent = `${this.index + 1} of ${this.run.steps.length} · ${step.mode} · ${group.key === "ar" ? `token ${step.start - this.base}` : `${step.mode === "draft" ? "round" : "block"} ${step.block}, ${stepName(step)}`}`;
    this.showText(step, group);
    this.grid.replaceChildren(...this.why(group), grid(this.run, group, { current: this.index, until: this.index + 1, choose: (...to) => this.go(...to) }));
    this.grid.querySelector(`.current [data-row="${this.row}"]`)?.classList.add("chosen");
    this.panel.replaceChildren(...panel(picked));
    this.onMove?.(number);
  }

  why(group) {
    return this.run.choices.filter(([before]) => before === group.begin).map((each) => choiceLine(each));
  }

  showText(step, group) {
    const text = textBefore(this.run, this.index, this.base).slice(0, Math.max(step.start - this.base + (step.kind === "verify" ? 1 : 0), 0));
    const spans = text.slice(-LONGEST_TEXT).map((each) => each && make("span", { class: heat(each[1][2]), title: describe(each[1]) }, tokenText(each[0])));
    const block = cells(this.run, step).slice(step.kind === "verify" ? 1 : 0).flat();
    this.text.replaceChildren(text.length > LONGEST_TEXT ? "… " : "", ...spans.filter(Boolean), make("span", { class: "active" }, ...block));
    this.text.scrollTop = this.text.scrollHeight;
  }
}

const choiceLine = ([, mode, isProbe, why]) => make("p", { class: "choice" }, "auto ", isProbe ? "tries " : "goes on with ", make("b", {}, mode), `: ${why}`);

// One bar a block: how many forwards it took; a click goes there.
function overview(stage, groups) {
  const most = Math.max(...groups.map((group) => group.end - group.begin));
  return make("div", { class: "overview", role: "img", "aria-label": "forwards of each block" }, ...groups.map((group) => {
    const bar = make("span", { title: `${groupTitle(stage.run, group, stage.base)}`, on: { click: () => stage.go(group.begin) } });
    bar.style.height = `${Math.round(100 * (group.end - group.begin) / most)}%`;
    return bar;
  }));
}

function blockList(run, groups, stage) {
  return groups.map((group, number) => {
    const block = make("details", { class: "block" }, make("summary", {}, groupTitle(run, group, stage.base)));
    block.fill = () => {
      if (block.children.length > 1) return;
      block.append(...stage.why(group), grid(run, group, { choose: (...to) => { stage.go(...to); stage.element.scrollIntoView({ block: "nearest" }); } }));
    };
    block.addEventListener("toggle", block.fill);
    if (groups.length <= 3 || number === 0) { block.open = true; block.fill(); }
    return block;
  });
}

function legend() {
  const names = HEAT.map(([bound, name]) => make("bdi", { class: `cell picked ${name}` }, bound ? `from ${percent(bound).replace(".00", "").replace(".0", "")}` : "below"));
  return make("p", { class: "legend" }, "Confidence: ", ...names, make("bdi", { class: "cell mask" }, MASK), " not fixed yet ", make("bdi", { class: "cell kept" }, "word"), " fixed before ", make("bdi", { class: "cell rejected" }, "word"), " rejected draft ", make("bdi", { class: "cell picked good boundary" }, "word"), " boundary token");
}

function show(run, number) {
  const section = make("section", { class: "run" }, ...head(run, number));
  if (run.steps.length === 0) {
    section.append(make("p", {}, "The run ended before a forward picked a token."));
    return section;
  }
  const base = Math.min(...run.steps.map((step) => step.start));
  const groups = groupsOf(run), stage = new Stage(run, groups, base);
  const blocks = blockList(run, groups, stage), bars = overview(stage, groups);
  stage.onMove = (now) => [...bars.children].forEach((bar, index) => bar.classList.toggle("current", index === now));
  const all = (open) => blocks.forEach((block) => { block.open = open; block.fill(); });
  const button = (label, open) => make("button", { type: "button", on: { click: () => all(open) } }, label);
  section.append(stage.element, bars, make("h3", { class: "blocks" }, "Block by block ", button("open all", true), button("close all", false)), ...blocks);
  addEventListener("beforeprint", () => all(true));
  stage.go(0);
  return section;
}

document.querySelector("main").append(
  make("h1", {}, "clover-local report"), legend(),
  make("p", { class: "hint" }, "Arrow keys step through the forwards (left, right) and their rows (up, down), page up and down through the blocks; a click on a cell says why it was taken."),
  ...DATA.runs.map(show));
document.querySelector(".stage")?.focus({ preventScroll: true });
