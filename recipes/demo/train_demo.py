"""Trains the bundled demo model from scratch on text that `clover_local.demo.tasks` writes.

    python recipes/demo/train_demo.py --steps 30000 --run runs/demo

Both losses together: next token through the commit path, masked token through the preview path. A
run can be stopped at any moment; the same command goes on from its last checkpoint (every 250
steps), also with another `--steps`, which moves the point where the learning rate begins to fall.
`--export` writes the checkpoint in the release's format. Two single-threaded processes that average
their gradients are 1.4x as fast on two cores as one process of two threads: the tensors are small.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_batches import ExampleSource, Targets
from demo_init import initial_parameters
from demo_network import Batch, DemoNetwork
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from clover_local.config import ModelConfig, read_model_config
from clover_local.demo.tasks.stream import SOURCES

DEMO = Path(__file__).parents[2] / "clover_local" / "demo"
LEARNING_RATE, WARMUP, BETAS, WEIGHT_DECAY, CLIP = 1.5e-3, 200, (0.9, 0.98), 0.01, 1.0
MASKED_WEIGHT, BALANCE_WEIGHT = 3.0, 0.01  # beside the next-token loss
CHECKPOINT_EVERY, LOG_EVERY = 250, 50
ACCURACY_DECAY = 0.98  # of the running accuracy by family, which moves the families' shares


def losses(
    network: DemoNetwork, batch: Batch, targets: Targets
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Next-token, masked-token and balance loss; [B] whether both streams got all tokens right."""
    clean, noisy, balance = network.forward(batch)
    rows = targets.next_weight > 0
    logits = network.logits(clean[rows])
    weight = targets.next_weight[rows]
    loss = F.cross_entropy(logits, targets.next_token[rows], reduction="none")
    next_loss = (loss * weight).sum() / weight[weight == 1].sum()
    masked = targets.masked_weight > 0
    masked_logits = network.logits(noisy[masked])
    masked_weight = targets.masked_weight[masked]
    masked_loss = F.cross_entropy(masked_logits, targets.masked_token[masked], reduction="none")
    masked_loss = (masked_loss * masked_weight).sum() / masked_weight.sum().clamp(min=1)
    wrong = torch.zeros(len(targets.families))
    missed = (logits.argmax(-1) != targets.next_token[rows]) & (weight == 1)
    wrong.index_add_(0, rows.nonzero()[:, 0], missed.float())
    missed = (masked_logits.argmax(-1) != targets.masked_token[masked]) & (masked_weight == 1)
    wrong.index_add_(0, batch.example[masked.nonzero()[:, 0]], missed.float())
    return next_loss, masked_loss, balance, wrong == 0


def learning_rate(step: int, steps: int, *, rate: float = LEARNING_RATE) -> float:
    """Linear warm-up, then a slow and later a fast decay to zero."""
    return rate * min(1.0, (step + 1) / WARMUP) * (1 - (step / steps) ** 2)


def shares(accuracy: dict[str, float]) -> dict[str, float]:
    """Harder families much more often."""
    return {family: 0.1 + (1 - value) ** 2 for family, value in accuracy.items()}


def export(params: dict[str, Tensor], folder: Path) -> None:
    """Writes `model.safetensors` in BF16 under the release's names."""
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in params.items()
    }
    save_file(tensors, folder / "model.safetensors.partial", metadata={"format": "pt"})
    (folder / "model.safetensors.partial").rename(folder / "model.safetensors")


def average_gradients(parameters: list[Tensor], buffer: Tensor) -> None:
    """Replaces every gradient by its mean over the processes; `buffer` has room for all of them."""
    torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=buffer)
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    for parameter, mean in zip(
        parameters, buffer.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = mean.view_as(parameter)


@dataclass
class Progress:
    """Where a run stands; part of its checkpoint."""

    step: int = 0
    rows: int = 0  # of both streams, in this process
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))


