"""Training batches: examples of like length, left-padded, with masked copies of their answers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_network import Batch
from tokenizers import Tokenizer
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.demo.tasks.example import Example
from clover_local.demo.tasks.render import load_template, render
from clover_local.demo.tasks.stream import stream

PROMPT_WEIGHT = 0.1  # of a prompt token in the next-token loss
TAIL_WEIGHT = 0.2  # of the padding after an answer's end in the masked-token loss
SHIFT_SHARE = 0.25  # of examples whose first block starts inside the answer
FULLY_MASKED_SHARE = 0.15  # of noisy blocks
SUFFIX_SHARE = (
    0.3  # of noisy blocks: masked from some row on, as when an answer resolves from the left
)
COPIES = 3  # of an answer block, each masked in its own way: they share the clean stream's cost
POOL = 384  # examples that are sorted by length before they are cut into batches


@dataclass(frozen=True)
class Targets:
    """What the two streams of a batch have to predict, and how much each row counts."""

    next_token: Tensor  # [B, T]
    next_weight: Tensor  # [B, T]; 1 where the target belongs to the answer
    masked_token: Tensor  # [N, block_size]
    masked_weight: Tensor  # [N, block_size]
    families: tuple[str, ...]  # [B]


@dataclass(frozen=True)
class Sequence:
    """One tokenised example."""

    family: str
    ids: list[int]
    prompt: int  # how many of `ids` are the prompt
    start: int  # where the first block starts: `prompt`, or inside the answer

    def blocks(self, size: int) -> tuple[int, int]:
        """Chunks before the first block, and blocks."""
        return -(-self.start // size), -(-(len(self.ids) - self.start) // size)


class ExampleSource:
    """Draws examples family by family, with weights that the trainer moves."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = load_template()
        self.rng = random.Random(seed)
        self.seed = seed
        self.streams: dict[str, Iterator[Example]] = {}

    def draw(self, family: str) -> Sequence:
        """The family's next training example."""
        if family not in self.streams:
            self.streams[family] = stream(self.seed, held_out=False, weights={family: 1.0})
        prompt, response = render(next(self.streams[family]), self.template)
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        response_ids = self.tokenizer.encode(response, add_special_tokens=False).ids
        start = len(prompt_ids)
        if self.rng.random() < SHIFT_SHARE:
            start += self.rng.randrange(len(response_ids))
        return Sequence(family, prompt_ids + response_ids, len(prompt_ids), start)

    def batches(
        self, weights: dict[str, float], config: ModelConfig, *, rows: int
    ) -> Iterator[tuple[Batch, Targets]]:
        """Batches of about `rows` rows (both streams), out of one pool of examples."""
        families = self.rng.choices(list(weights), list(weights.values()), k=POOL)
        pool = sorted((self.draw(f) for f in families), key=lambda s: s.blocks(config.block_size))
        groups: list[list[Sequence]] = [[]]
        size = config.block_size
        for sequence in pool:
            group = [*groups[-1], sequence]
            before = max(s.blocks(size)[0] for s in group)
            blocks = max(s.blocks(size)[1] for s in group)
            noisy = COPIES * sum(s.blocks(size)[1] for s in group)
            if groups[-1] and size * (len(group) * (before + blocks) + noisy) > rows:
                groups.append([sequence])
            else:
                groups[-1].append(sequence)
        self.rng.shuffle(groups)
        for group in groups:
            yield self.collate(group, config)

    def mask(self, size: int) -> Tensor:
        """Which rows of one noisy block are masked: [size] bool."""
        kind = self.rng.random()
        if kind < FULLY_MASKED_SHARE:
            return torch.ones(size, dtype=torch.bool)
        if kind < FULLY_MASKED_SHARE + SUFFIX_SHARE:
            return torch.arange(size) >= self.rng.randrange(size)
        ratio = self.rng.random()
        return torch.tensor([self.rng.random() < ratio for _ in range(size)])

    def collate(self, group: list[Sequence], config: ModelConfig) -> tuple[Batch, Targets]:
        """Left-pads the sequences so that all their blocks start at the same columns."""
        size, pad = config.block_size, config.pad_token_id or 0
        before = max(s.blocks(size)[0] for s in group)
        columns = size * (before + max(s.blocks(size)[1] for s in group))
        tokens = torch.full((len(group), columns), pad)
        next_weight = torch.zeros(len(group), columns)
        start = torch.empty(len(group), dtype=torch.long)
        noisy_of: list[tuple[int, int]] = []
        answer = torch.zeros(len(group), columns)  # 1 on answer tokens, TAIL_WEIGHT behind them
        for row, sequence in enumerate(group):
            first = size * before - sequence.start
            end = first + len(sequence.ids)
            start[row] = first
            tokens[row, first:end] = torch.tensor(sequence.ids)
            next_weight[row, first : end - 1] = PROMPT_WEIGHT
            next_weight[row, first + sequence.prompt - 1 : end - 1] = 1.0
            answer[row, first + sequence.prompt : end] = 1.0
            answer[row, end:] = TAIL_WEIGHT
            noisy_of += COPIES * [(row, before + b) for b in range(sequence.blocks(size)[1])]
        example, block = torch.tensor(noisy_of).T
        masked_token = tokens.view(len(group), -1, size)[example, block]
        masked_weight = answer.view(len(group), -1, size)[example, block]
        masked = torch.stack([self.mask(size) for _ in noisy_of])
        noisy = torch.where(masked, config.mask_token_id, masked_token)
        return (
            Batch(tokens, start, noisy, example, block),
            Targets(
                torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1),
                next_weight,
                masked_token,
                masked_weight * masked,
                tuple(s.family for s in group),
            ),
        )
