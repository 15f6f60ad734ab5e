"""`plan`: tables, JSON, refusals, and what it assumes where nothing is said."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.memory import machine
from clover_local.memory.machine import Card
from clover_local.memory.sizes import GIB, MIB

Run = Callable[..., Any]

KEYS = {
    "fits",
    "context",
    "parts",
    "device_bytes",
    "host_bytes",
    "pinned_bytes",
    "resident_share",
    "slots_per_layer",
    "predicted",
    "advice",
}
MODES = ("draft", "denoise")
TARGET = ("--gpu", "16GB", "--ram", "32GB", "--link", "52GB/s", "--bandwidth", "896GB/s")


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has is not what these tests are about."""
    monkeypatch.setattr(machine, "find_card", lambda: None)


@pytest.fixture
def real_folder(golden_folder: Path, tmp_path: Path) -> Path:
    """A folder with the config of Clover-35B-A3B and nothing else."""
    values = json.loads((golden_folder / "config.json").read_text(encoding="utf-8"))
    del values["layer_types"]
    values |= {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mask_token_id": 248077,
    }
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def planned(run: Run, *arguments: object, code: int = 0) -> dict[str, Any]:
    outcome = run("plan", *map(str, arguments), "--json")
    assert outcome.code == code, outcome.err
    values: dict[str, Any] = json.loads(outcome.out)
    return values


@pytest.mark.parametrize(("context", "percent"), [(8192, 78), (32768, 75)])
def test_the_real_config_gives_the_residency_of_the_specification(
    run: Run, real_folder: Path, context: int, percent: float
) -> None:
    cap = ("--gpu-memory", "15360MiB", "--ram", "32GB")
    values = planned(run, real_folder, *cap, "--context", context)
    assert 100 * values["resident_share"] == pytest.approx(percent, abs=1)
    assert values["device_bytes"] <= 15360 * MIB
    assert values["formats"] == "experts INT4 g128, trunk INT8 g64, head INT8 g64, balanced"


