// The page from top to bottom: what was run, its forwards one by one, all its blocks.

const OPEN_BLOCKS = 3; // at most so many blocks are open from the start

function facts(entries) {
  const pairs = entries.flatMap(([name, value]) => [
    make("dt", {}, name.replaceAll("_", " ")),
    make("dd", {}, make("bdi", {}, value)),
  ]);
  return make("dl", {}, pairs);
}

function folded(title, values) {
  const entries = Object.entries(values);
  if (entries.length === 0) return null;
  return make("details", {}, make("summary", {}, title), facts(entries));
}

function lead(run) {
  const picks = plural(sum(run.steps.map((step) => step.picked.length)), "pick");
  const forwards = plural(run.steps.length, "forward");
  const commits = `${run.commitMs.toFixed(0)} ms to commit them`;
  const ended = run.finish ? `finish reason ${run.finish}` : "cut off before its end";
  return make(
    "p",
    { class: "lead" },
    make("b", {}, run.mode),
    " on ",
    make("b", {}, run.model),
    `: ${forwards} that picked tokens, ${picks}, ${milliseconds(run.steps)}, and ${commits}; `,
    `${ended}.`,
  );
}

function changedSettings(run) {
  if (run.changed.length === 0) return null;
  const label = "settings other than the model's defaults";
  const items = run.changed.map(([name, value, usual]) =>
    make("li", {}, make("b", {}, name), ` ${value} `, make("small", {}, `instead of ${usual}`)),
  );
  return make("ul", { class: "changed", "aria-label": label }, items);
}

function textBox(title, name, text) {
  const box = make("pre", { class: name, tabindex: "0" }, text);
  return make("div", {}, make("h3", {}, title), box);
}

function head(run, number) {
  const several = `Run ${number + 1} of ${DATA.runs.length}`;
  return [
    make("h2", {}, DATA.runs.length > 1 ? several : "How this text was written"),
    lead(run),
    changedSettings(run),
    make(
      "div",
      { class: "texts" },
      textBox("Prompt", "prompt", run.prompt),
      textBox("Answer", "answer", run.answer || "(none recorded)"),
    ),
    folded("Where and with what", run.facts),
    folded("All settings", run.settings),
    folded("Measured", run.stats),
  ];
}

// One bar a block: how many forwards it took; a click goes there.
function overview(stage, groups) {
  const tallest = most(groups.map((group) => group.end - group.begin));
  const bars = groups.map((group) => {
    const title = groupTitle(stage.run, group, stage.base);
    const bar = make("span", { title, on: { click: () => stage.go(group.begin) } });
    bar.style.height = `${Math.round((100 * (group.end - group.begin)) / tallest)}%`;
    return bar;
  });
  const label = "forwards of each block";
  return make("div", { class: "overview", role: "img", "aria-label": label }, bars);
}

// A block is built when it is looked at.
function blockList(run, groups, stage) {
  const choose = (...to) => {
    stage.go(...to);
    stage.element.scrollIntoView({ block: "nearest" });
  };
  return groups.map((group, number) => {
    const summary = make("summary", {}, groupTitle(run, group, stage.base));
    const block = make("details", { class: "block" }, summary);
    block.fill = () => {
      if (block.children.length > 1) return;
      block.append(...stage.why(group), grid(run, group, { choose }));
    };
    block.addEventListener("toggle", block.fill);
    if (groups.length <= OPEN_BLOCKS || number === 0) {
      block.open = true;
      block.fill();
    }
    return block;
  });
}

function legend() {
  const sample = (kind, text) => make("bdi", { class: `cell ${kind}` }, text);
  const bounds = HEAT.map(([bound, name]) => {
    const share = percent(bound).replace(".00", "").replace(".0", "");
    return sample(`picked ${name}`, bound ? `from ${share}` : "below");
  });
  return make(
    "p",
    { class: "legend" },
    "Confidence: ",
    bounds,
    sample("mask", MASK),
    " not fixed yet ",
    sample("kept", "word"),
    " fixed before ",
    sample("rejected", "word"),
    " rejected draft ",
    sample("picked good boundary", "word"),
    " boundary token",
  );
}

function blockButtons(blocks) {
  const all = (open) => {
    for (const block of blocks) {
      block.open = open;
      block.fill();
    }
  };
  addEventListener("beforeprint", () => all(true));
  const button = (label, open) => {
    const on = { click: () => all(open) };
    return make("button", { type: "button", on }, label);
  };
  return [button("open all", true), button("close all", false)];
}

function show(run, number) {
  const section = make("section", { class: "run" }, head(run, number));
  if (run.steps.length === 0) {
    section.append(make("p", {}, "The run ended before a forward picked a token."));
    return section;
  }
  const base = least(run.steps.map((step) => step.start));
  const groups = groupsOf(run);
  const stage = new Stage(run, groups, base);
  const blocks = blockList(run, groups, stage);
  const bars = overview(stage, groups);
  stage.onMove = (now) => {
    [...bars.children].forEach((bar, index) => bar.classList.toggle("current", index === now));
  };
  const title = make("h3", { class: "blocks" }, "Block by block ", blockButtons(blocks));
  section.append(stage.element, bars, title, make("div", {}, blocks));
  stage.go(0);
  return section;
}

const HINT =
  "Arrow keys step through the forwards (left, right) and their rows (up, down), page up and " +
  "down through the blocks; a click on a cell says why it was taken.";

document
  .querySelector("main")
  .append(
    make("h1", {}, "clover-local report"),
    legend(),
    make("p", { class: "hint" }, HINT),
    ...DATA.runs.map(show),
  );
document.querySelector(".stage")?.focus({ preventScroll: true });
