"""What a forward of each mode costs here, by what it has cost lately."""

from collections import deque
from statistics import median

WINDOW = 15
"""Measurements that count: their median is not moved by a few forwards that were held up."""
NEWS = 1.5
"""A measurement so many times what was known, or as many times less, is no noise."""


class Price:
    """Milliseconds of one kind of forward."""

    def __init__(self) -> None:
        self._measured = deque[float](maxlen=WINDOW)
        self._only_one = True
        self.was_cold = False
        """Whether the second measurement showed that the first had paid for what is made once."""
        self.has_news = False
        """Whether the last measurement was far from what was known."""

    @property
    def is_known(self) -> bool:
        """Whether there is a measurement."""
        return bool(self._measured)

    @property
    def milliseconds(self) -> float:
        """The median; 0 before the first measurement."""
        return median(self._measured) if self._measured else 0.0

    def forget(self) -> None:
        """Leaves one measurement, before a new one after a long time."""
        while len(self._measured) > 1:
            self._measured.popleft()

    def add(self, milliseconds: float) -> None:
        """Takes a measurement; a first one that was cold no longer counts."""
        known = self.milliseconds
        self.has_news = self.is_known and not known / NEWS <= milliseconds <= known * NEWS
        if self._only_one and self._measured:
            self._only_one = False
            self.was_cold = known > NEWS * milliseconds
            if self.was_cold:
                self._measured.clear()
        self._measured.append(milliseconds)