@pytest.mark.parametrize("card", [6, 8, 10, 12, 16, 24, 32])
def test_the_readmes_table_of_cards_is_what_it_prints(
    run: Run, real_folder: Path, card: int
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {card} GB \(.*\|$", text, re.MULTILINE)
    _, rates, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    bandwidth, link = (f"{rate.strip()}GB/s" for rate in rates.split("/"))
    machine = ("--gpu", f"{card}GB", "--ram", "32GB", "--bandwidth", bandwidth, "--link", link)
    at_8k, at_32k = (
        planned(run, real_folder, *machine, "--context", context) for context in (8192, 32768)
    )
    assert cells[:2] == [f"{100 * each['resident_share']:.0f} %" for each in (at_8k, at_32k)]
    assert cells[2:4] == [
        f"{max(at_8k['slots_per_layer'])}",
        f"{at_8k['pinned_bytes'] / 1e9:.1f} GB",
    ]
    speed, ms = at_8k["predicted"]["tokens_per_second"], at_8k["predicted"]["ms_per_preview"]
    assert float(cells[7]) == pytest.approx(ms, abs=0.05)
    kinds = [[speed["ar"]], *([speed[mode][text] for text in ("prose", "code")] for mode in MODES)]
    for cell, values in zip((cells[5], cells[6], cells[8]), kinds, strict=True):
        shown = [int(number) for number in cell.split("-")]
        assert shown == pytest.approx(values, abs=0.5)


def test_a_16_gb_card_is_planned_to_15360_mib(run: Run, real_folder: Path) -> None:
    values = planned(run, real_folder, *TARGET)
    assert values["machine"]["device_bytes"] == 15360 * MIB
    assert values["machine"]["host_bytes"] == 30 * GIB
    assert values["machine"]["assumed"] == []
    assert values["context"] == 32768


def test_json_has_the_promised_keys(run: Run, golden_folder: Path) -> None:
    values = planned(run, golden_folder, *TARGET)
    assert values.keys() >= KEYS
    assert {"ms_per_preview", "ms_per_ar_token", "ms_per_draft_round"} <= values["predicted"].keys()
    assert all(part.keys() >= {"name", "where", "bytes"} for part in values["parts"])
    assert {part["where"] for part in values["parts"]} == {"device", "host"}
    assert [row["context"] for row in values["contexts"]] == [2**n for n in range(12, 18)]
    assert values["slots_per_layer"] == [8] * 4


def test_a_model_of_few_positions_has_the_contexts_that_it_can(run: Run) -> None:
    values = planned(run, "demo", *TARGET)
    assert values["context"] == 4096
    assert [row["context"] for row in values["contexts"]] == [4096]
    assert values["formats"] == "experts BF16, trunk BF16, head BF16"


@pytest.mark.parametrize(
    "shown",
    [
        "keys and values           device        671 MB",
        "recurrent and conv state  device        132 MB",
        "embedding                 host, pinned  1.02 GB",
        "one expert          1.62 MB",
        "slots a layer       189 to 190 of 256",
        "never fewer than  70: what a pass over 32 rows typically uses",
        "predicted, not measured",
        "131072",
        "code 2.6 a pass, 10 a draft round",
    ],
)
def test_the_tables_say(run: Run, real_folder: Path, shown: str) -> None:
    outcome = run("plan", str(real_folder), *TARGET)
    assert (outcome.code, outcome.err) == (0, "")
    assert shown in outcome.out


def test_a_context_that_does_not_fit_is_a_row_of_the_table(run: Run, real_folder: Path) -> None:
    card = ("--gpu", "6GB", *TARGET[2:])
    assert "131072   does not fit" in run("plan", str(real_folder), *card).out
    last = planned(run, real_folder, *card)["contexts"][-1]
    assert (last["fits"], last["predicted"]) == (False, None)


def test_what_was_not_said_is_assumed_aloud(run: Run, real_folder: Path) -> None:
    outcome = run("plan", str(real_folder))
    assert outcome.code == 0
    assert "no NVIDIA card was found here: planned for one of 16 GB" in outcome.err
    assert "32 GB of host memory" in outcome.err
    assert "896 GB/s" in outcome.err
    assert run("plan", str(real_folder), "--quiet").err == ""


def test_a_slow_link_is_shown_as_it_is(run: Run, real_folder: Path) -> None:
    outcome = run("plan", str(real_folder), "--gpu", "16GB", "--link", "1MB/s")
    assert "1 MB/s over the link" in outcome.err
    assert ["link", "1", "MB/s"] in [line.split() for line in outcome.out.splitlines()]


@pytest.mark.parametrize(("context", "advised"), [("1", False), ("32768", True)])
def test_a_smaller_context_is_advised_only_where_there_is_one(
    run: Run, real_folder: Path, context: str, advised: bool
) -> None:
    outcome = run("plan", str(real_folder), "--gpu", "6GB", "--ram", "32GB", "--context", context)
    assert "a larger card helps" in outcome.err
    assert ("smaller --context" in outcome.err) == advised


def test_the_card_of_this_machine_is_planned_for(
    run: Run, real_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card("A Card", 24 * GIB, 22 * GIB, bandwidth=1e12, link=25e9)
    monkeypatch.setattr(machine, "find_card", lambda: card)
    monkeypatch.setattr(machine, "free_memory", lambda: 20 * GIB)
    found = planned(run, real_folder)["machine"]
    assert found == {
        "name": "A Card",
        "device_bytes": card.cap,
        "host_bytes": 20 * GIB,
        "bandwidth": 1e12,
        "link": 25e9,
        "assumed": [],
    }
    limited = planned(run, real_folder, "--gpu-memory", "8GiB", "--link", "10GB/s")["machine"]
    assert (limited["device_bytes"], limited["link"]) == (8 * GIB, 10e9)


def test_more_memory_than_the_card_has_is_refused(run: Run, real_folder: Path) -> None:
    outcome = run("plan", str(real_folder), "--gpu", "8GB", "--gpu-memory", "9GiB")
    assert outcome.code == 1
    assert outcome.err == (
        "error: --gpu-memory 9GiB is more than the card's 8192MiB: pass at most that\n"
    )


def test_what_does_not_fit_is_one_sentence_with_the_knobs(run: Run, real_folder: Path) -> None:
    outcome = run("plan", str(real_folder), "--gpu", "4GB", *TARGET[2:])
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: the model does not fit into 4.03 GB on the device with a")
    assert "pass --context 16384 or give it at least 3929MiB on the device" in outcome.err


def test_json_of_what_does_not_fit_says_so_too(run: Run, real_folder: Path) -> None:
    values = planned(run, real_folder, "--gpu", "2GB", *TARGET[2:], code=1)
    assert not values["fits"]
    assert values["predicted"] is None
    assert values["slots_per_layer"] == []
    assert values["advice"]


def test_too_little_host_memory_names_what_is_needed(run: Run, real_folder: Path) -> None:
    outcome = run("plan", str(real_folder), "--gpu", "16GB", "--ram", "2GB")
    assert outcome.code == 1
    assert "0 B of host memory" in outcome.err
    assert "(--ram)" in outcome.err


def test_a_profile_that_fits_is_proposed_where_the_source_does_not(
    run: Run, real_folder: Path
) -> None:
    small = ("--profile", "bf16", "--gpu", "6GB", *TARGET[2:])
    outcome = run("plan", str(real_folder), *small)
    assert outcome.code == 1
    assert "quantize it with --profile balanced" in outcome.err
    large = ("--profile", "bf16", *TARGET)
    assert any("quantize it" in line for line in planned(run, real_folder, *large)["advice"])


def test_profiles_differ_in_what_they_keep_on_the_card(run: Run, real_folder: Path) -> None:
    shares = {
        profile: planned(run, real_folder, "--profile", profile, *TARGET)
        for profile in ("balanced", "quality", "bf16")
    }
    assert "down INT8 g32 at most" in shares["quality"]["formats"]
    resident = [values["resident_share"] for values in shares.values()]
    assert resident == sorted(resident, reverse=True)


def test_a_quantized_checkpoint_is_planned_as_it_is(run: Run, quantized_folder: Path) -> None:
    values = planned(run, quantized_folder, *TARGET)
    assert values["formats"] == "experts INT4 g32, trunk INT8 g32, head INT8 g32"
    slots = next(part for part in values["parts"] if part["name"] == "expert slots")
    assert slots["bytes"] == 32 * 3840
    outcome = run("plan", str(quantized_folder), "--profile", "balanced")
    assert outcome.code == 1
    assert "is quantized: leave it out" in outcome.err


def test_a_summary_without_its_weights_is_enough(run: Run, quantized_copy: Path) -> None:
    before = planned(run, quantized_copy, *TARGET)
    for path in quantized_copy.glob("*.safetensors"):
        path.unlink()
    assert planned(run, quantized_copy, *TARGET) == before


def test_headers_serve_where_there_is_no_summary(run: Run, quantized_copy: Path) -> None:
    before = planned(run, quantized_copy, *TARGET)
    (quantized_copy / "clover-summary.json").unlink()
    assert planned(run, quantized_copy, *TARGET) == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gpu", "16"), "--gpu '16' is no size"),
        (("--gpu-memory", "much"), "--gpu-memory 'much' is no size"),
        (("--ram", "-1GB"), "--ram '-1GB' is no size"),
        (("--link", "52"), "--link '52' is no rate"),
        (("--bandwidth", "0GB/s"), "of 0 move nothing"),
        (("--pin-limit", "x"), "--pin-limit 'x' is no size"),
        (("--context", "131073"), "exceeds the model's 131072: pass at most that"),
        (("--profile", "resident"), "--profile resident is unknown: use balanced, quality or bf16"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_flag_that_cannot_be_is_one_line(
    run: Run, real_folder: Path, arguments: tuple[str, str], complaint: str
) -> None:
    outcome = run("plan", str(real_folder), *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert complaint in outcome.err


@pytest.mark.parametrize("amount", ["0GB", "1KiB", "999999999TB"])
def test_absurd_amounts_are_a_plan_or_a_refusal(run: Run, real_folder: Path, amount: str) -> None:
    outcome = run("plan", str(real_folder), "--gpu", amount, "--ram", amount)
    assert outcome.code in (0, 1)
    assert "CLOVER_DEBUG" not in outcome.err


def test_experts_that_cannot_be_quantized_say_so(run: Run, real_folder: Path) -> None:
    path = real_folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"moe_intermediate_size": 500}
    path.write_text(json.dumps(values), encoding="utf-8")
    outcome = run("plan", str(real_folder))
    assert outcome.code == 1
    assert "cannot be quantized" in outcome.err or "--group-size" in outcome.err
    assert run("plan", str(real_folder), "--profile", "bf16").code == 0


@pytest.mark.parametrize("arguments", [("--help",), ("{model}",), ("{model}", "--json")])
def test_torch_is_not_imported(arguments: tuple[str, ...], real_folder: Path) -> None:
    argv = [argument.format(model=real_folder) for argument in arguments]
    code = (
        "import sys; from clover_local.cli.app import main\n"
        f"sys.argv = ['clover-local', 'plan', *{argv!r}]\n"
        "code = main()\n"
        "loaded = {'torch', 'rich', 'numpy', 'tokenizers'} & sys.modules.keys()\n"
        "sys.exit(f'imported {loaded}' if loaded else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
