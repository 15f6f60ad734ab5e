"""The state of one sequence: what is committed, and the way back to earlier points of it.

A commit never writes to the recurrent and conv tensors that it starts from, so a preview cannot
touch them, and publishing a commit is one assignment: an exception or Ctrl-C before it leaves the
state as it was. Only keys and values live in buffers that grow in place, since they are the part
that gets long; rows past the committed length mean nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.kernels.dispatch import DeltaRecord, DeltaState, KeysValues
from clover_local.memory.parts import CHECKPOINTS
from clover_local.prefix import Prefix

FIRST_ROWS = 256


@dataclass(frozen=True, eq=False)
class Committed:
    """Everything that committed tokens left behind, except keys and values."""

    tokens: Prefix
    recurrent: tuple[Tensor, ...]  # per GDN layer [H_v, Dk, Dv] float32
    conv: tuple[Tensor, ...]  # per GDN layer [J - 1, C] float32: the last inputs of the convolution

    def to(self, device: torch.device) -> "Committed":
        """The same on `device`; shares the tensors that are there already."""
        return Committed(
            self.tokens,
            tuple(x.to(device) for x in self.recurrent),
            tuple(x.to(device) for x in self.conv),
        )

    def copy_to(self, device: torch.device) -> "Committed":
        """The same in tensors of its own, on `device`."""
        return Committed(
            self.tokens,
            tuple(x.to(device, copy=True) for x in self.recurrent),
            tuple(x.to(device, copy=True) for x in self.conv),
        )


@dataclass(frozen=True, eq=False)
class StateView:
    """What a pass reads, and where a commit puts its keys and values."""

    length: Tensor  # [1] int32, committed tokens
    keys_values: dict[int, KeysValues]  # by attention layer
    delta: tuple[DeltaState, ...]  # per GDN layer


@dataclass(frozen=True, eq=False)
class VerifyRecord:
    """Rows behind the committed ones whose keys and values are written, but do not count yet."""

    before: Committed  # where they started
    tokens: tuple[int, ...]
    delta: tuple[DeltaRecord, ...]  # per GDN layer

    def first(self, rows: int, state: "SequenceState") -> tuple[int, ...]:
        """The tokens of its first rows, for `state` to commit.

        Raises:
            ValueError: more rows than were verified, or none; a state that has gone on since.
        """
        if not 1 <= rows <= len(self.tokens):
            raise ValueError(f"{rows} rows to accept of {len(self.tokens)}")
        if state.committed is not self.before:
            raise ValueError(
                f"verified behind {len(self.before.tokens)} tokens; the state, of {state.length},"
                " is another by now"
            )
        return self.tokens[:rows]


@dataclass(frozen=True)
class StateBytes:
    """Memory of a sequence, in bytes."""

    keys_values: int
    recurrent: int
    conv: int
    checkpoints: int


class SequenceState:
    """Keys, values, recurrent and conv state of one sequence of at most `context` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        context: int,
        device: torch.device | str,
        dtype: torch.dtype,
        first_rows: int = FIRST_ROWS,
    ) -> None:
        """`dtype` is that of keys and values; recurrent and conv state are float32.

        Buffers for keys and values hold `first_rows` tokens at first and grow up to `context`.

        Raises:
            ValueError: `context` is not between 1 and the model's `max_position_embeddings`.
        """
        if not 1 <= context <= config.max_position_embeddings:
            raise ValueError(
                f"context {context}, the model has 1 to {config.max_position_embeddings}"
            )
        self.context = context
        self._first_rows = first_rows
        self.device, self.dtype = torch.device(device), dtype
        self._config = config
        self._empty = (0, config.num_key_value_heads, config.head_dim)
        self._keys_values = {
            layer: (
                torch.empty(self._empty, dtype=dtype, device=self.device),
                torch.empty(self._empty, dtype=dtype, device=self.device),
            )
            for layer in range(config.num_hidden_layers)
            if config.is_attention(layer)
        }
        # The tokens whose rows the buffers hold; starts with the committed ones, and goes on behind
        # them after a rewind. Whatever is a prefix of it can be restored.
        self._stored = Prefix()
        self._is_reserved = False  # rows behind them are being written
        self._checkpoints: list[Committed] = []  # the latest last
        self._length = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._length_is = 0
        self.committed = self._nothing()
        """Its tensors may serve a later commit again: to keep a point, take a `checkpoint`."""

    @property
    def length(self) -> int:
        """How many tokens are committed."""
        return len(self.committed.tokens)

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self.context - self.length

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values, ascending."""
        return tuple(self._keys_values)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values of an attention layer: views [length, H_kv, Dh]."""
        keys, values = self._keys_values[layer]
        return keys[: self.length], values[: self.length]

    def view(self, *, scratch: bool = False) -> StateView:
        """What a pass reads; valid until rows are reserved or the committed tokens change.

        With `scratch` the pass may use rows behind the committed ones that mean nothing, if any.

        The length is written to the device only here: no commit can be published by halves.
        """
        if self._length_is != self.length:
            self._length.fill_(self.length)
            self._length_is = self.length
        spare = scratch and not self._is_reserved and len(self._stored) == self.length
        return StateView(
            length=self._length,
            keys_values={
                layer: KeysValues(keys, values, self._length, spare)
                for layer, (keys, values) in self._keys_values.items()
            },
            delta=tuple(map(DeltaState, self.committed.recurrent, self.committed.conv)),
        )

    def reserve(self, rows: int) -> None:
        """Makes room for new rows behind the committed ones, which a commit is about to write.

        What lay there is given up; `advance` makes the new rows count.

        Raises:
            ValueError: more rows than there is room for.
        """
        if rows > self.room:
            raise ValueError(f"{rows} rows, room for {self.room} of {self.context}")
        self._stored = self._stored.first(self.length)
        self._is_reserved = True
        for layer in self._keys_values:
            self._reserve(layer, self.length + rows)

    def place(self, committed: Committed) -> None:
        """Goes on with the same values in other tensors: copies of the committed ones."""
        if committed.tokens != self.committed.tokens:
            raise ValueError(
                f"{len(committed.tokens)} tokens, {self.length} are committed, or others"
            )
        self.committed = committed

    def advance(
        self, tokens: Sequence[int], *, recurrent: Sequence[Tensor], conv: Sequence[Tensor]
    ) -> None:
        """Commits `tokens`, whose keys and values were appended.

        `recurrent` and `conv` are the states after them, per GDN layer.
        """
        followed = self.committed.tokens.followed_by(tokens)
        committed = Committed(followed, tuple(recurrent), tuple(conv))
        self._stored = committed.tokens
        self.committed = committed
        self._is_reserved = False

    def checkpoint(self) -> Committed:
        """Keeps a copy of this point, among a few, in host memory; once per point.

        Where there are too many, the one goes that cannot be restored any more, or else the one
        that takes the fewest tokens to reach again from another.
        """
        kept = self.committed.copy_to(torch.device("cpu"))
        others = [point for point in self._checkpoints if point.tokens != kept.tokens]
        while len(others) >= CHECKPOINTS:
            others.remove(min(others, key=lambda point: self._loss(point, others)))
        self._checkpoints = [*others, kept]
        return kept

    def rewind(self, checkpoint: Committed) -> None:
        """Goes back, or forward again, to a point of this sequence.

        Raises:
            ValueError: its keys and values have been overwritten since.
        """
        if not self._restorable(checkpoint):
            raise ValueError(
                f"the state after {len(checkpoint.tokens)} tokens has been overwritten"
            )
        self.committed = checkpoint.to(self.device)

    def reuse(self, prompt_ids: Sequence[int], *, left: int = 1) -> int:
        """Goes to the longest known point that leaves `left` or more of `prompt_ids` to commit.

        Returns:
            How many tokens of the prompt are committed now; 0 after a reset.
        """
        points = [
            point
            for point in (*self._checkpoints, self.committed)
            if len(point.tokens) <= len(prompt_ids) - left
            and point.tokens.starts(prompt_ids)
            and self._restorable(point)
        ]
        if points:
            self.committed = max(points, key=lambda point: len(point.tokens)).to(self.device)
        else:
            self.committed = self._nothing()
        return self.length

    def reset(self) -> None:
        """Forgets everything, checkpoints included; keeps the buffers."""
        self._checkpoints.clear()
        self._stored = Prefix()
        self.committed = self._nothing()

    @property
    def nbytes(self) -> StateBytes:
        """What this state occupies; tensors that a checkpoint shares with it count once."""
        own = {id(x) for x in (*self.committed.recurrent, *self.committed.conv)}
        kept = {id(x): x for point in self._checkpoints for x in (*point.recurrent, *point.conv)}
        return StateBytes(
            keys_values=sum(x.nbytes for pair in self._keys_values.values() for x in pair),
            recurrent=sum(x.nbytes for x in self.committed.recurrent),
            conv=sum(x.nbytes for x in self.committed.conv),
            checkpoints=sum(x.nbytes for key, x in kept.items() if key not in own),
        )

    def _restorable(self, point: Committed) -> bool:
        return point.tokens.starts(self._stored)

    def _loss(self, point: Committed, points: Sequence[Committed]) -> int:
        """How many tokens lie between a point and the nearest one before it; -1: it is lost."""
        if not self._restorable(point):
            return -1
        size = len(point.tokens)
        before = [
            len(other.tokens)
            for other in points
            if len(other.tokens) < size and other.tokens.starts(point.tokens)
        ]
        return size - max(before, default=0)

    def _reserve(self, layer: int, rows: int) -> None:
        """Makes a layer's buffers at least `rows` long: doubled, up to the context."""
        keys, values = self._keys_values[layer]
        if rows <= len(keys):
            return
        capacity = min(max(rows, 2 * len(keys), self._first_rows), self.context)
        self._keys_values[layer] = (self._grown(keys, capacity), self._grown(values, capacity))

    def _grown(self, buffer: Tensor, capacity: int) -> Tensor:
        grown = buffer.new_empty(capacity, *self._empty[1:])
        grown[: self.length] = buffer[: self.length]
        return grown

    def _nothing(self) -> Committed:
        """The state of an empty sequence: zeros."""
        config = self._config
        gdn_layers = config.num_hidden_layers - len(self._keys_values)
        recurrent = torch.zeros(
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            device=self.device,
        )
        conv = torch.zeros(config.linear_conv_kernel_dim - 1, config.qkv_dim, device=self.device)
        return Committed(Prefix(), (recurrent,) * gdn_layers, (conv,) * gdn_layers)
