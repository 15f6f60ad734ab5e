"""Where a model goes: what is refused, what is planned, and what it really takes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from clover_local import session
from clover_local.config import ModelConfig
from clover_local.counted import counted_bytes, gap, gap_line
from clover_local.decoding.settings import resolve
from clover_local.errors import SettingsError
from clover_local.memory.machine import Card
from clover_local.placement import PLANNED_CONTEXT, MemoryOptions, Placement, place
from clover_local.session import OpenModel, Session, load, open_model

MIB = 1 << 20
SaveShards = Callable[[Path, Sequence[Mapping[str, Tensor]]], None]


@pytest.fixture(scope="module")
def opened(golden_folder: Path) -> OpenModel:
    return open_model(str(golden_folder))


def placed(
    opened: OpenModel,
    options: MemoryOptions | None = None,
    *,
    device: str = "cpu",
    context: int | None = 600,
    find_card: Callable[[], Card | None] = lambda: None,
    pick_rows: int = 0,
) -> Placement:
    return place(
        opened.checkpoint,
        opened.config,
        device=device,
        dtype="float32",
        context=context,
        options=options or MemoryOptions(),
        find_card=find_card,
        pick_rows=pick_rows,
    )


def loaded(opened: OpenModel, memory: MemoryOptions) -> Session:
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 40}).settings
    return load(opened, settings, device="cpu", context=600, memory=memory)


def test_a_cpu_without_limits_has_no_plan_and_all_of_the_context(opened: OpenModel) -> None:
    found = placed(opened, context=None)
    assert found.plan is None
    assert not found.offloads
    assert found.line is None
    assert found.context == opened.config.max_position_embeddings


def test_a_card_is_planned_with_what_it_has_free(opened: OpenModel) -> None:
    card = Card("a card", total=8000 * MIB, free=8000 * MIB)
    found = placed(opened, device="cuda", context=None, find_card=lambda: card)
    assert found.plan is not None
    assert found.plan.budget.device == card.cap
    assert found.plan.budget.embedding_on_host
    assert found.context == PLANNED_CONTEXT
    assert not found.offloads


@pytest.mark.parametrize(
    ("given", "keeps"),
    [
        ({}, False),
        ({"sampler": "factor"}, False),
        ({"sampler": "klass"}, True),
        ({"sampler": "credit", "mode": "auto"}, True),
        ({"dry_multiplier": 1.0}, True),
        ({"sampler": "klass", "mode": "ar"}, False),
    ],
    ids=str,
)
def test_a_rule_that_remembers_passes_has_its_memory_in_the_plan(
    given: dict[str, Any], keeps: bool, opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(session, "place", lambda *arguments, **options: asked.update(options))
    settings = resolve(opened.config, opened.generation, given).settings
    session.plan_memory(opened, device="cpu", settings=settings)
    assert asked["pick_rows"] == (opened.config.block_size if keeps else 0)
    card = Card("a card", total=8000 * MIB, free=8000 * MIB)
    plans = [
        placed(opened, device="cuda", find_card=lambda: card, pick_rows=rows).plan
        for rows in (0, 32 * 400)
    ]
    without, with_rows = (plan.device_parts["workspace"] for plan in plans if plan is not None)
    assert with_rows == 9 * 32 * 400 * opened.config.vocab_size * 4 > without
    assert placed(opened, pick_rows=32 * 400) == placed(opened)


@pytest.mark.parametrize("slots", [4, 5, 17, 31])
def test_as_many_experts_are_there_as_was_asked_for(opened: OpenModel, slots: int) -> None:
    found = placed(opened, MemoryOptions(expert_slots=slots))
    assert found.offloads
    assert found.plan is not None
    assert found.plan.slots == slots
    assert f"experts: {slots} of 32 fit on the device" in str(found.line)
    session = loaded(opened, MemoryOptions(expert_slots=slots))
    stats = session.model.experts.stats()
    assert stats is not None
    assert stats.slots == slots


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (MemoryOptions(expert_slots=3), r"--expert-slots 3.*4 \(one a layer\) to 32 \(all\)"),
        (MemoryOptions(expert_slots=33), r"--expert-slots 33.*32 \(all\)"),
        (MemoryOptions(policy="mru"), r"--policy mru is unknown: use one of lfru"),
        (MemoryOptions(policy="static"), r"pass --expert-profile FILE"),
        (MemoryOptions(device_bytes=MIB), r"does not fit into 1\.05 MB.*--gpu-memory"),
        (
            MemoryOptions(device_bytes=4 * MIB, expert_slots=31),
            r"31 expert slots do not fit.*fewer --expert-slots",
        ),
    ],
    ids=["too-few", "too-many", "policy", "static", "too-small", "slots-too-large"],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    opened: OpenModel, options: MemoryOptions, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        placed(opened, options)


def test_flags_without_effect_are_named(opened: OpenModel) -> None:
    useless = MemoryOptions(pin_limit=MIB, policy="lru", profile=Path("x"))
    assert [name for name, _ in placed(opened, useless).without_effect()] == [
        "pin_limit",
        "policy",
        "expert_profile",
    ]
    useful = MemoryOptions(pin_limit=MIB, policy="lru", expert_slots=9)
    assert [name for name, _ in placed(opened, useful).without_effect()] == ["pin_limit"]


FOLDERS = ("golden", "quantized", "demo")
LIMITS = {
    "slots-4": MemoryOptions(expert_slots=4),
    "slots-19": MemoryOptions(expert_slots=19),
    "6-MB": MemoryOptions(device_bytes=6_000_000),
    "all": MemoryOptions(device_bytes=1 << 30),
}
# Where every expert of the quantized one is resident on a CPU, nothing is a record, whose parts
# start at multiples of 256 bytes: for this small model that is 11 %, for the real one nothing.
PLANNED = [
    (folder, name)
    for folder in FOLDERS
    for name in LIMITS
    if folder != "quantized" or name.startswith("slots")
]


@pytest.mark.parametrize(("folder", "limit"), PLANNED)
def test_tensors_take_what_was_planned(
    folder: str,
    limit: str,
    golden_folder: Path,
    quantized_folder: Path,
) -> None:
    names = {"golden": str(golden_folder), "quantized": str(quantized_folder), "demo": "demo"}
    opened = open_model(names[folder])
    memory = LIMITS[limit]
    if folder == "demo":  # which is larger
        memory = MemoryOptions(
            device_bytes=memory.device_bytes and 4 * memory.device_bytes,
            expert_slots=memory.expert_slots and 4 * memory.expert_slots,
        )
    session = loaded(opened, memory)
    plan = session.placement.plan
    assert plan is not None
    counted = counted_bytes(session.model, session.generator.state)
    assert abs(gap(plan, counted)) < 0.01, (plan.device_parts, counted)
    assert session.memory_gap() is None


def test_a_gap_is_said(opened: OpenModel) -> None:
    session = loaded(opened, MemoryOptions(expert_slots=9))
    plan = session.placement.plan
    assert plan is not None
    counted = counted_bytes(session.model, session.generator.state)
    counted["trunk"] *= 2
    assert "against the plan" in str(gap_line(plan, counted))


def test_tied_embeddings_count_once(
    golden_config: ModelConfig, model_folder: Path, save_shards: SaveShards
) -> None:
    config = model_folder / "config.json"
    text = config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    config.write_text(text)
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_shards(model_folder, [tensors])
    session = loaded(open_model(str(model_folder)), MemoryOptions(expert_slots=9))
    counted = counted_bytes(session.model, session.generator.state)
    assert counted["embedding"] == 0
    assert counted["head"] == golden_config.vocab_size * golden_config.hidden_size * 4
    assert session.memory_gap() is None
