// The cells of blocks and forwards, the groups of forwards, and the text that they made.

// A cell of a block: what stands in a row after a forward; `picked` if this forward put it there.
function cell(run, token, picked, extra = "") {
  if (!picked && token === run.mask) return make("bdi", { class: `cell mask ${extra}` }, MASK);
  const kind = picked ? `picked ${heat(picked[2])}` : "kept";
  const title = picked ? describe(picked) : shown(token);
  const row = picked ? picked[0] : null;
  return make("bdi", { class: `cell ${kind} ${extra}`, title, "data-row": row }, shown(token));
}

// The cells of a forward in the order of its rows, a list for each: two where a draft was replaced.
function cells(run, step) {
  const picked = new Map(step.picked.map((each) => [each[0], each]));
  if (step.kind === "verify") return verifyCells(run, step, picked);
  const rows = Math.max(step.before.length, most(step.picked.map(([row]) => row + 1)));
  return Array.from({ length: rows }, (_, row) => {
    const own = picked.get(row);
    return [cell(run, own?.[1] ?? step.before[row], own)];
  });
}

// Row r of a verify judges the draft in row r + 1; the boundary token takes the place of the first
// rejected one.
function verifyCells(run, step, picked) {
  const boundary = picked.get(step.accepted);
  const last = boundary ? cell(run, boundary[1], boundary, "boundary") : null;
  const places = step.before.map((token, row) => {
    const own = judgedCell(run, step, { token, row, picked });
    return row === step.accepted + 1 && last ? [last, own] : [own];
  });
  return last && step.accepted + 1 === step.before.length ? [...places, [last]] : places;
}

function judgedCell(run, step, { token, row, picked }) {
  if (row > 0 && row <= step.accepted) return cell(run, token, picked.get(row - 1), "accepted");
  const own = cell(run, token, null, row === 0 ? "pending" : "rejected");
  const what = row === 0 ? "the token before the drafts" : "a draft that the verify rejected";
  own.title = `${shown(token)}: ${what}`;
  return own;
}

// Forwards that belong together: a block, a round, or a stretch of ar.
function groupsOf(run) {
  const groups = [];
  const chosen = new Set(run.choices.map(([before]) => before));
  run.steps.forEach((step, index) => {
    const isAr = step.mode === "ar" || (step.kind === "pass" && step.before.length === 0);
    const key = isAr ? "ar" : step.block;
    const last = groups.at(-1);
    if (last && last.key === key && last.mode === step.mode && !chosen.has(index)) {
      last.end = index + 1;
    } else {
      groups.push({ key, mode: step.mode, begin: index, end: index + 1 });
    }
  });
  return groups;
}

// The passes and rows of a group; `current` is marked, a click goes to its forward.
function grid(run, group, { current = -1, choose, until = group.end }) {
  const to = { current, choose, until };
  return group.key === "ar" ? flow(run, group, to) : table(run, group, to);
}

function flow(run, group, { current, choose, until }) {
  const tokens = run.steps.slice(group.begin, until).map((step, offset) => {
    const index = group.begin + offset;
    const picked = step.picked[0];
    const element = cell(run, picked[1], picked, index === current ? "current" : "");
    element.addEventListener("click", () => choose(index, 0));
    return element;
  });
  return make("div", { class: "flow" }, tokens);
}

function table(run, group, { current, choose, until }) {
  const rows = run.steps.slice(group.begin, until).map((step, offset) => {
    const index = group.begin + offset;
    // The verify has the token before the drafts there.
    const indent = step.kind === "pass" && step.mode === "draft" ? make("td") : null;
    const row = make(
      "tr",
      { class: `pass ${index === current ? "current" : ""}` },
      make("th", { scope: "row" }, stepName(step), make("small", {}, stepNote(step))),
      indent,
      cells(run, step).map((each) => make("td", {}, each)),
    );
    row.addEventListener("click", (event) => {
      choose(index, Number(event.target.dataset?.row ?? NaN));
    });
    return row;
  });
  const body = make("table", {}, make("tbody", {}, rows));
  return make("div", { class: "scroll", tabindex: "0" }, body);
}

// The answer as the forwards up to `last` left it: [token, picked] by place; drafts are not in it.
function textBefore(run, last, base) {
  const text = [];
  for (const step of run.steps.slice(0, last)) {
    const isVerify = step.kind === "verify";
    if (!isVerify && step.mode === "draft" && step.before.length > 0) continue;
    const at = step.start - base + (isVerify ? 1 : 0);
    text.length = Math.min(text.length, isVerify ? at : at + step.before.length);
    for (const picked of step.picked) text[at + picked[0]] = [picked[1], picked];
  }
  return text;
}
