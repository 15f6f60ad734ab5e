// The part of the page in which a person steps through the forwards of a run.

const LONGEST_TEXT = 800; // tokens of the text so far that the stage shows
const PLAYING = 350; // milliseconds that a forward stays

// The panel of one picked row: why it left the mask, and what else was likely.
function panel(picked) {
  if (!picked) return [make("p", {}, "This forward fixed no row.")];
  const [row, token, confidence, reason, top] = picked;
  const why = REASONS[reason] ?? `by the rule ${reason}`;
  const others = top.map(([other, share]) => {
    const bar = make("i", {});
    bar.style.width = percent(Math.min(share, 1)).replace(" ", "");
    return make(
      "li",
      { class: other === token ? "taken" : "" },
      make("bdi", {}, shown(other)),
      make("span", { class: "bar" }, bar),
      make("span", {}, percent(share)),
    );
  });
  const own = make("bdi", { class: `cell picked ${heat(confidence)}` }, shown(token));
  return [
    make("p", {}, `Row ${row}: `, own, ` ${percent(confidence)}, ${why}.`),
    make("ol", { class: "top" }, others),
  ];
}

function choiceLine([, mode, isProbe, why]) {
  const verb = isProbe ? "tries " : "goes on with ";
  return make("p", { class: "choice" }, "auto ", verb, make("b", {}, mode), `: ${why}`);
}

class Stage {
  constructor(run, groups, base) {
    Object.assign(this, { run, groups, base, index: 0, row: null, timer: null });
    this.slider = make("input", {
      type: "range",
      min: 0,
      max: run.steps.length - 1,
      value: 0,
      "aria-label": "forward",
      on: { input: () => this.handle(() => this.go(Number(this.slider.value))) },
    });
    this.play = make(
      "button",
      {
        type: "button",
        class: "play",
        "aria-label": "play",
        title: "play (space)",
        on: { click: () => this.toggle() },
      },
      "▶",
    );
    this.where = make("output", { "aria-live": "polite" });
    this.text = make("div", { class: "text", tabindex: "0", "aria-label": "the text so far" });
    this.grid = make("div", { class: "now" });
    this.panel = make("aside", { "aria-live": "polite" });
    const attributes = {
      class: "stage",
      tabindex: "0",
      "aria-label": "step through the forwards",
      on: { keydown: (event) => this.key(event) },
    };
    const parts = [this.controls(), this.text, this.grid, this.panel];
    this.element = make("section", attributes, parts);
  }

  controls() {
    const button = (label, name, by) => {
      const on = { click: () => this.handle(by) };
      return make("button", { type: "button", "aria-label": name, title: name, on }, label);
    };
    return make(
      "div",
      { class: "controls" },
      button("«", "block before (page up)", () => this.block(-1)),
      button("‹", "forward before (left)", () => this.go(this.index - 1)),
      this.play,
      button("›", "next forward (right)", () => this.go(this.index + 1)),
      button("»", "next block (page down)", () => this.block(1)),
      this.slider,
      this.where,
    );
  }

  // What a person does ends the playing.
  handle(move) {
    this.stop();
    move();
  }

  key(event) {
    const moves = {
      ArrowLeft: () => this.go(this.index - 1),
      ArrowRight: () => this.go(this.index + 1),
      ArrowUp: () => this.pick(-1),
      ArrowDown: () => this.pick(1),
      PageUp: () => this.block(-1),
      PageDown: () => this.block(1),
      Home: () => this.go(0),
      End: () => this.go(Infinity),
    };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === " ") {
      if (event.target.tagName === "BUTTON") return; // its own click comes
      event.preventDefault();
      this.toggle();
    } else if (moves[event.key]) {
      event.preventDefault();
      this.handle(moves[event.key]);
    }
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.index === this.run.steps.length - 1) this.go(0);
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "pause");
    this.timer = setInterval(() => {
      if (this.index < this.run.steps.length - 1) this.go(this.index + 1);
      else this.stop();
    }, PLAYING);
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
    const number = between(back ? here : here + by, 0, this.groups.length - 1);
    this.go(this.groups[number].begin);
  }

  pick(by) {
    const rows = this.run.steps[this.index].picked.map((each) => each[0]);
    this.go(this.index, rows[between(rows.indexOf(this.row) + by, 0, rows.length - 1)]);
  }

  // Shows a forward, and of its rows the one asked for, else the least sure.
  go(index, row = NaN) {
    this.index = between(index, 0, this.run.steps.length - 1);
    const step = this.run.steps[this.index];
    const unsure = (found, each) => (found && found[2] <= each[2] ? found : each);
    const picked = step.picked.find((each) => each[0] === row) ?? step.picked.reduce(unsure, null);
    this.row = picked?.[0] ?? null;
    this.slider.value = this.index;
    const number = this.groups.findIndex((group) => this.index < group.end);
    const group = this.groups[number];
    const count = `${this.index + 1} of ${this.run.steps.length}`;
    this.where.textContent = `${count} · ${step.mode} · ${placeOf(step, group, this.base)}`;
    this.showText(step);
    const choose = (...to) => this.go(...to);
    const until = this.index + 1;
    const passes = grid(this.run, group, { current: this.index, until, choose });
    this.grid.replaceChildren(...this.why(group), passes);
    this.grid.querySelector(`.current [data-row="${this.row}"]`)?.classList.add("chosen");
    this.panel.replaceChildren(...panel(picked));
    this.onMove?.(number);
  }

  why(group) {
    return this.run.choices.filter(([before]) => before === group.begin).map(choiceLine);
  }

  showText(step) {
    const pending = step.kind === "verify" ? 1 : 0; // the token before the drafts is text
    const length = Math.max(step.start - this.base + pending, 0);
    const text = textBefore(this.run, this.index, this.base).slice(0, length);
    const known = text.slice(-LONGEST_TEXT).filter(Boolean); // a torn trace leaves holes
    const spans = known.map(([token, picked]) => {
      const attributes = { class: heat(picked[2]), title: describe(picked) };
      return make("span", attributes, tokenText(token));
    });
    const block = cells(this.run, step).slice(pending).flat();
    const before = text.length > LONGEST_TEXT ? "… " : "";
    this.text.replaceChildren(before, ...spans, make("span", { class: "active" }, block));
    this.text.scrollTop = this.text.scrollHeight;
  }
}
