"""What torch says: its build, pinned memory and the link's measured rate, and the self-tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from clover_local.doctor.finding import Finding

COPY_BYTES = 256 * 2**20
SELF_TEST_SECONDS = 300


def findings() -> Iterator[Finding]:
    """What needs torch, line by line."""
    yield (built := torch_build())
    if built.ok:
        has_card = cuda_works()
        yield has_card
        if has_card.ok:
            yield pinned_memory()
        yield self_test("cpu")
        yield self_test("cuda" if has_card.ok else "interpreter")


def torch_build() -> Finding:
    """PyTorch itself."""
    remedy = "install it anew: pip install --force-reinstall torch"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("PyTorch", False, " ".join(str(error).split()), remedy, required=True)
    cuda = torch.version.cuda
    text = f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "without CUDA")
    return Finding("PyTorch", True, text, remedy, required=True)


def cuda_works() -> Finding:
    """Whether torch can calculate on the card."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return Finding(
            "CUDA",
            False,
            "torch sees no card",
            "everything runs on the CPU; for a card see the lines above"
            if built
            else "everything runs on the CPU; for a card install a torch that is built for CUDA",
        )
    major, minor = torch.cuda.get_device_capability()
    made_for = torch.cuda.get_arch_list()
    return Finding(
        "CUDA",
        any(name.startswith(f"sm_{major}") for name in made_for),
        f"device of capability {major}.{minor}; torch is built for {', '.join(made_for)}",
        "install a torch that is built for this card",
    )


def pinned_memory() -> Finding:
    """Whether host memory can be pinned, and how fast it is copied to the card."""
    import torch

    remedy = "free host memory, or pass a smaller --pin-limit; on WSL2 raise memory in .wslconfig"
    try:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        device.copy_(host)
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch's own, also when memory is out
        return Finding("pinned memory", False, str(error).partition("\n")[0], remedy)
    rate = COPY_BYTES / (time.perf_counter() - began) / 1e9
    return Finding("pinned memory", True, f"copied to the card at {rate:.1f} GB/s", remedy)


def self_test(what: str) -> Finding:
    """Runs kernels against their definition, in a process of its own: a crash ends only that."""
    name = {"cpu": "CPU kernels", "cuda": "GPU kernels"}.get(what, "Triton interpreter")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if what == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    remedy = "pip install --force-reinstall clover-local; CLOVER_KERNELS=reference does without"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "clover_local.doctor.self_test", what],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=SELF_TEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, False, f"the self-test did not end ({error})", remedy, required=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines() or ["no output"]
    if done.returncode != 0:
        text = f"code {done.returncode}: {lines[-1]}"
        return Finding(name, False, text, remedy, required=what != "interpreter")
    answer = json.loads(lines[-1])
    return Finding(name, answer["ok"], answer["text"], answer["remedy"] or remedy)
