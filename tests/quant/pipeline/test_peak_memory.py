"""`--memory` holds: the peak of a whole run that the system reports, with a model in waves."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.quant.memory import plan_waves
from clover_local.quant.profiles import Choices, resolve

SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_experts": 24,
    "moe_intermediate_size": 256,
    "layer_types": ["linear_attention", "full_attention"],
}
LIMIT = 800 << 20
PROGRAM = """
import sys
from clover_local.cli.app import main
code = main()
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def large_model(
    model_folder: Path,
    golden_config: ModelConfig,
    random_parameters: Callable[[ModelConfig], dict[str, Tensor]],
) -> tuple[Path, ModelConfig]:
    """A model whose Hessians of one layer are larger than all else."""
    sizes = {**SIZES, "layer_types": tuple(SIZES["layer_types"])}  # type: ignore[arg-type]
    config = replace(golden_config, **sizes)  # type: ignore[arg-type]
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SIZES), encoding="utf-8")
    tensors = {
        name if name == "lm_head.weight" else f"model.{name}": tensor.bfloat16()
        for name, tensor in random_parameters(config).items()
    }
    save_file(tensors, model_folder / "model.safetensors")
    return model_folder, config


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_stays_under_the_limit(
    large_model: tuple[Path, ModelConfig], tmp_path: Path, text_file: Path
) -> None:
    folder, config = large_model
    recipe, _ = resolve(Choices(evaluation_tokens=0), config, device="cpu")
    plan = plan_waves(config, recipe, limit=LIMIT, rows=600)
    assert plan.waves > 1
    assert plan_waves(config, recipe, limit=1 << 40, rows=600).peak > LIMIT
    run = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM, "quantize", str(folder), str(tmp_path / "result")),
            *("--memory", f"{LIMIT >> 20}MiB", "--calibration", str(text_file), "--device", "cpu"),
            *("--calibration-tokens", "600", "--evaluation-tokens", "0"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    match = re.search(r"VmHWM:\s*(\d+) kB", run.stderr)
    assert match is not None
    assert int(match[1]) * 1024 <= LIMIT
