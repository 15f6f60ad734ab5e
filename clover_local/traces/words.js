// The page of a trace: what its data say in words. Texts reach the document as text nodes only.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const MASK = "░";
const HEAT = [
  [0.99, "sure"],
  [0.95, "good"],
  [0.8, "fair"],
  [0, "weak"],
];
// Other reasons are names of samplers, whose rule they say.
const REASONS = {
  above_threshold: "above the threshold",
  most_confident: "the most confident row, as no row was sure",
  next_token: "the next token, one a forward",
  draft: "a draft, to be verified",
  accepted: "a draft that the verify accepted",
  boundary: "the verify's own token behind the accepted drafts",
  min_per_pass: "to reach the least rows a pass",
  finish_gap: "with all rows left, as their likeliest tokens lead far",
  other_token: "another of its likely tokens, as the likeliest would repeat what stands there",
};

// A child may be a list of nodes and texts: a spread fails where there are very many.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, f] of Object.entries(value)) element.addEventListener(event, f);
    } else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null) element.append(child);
  }
  return element;
}

const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const sum = (list) => list.reduce((total, each) => total + each, 0);
const least = (list) => list.reduce((found, each) => Math.min(found, each), Infinity);
const most = (list) => list.reduce((found, each) => Math.max(found, each), -Infinity);
const between = (value, low, high) => Math.min(Math.max(value, low), high);
const heat = (confidence) => HEAT.find(([bound]) => confidence >= bound)?.[1] ?? "weak";
const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 2 : 1)} %`;
const milliseconds = (steps) => `${sum(steps.map((step) => step.ms)).toFixed(0)} ms`;
const tokenText = (token) => DATA.tokens[token] ?? "";

// White space alone would be invisible.
function shown(token) {
  const text = tokenText(token).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return /^ *$/.test(text) ? "␣".repeat(Math.max(text.length, 1)) : text;
}

function describe([row, token, confidence, reason, top]) {
  const others = top.map(([other, share]) => `${percent(share)}  ${shown(other)}`);
  const why = REASONS[reason] ?? `rule ${reason}`;
  return [`row ${row}: ${shown(token)}, ${percent(confidence)}`, why, ...others].join("\n");
}

function groupTitle(run, group, base) {
  const steps = run.steps.slice(group.begin, group.end);
  const first = steps[0];
  const at = `from token ${first.start - base}`;
  if (group.key === "ar" && first.mode !== "ar")
    return `${first.mode} · the first token, from the forward before`;
  if (group.key === "ar") return `ar · ${plural(steps.length, "token")}, one a forward · ${at}`;
  const ms = milliseconds(steps);
  const verify = steps.find((step) => step.kind === "verify");
  if (verify) {
    const drafts = plural(verify.before.length - 1, "draft");
    const kept = `${verify.accepted} of ${drafts} accepted, and one token more`;
    return `draft · round ${first.block} · ${kept} · ${at} · ${ms}`;
  }
  const rows = plural(sum(steps.map((step) => step.picked.length)), "row");
  const passes = plural(steps.length, "pass", "passes");
  return `${first.mode} · block ${first.block} · ${rows} in ${passes} · ${at} · ${ms}`;
}

const stepName = (step) => (step.kind === "verify" ? "verify" : `pass ${step.number + 1}`);

function stepNote(step) {
  const fewest = least(step.coreset);
  const largest = most(step.coreset);
  const sizes = fewest === largest ? largest : `${fewest} to ${largest}`;
  const experts = step.coreset.length ? `${sizes} experts a layer` : null;
  const notes = [`${step.ms.toFixed(1)} ms`, `+${step.picked.length}`, experts, ...step.controls];
  return notes.filter(Boolean).join(" · ");
}

// Where a forward stands: its token in ar, else its block or round, and its pass.
function placeOf(step, group, base) {
  if (group.key === "ar") return `token ${step.start - base}`;
  return `${step.mode === "draft" ? "round" : "block"} ${step.block}, ${stepName(step)}`;
}
