"""Records in pinned host memory, from where a copy to the device needs no detour; and a small ring.

What the limit or the system does not allow to be pinned comes through the ring: read from the files
into an entry, sent from there. Memory is pinned in pieces, since torch rounds each piece up to a
power of two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from clover_local.experts.store import ExpertStore, Key
from clover_local.memory.sizes import shown

PIECE_BYTES = 64 << 20
LEAST_ENTRIES = 2  # of a ring: one is read while the other is sent

Allocate = Callable[[int], Tensor]
"""So many bytes of pinned memory; a RuntimeError where the system refuses."""


def pinned(nbytes: int) -> Tensor:
    """Pinned host memory.

    Raises:
        RuntimeError: the system refuses.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class PinnedRecords:
    """Room for some records, not filled yet."""

    def __init__(
        self, sizes: Mapping[Key, int], *, limit: int, allocate: Allocate = pinned
    ) -> None:
        """Takes memory for the first of `sizes`, bytes of each record, up to `limit` bytes.

        `refused` says why it is less, if the system did not give that much.
        """
        self.refused: str | None = None
        self._rows: dict[Key, Tensor] = {}
        self._filled: set[Key] = set()
        self._room: dict[int, list[Tensor]] = {}
        left = limit
        waiting = {size: list(sizes.values()).count(size) for size in set(sizes.values())}
        for key, size in sizes.items():
            if size > left:
                break
            if not self._room.get(size):
                count = min(waiting[size], max(1, PIECE_BYTES // size), left // size)
                try:
                    piece = allocate(count * size)
                except RuntimeError as error:
                    self.refused = str(error).splitlines()[0]
                    break
                waiting[size] -= count
                self._room[size] = [piece[at : at + size] for at in range(0, len(piece), size)]
            self._rows[key] = self._room[size].pop()
            left -= size

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the records that have room."""
        return sum(row.nbytes for row in self._rows.values())

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def fill(self, key: Key, read: Callable[[Tensor], None]) -> None:
        """Lets `read` write a record that has room."""
        read(self._rows[key])
        self._filled.add(key)

    def row(self, key: Key) -> Tensor | None:
        """A record [bytes] uint8; None where it has no room, or was not filled."""
        return self._rows[key] if key in self._filled else None


class Ring:
    """Entries that are filled on the host and sent, one after the other."""

    def __init__(self, record_bytes: int, *, nbytes: int, allocate: Allocate = pinned) -> None:
        """Entries for records of at most `record_bytes`, in `nbytes` or a little more.

        `refused` says why its memory is not pinned, if it is not: then copies wait.
        """
        self.refused: str | None = None
        count = max(LEAST_ENTRIES, nbytes // record_bytes)
        try:
            memory = allocate(count * record_bytes)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            memory = torch.empty(count * record_bytes, dtype=torch.uint8)
        self._entries = memory.view(count, record_bytes)
        self._sent: list[torch.cuda.Event | None] = [None] * count
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._entries.nbytes

    def entry(self) -> Tensor:
        """The next entry, free to be filled; waits until what it held has been sent."""
        event = self._sent[self._next]
        if event is not None:
            event.synchronize()
        return self._entries[self._next]

    def sent(self, event: torch.cuda.Event) -> None:
        """The entry that was given out last is in use until `event`."""
        self._sent[self._next] = event
        self._next = (self._next + 1) % len(self._sent)


class HostRecords:
    """Records of a store on their way to a GPU: from pinned memory, or through the ring."""

    def __init__(
        self,
        store: ExpertStore,
        first: Sequence[Key] = (),
        *,
        pin_bytes: int = 0,
        ring_bytes: int = 0,
        allocate: Allocate = pinned,
    ) -> None:
        """Takes the memory.

        Args:
            store: of the checkpoint.
            first: (layer, expert) that should be pinned, in this order.
            pin_bytes: as far as so many bytes reach.
            ring_bytes: of the ring.
            allocate: takes pinned memory.
        """
        self._store = store
        sizes = {key: store.layouts(key[0])[key[1]].nbytes for key in first}
        self.pinned = PinnedRecords(sizes, limit=pin_bytes, allocate=allocate)
        self.ring = Ring(max(store.record_bytes), nbytes=ring_bytes, allocate=allocate)
        self._wanted = len(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self.pinned.nbytes + (0 if self.ring.refused else self.ring.nbytes)

    def pin(self, key: Key) -> None:
        """Reads a record into the pinned memory that it has.

        Raises:
            CheckpointError: it cannot be read.
        """
        self.pinned.fill(key, lambda into: self._store.read(*key, into=into))

    @property
    def note(self) -> str | None:
        """What a user should know of memory that is not pinned; None where all is."""
        staged = self._wanted - len(self.pinned)
        if self.ring.refused is not None:
            return (
                f"the system pins no memory ({self.ring.refused}): experts are copied from "
                "ordinary memory, more slowly"
            )
        through = f"{staged} of {self._wanted} experts come through a ring of "
        if self.pinned.refused is not None:
            return (
                f"the system pins no more than {shown(self.pinned.nbytes)} "
                f"({self.pinned.refused}): {through}{shown(self.ring.nbytes)}, more slowly"
            )
        if staged:
            return f"the pin limit: {through}{shown(self.ring.nbytes)}, more slowly"
        return None
