"""The tables of `plan`."""

from collections.abc import Sequence

from clover_local.cli import console
from clover_local.cli.plan_target import Target
from clover_local.memory.parts import Plan
from clover_local.memory.predict import FIRST_MISSES, LATER_MISSES, TEXTS, Prediction, predict
from clover_local.memory.sizes import shown, shown_rate


def show(name: str, made: Plan, others: Sequence[Plan], target: Target, formats: str) -> None:
    console.show_table(f"{name} ({formats}) on {target.name}", _part_rows(made))
    console.show_table("experts", _expert_rows(made))
    console.show_table(
        "predicted, not measured, with the context full", _context_rows(others, target)
    )
    console.show_table("predicted from", _assumption_rows(target))
    for line in target.assumed:
        console.note(f"assumed: {line}")


def _part_rows(made: Plan) -> list[tuple[str, str, str]]:
    rows = [
        (part.name, f"{part.where}{', pinned' if part.pinned else ''}", shown(part.bytes))
        for part in made.parts
    ]
    budget = made.budget
    return [
        *rows,
        ("all on the device", f"of {shown(budget.device)}", shown(made.device_bytes)),
        ("all on the host", f"of {shown(budget.host)}", shown(made.host_bytes)),
        ("pinned", "", shown(made.pinned_bytes)),
    ]


def _expert_rows(made: Plan) -> list[tuple[str, str]]:
    config = made.model.config
    every = config.num_experts * config.num_hidden_layers
    sizes = sorted(set(made.model.slot_bytes))
    return [
        ("one expert", " or ".join(map(shown, sizes))),
        (
            "slots",
            f"{made.slots} of {every} experts, {percent(made.resident_share)} of their bytes",
        ),
        ("slots a layer", f"{_range(made.slots_per_layer)} of {config.num_experts}"),
        ("  for good", _range(made.permanent_per_layer)),
        ("  never fewer than", f"{made.floor}: {_floor_reason(made)}"),
        ("prompt", f"{made.prefill_rows} rows at a time"),
    ]


def _floor_reason(made: Plan) -> str:
    if made.floor == min(made.slots_per_layer):
        return "all it has"
    return f"what a pass over {made.model.config.block_size} rows typically uses"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _assumption_rows(target: Target) -> list[tuple[str, str]]:
    texts = [
        f"{text.name} {text.tokens_per_preview:g} a pass, {text.tokens_per_round:g} a draft round"
        for text in TEXTS
    ]
    return [
        ("device memory", shown_rate(target.rates.device)),
        ("link", shown_rate(target.rates.link)),
        (
            "missing experts",
            f"where r are not resident: {FIRST_MISSES:.2f} r at a block's first pass, a draft and "
            f"an AR token, {LATER_MISSES:.2f} r at later passes; more where slots are too few",
        ),
        ("tokens", "; ".join(texts)),
    ]


def _context_rows(others: Sequence[Plan], target: Target) -> list[tuple[str, ...]]:
    kinds = "-".join(text.name for text in TEXTS)
    head = (
        "context",
        "resident",
        "slots a layer",
        "AR ms",
        "AR tok/s",
        "round ms",
        f"draft tok/s {kinds}",
        "pass ms",
        f"denoise tok/s {kinds}",
    )
    rows: list[tuple[str, ...]] = [head]
    for each in others:
        if each.fits:
            cells = _speed_cells(predict(each, target.rates))
            share, slots = percent(each.resident_share), _range(each.slots_per_layer)
            rows.append((str(each.context), share, slots, *cells))
        else:
            rows.append((str(each.context), "does not fit", *[""] * (len(head) - 2)))
    return rows


def _speed_cells(speed: Prediction) -> tuple[str, ...]:
    draft, denoise = (
        "-".join(f"{rate:.0f}" for rate in rates.values()) for rates in (speed.draft, speed.denoise)
    )
    return (
        f"{speed.ms_per_ar_token:.1f}",
        f"{speed.ar:.0f}",
        f"{speed.ms_per_draft_round:.1f}",
        draft,
        f"{speed.ms_per_preview:.1f}",
        denoise,
    )