class Trainer:
    """One process of a run: parameters, optimizer, and the files of the run."""

    def __init__(
        self, rank: int, config: ModelConfig, run: Path, *, seed: int, weights: Path | None = None
    ) -> None:
        """Goes on from the run's checkpoint, else from `weights` (as exported), else afresh."""
        self.rank = rank
        self.config = config
        self.run = run
        self.progress = Progress()
        if weights is None:
            self.params = initial_parameters(config, seed)
        else:
            exported = load_file(weights / "model.safetensors")
            self.params = {name: value.float() for name, value in exported.items()}
        saved = run / "checkpoint.pt"
        state = torch.load(saved, weights_only=True) if saved.is_file() else None
        if state is not None:
            self.params = state["params"]
            self.progress = Progress(**state["progress"])
            for family in SOURCES:  # a task that is new since
                self.progress.accuracy.setdefault(family, 0.0)
        self.trained = [value.requires_grad_() for value in self.params.values()]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.trained if p.dim() > 1]},
            {"params": [p for p in self.trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=LEARNING_RATE,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.network = DemoNetwork(config, self.params)
        # Another stretch of the stream after a restart: no example twice.
        self.source = ExampleSource(DEMO, 1000 * (seed + self.progress.step) + rank)
        self.gradients = torch.empty(sum(p.numel() for p in self.trained))

    def train(
        self, steps: int, rows: int, *, rate: float = LEARNING_RATE, without: Sequence[str] = ()
    ) -> None:
        """Trains up to `steps` steps of about `rows` rows; logs and saves in process 0."""
        progress = self.progress
        began = time.perf_counter() - progress.seconds
        recent = torch.zeros(3)
        while progress.step < steps:
            chosen = {f: value for f, value in progress.accuracy.items() if f not in without}
            for batch, targets in self.source.batches(shares(chosen), self.config, rows=rows):
                now = learning_rate(progress.step, steps, rate=rate)
                recent += self.step(batch, targets, now)
                progress.seconds = time.perf_counter() - began
                if progress.step % LOG_EVERY == 0:
                    self.log(recent / LOG_EVERY)
                    recent.zero_()
                if progress.step % CHECKPOINT_EVERY == 0 or progress.step == steps:
                    self.save()
                if progress.step == steps:
                    break

    def step(self, batch: Batch, targets: Targets, rate: float) -> Tensor:
        """One optimizer step; returns the losses [3]."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        next_loss, masked_loss, balance, right = losses(self.network, batch, targets)
        (next_loss + MASKED_WEIGHT * masked_loss + BALANCE_WEIGHT * balance).backward()
        average_gradients(self.trained, self.gradients)
        torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress = self.progress
        for family, value in zip(targets.families, right.tolist(), strict=True):
            change = float(value) - progress.accuracy[family]
            progress.accuracy[family] += (1 - ACCURACY_DECAY) * change
        progress.step += 1
        progress.rows += batch.tokens.numel() + batch.noisy.numel()
        return torch.stack([next_loss.detach(), masked_loss.detach(), balance.detach()])

    def log(self, recent: Tensor) -> None:
        """One line of `log.jsonl`."""
        if self.rank:
            return
        progress = self.progress
        line: dict[str, object] = {"step": progress.step, "rows": progress.rows}
        line["seconds"] = round(progress.seconds)
        line |= dict(zip(("next", "masked", "balance"), recent.tolist(), strict=True))
        line["accuracy"] = {name: round(value, 2) for name, value in progress.accuracy.items()}
        with (self.run / "log.jsonl").open("a") as log:
            print(json.dumps(line), file=log)

    def save(self) -> None:
        """The checkpoint, in place of the one before."""
        if self.rank:
            return
        state = {
            "params": self.params,
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, self.run / "checkpoint.partial")
        (self.run / "checkpoint.partial").rename(self.run / "checkpoint.pt")


def work(rank: int, arguments: argparse.Namespace) -> None:
    """One of the training processes."""
    torch.set_num_threads(1)
    arguments.run.mkdir(parents=True, exist_ok=True)
    meeting = arguments.run.resolve() / f"meeting-{arguments.port}"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=arguments.processes
    )
    trainer = Trainer(
        rank,
        read_model_config(DEMO),
        arguments.run,
        seed=arguments.seed,
        weights=arguments.weights,
    )
    trainer.train(arguments.steps, arguments.rows, rate=arguments.rate, without=arguments.without)
    if arguments.export and rank == 0:
        export(trainer.params, arguments.export)
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30000)
    parser.add_argument(
        "--rows", type=int, default=600, help="rows of both streams a step and process"
    )
    parser.add_argument("--processes", type=int, default=2, help="one a core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/demo"), help="folder of the run's checkpoint and log"
    )
    parser.add_argument("--rate", type=float, default=LEARNING_RATE, help="highest learning rate")
    parser.add_argument("--without", nargs="*", default=[], help="tasks to leave out")
    parser.add_argument(
        "--weights", type=Path, help="start from this folder's model.safetensors, not afresh"
    )
    parser.add_argument(
        "--export", type=Path, help="write model.safetensors to this folder when the run is done"
    )
    arguments = parser.parse_args()
    arguments.port = os.getpid()
    spawn(work, (arguments,), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
