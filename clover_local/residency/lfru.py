"""`lfru`: frequency by recency, and a sense of how long a block still needs what it uses now.

The value of an expert is a mean over the past blocks of log(1 + forwards of the block that used
it), weighted by recency; two half-lives are mixed, 34 blocks and 7, as neither suits both a steady
subject and a new one. The logarithm is there because a kept expert saves a block of many passes
little more than one of few.

A newcomer bids its value, unless the block is expected to repay it: then it may take the slot of
anything that the block has not used. It is repaid when

    (share of a pass's experts that the next forward uses again
     - share of the experts not used so far that the next forward uses) * forwards still to come > 1

because evicting costs one miss when the victim returns. Long blocks whose passes are alike repay
every newcomer; blocks of one pass and a commit with other experts, as the demo model has, do not,
and there admitting each newcomer throws out what the commit needs. The shares are learned.
"""

import numpy as np

from clover_local.residency.demand import Demand, FloatArray, IntArray

_SLOW, _FAST = 0.02, 0.1  # weight of one more block
_SLOW_SHARE = 0.6
_MEMORY = 32  # blocks over which shares and lengths are averaged; what a profile counts as
_SAMPLED = 4  # the shares are taken on every fourth layer
_MOST_FORWARDS = 64  # of a block that are told apart


class Lfru:
    """See above."""

    def __init__(self, prior: FloatArray) -> None:
        """`prior` [layers, E] as in `policies.py`."""
        known = np.log1p(prior.ravel())
        self._slow, self._fast = known.copy(), known.copy()
        self._uses = np.zeros(prior.size)  # forwards of this block
        self._blocks = _MEMORY if known.any() else 0
        self._reuse = Reuse(*prior.shape)

    def used(self, keys: IntArray, demand: Demand) -> None:
        """See `Policy`."""
        self._uses[keys] += 1
        self._reuse.used(keys, demand)

    def end_block(self) -> None:
        """See `Policy`."""
        slow, fast = self._weights()
        new = np.log1p(self._uses)
        self._slow += slow * (new - self._slow)
        self._fast += fast * (new - self._fast)
        self._uses[:] = 0
        self._blocks += 1
        self._reuse.end_block()

    def values(self, keys: IntArray) -> FloatArray:
        """See `Policy`. This block does not count against them: it may still use them."""
        return _mixed(self._slow[keys], self._fast[keys])

    def bids(self, keys: IntArray, demand: Demand) -> FloatArray:
        """See `Policy`."""
        if self._reuse.repays(demand):
            return np.full(len(keys), np.inf)
        slow, fast = self._weights()
        new = np.log1p(self._uses[keys])
        old_slow, old_fast = self._slow[keys], self._fast[keys]
        return _mixed(old_slow + slow * (new - old_slow), old_fast + fast * (new - old_fast))

    def _weights(self) -> tuple[float, float]:
        """Of the current block; a plain mean while there are few."""
        mean = 1 / (1 + self._blocks)
        return max(_SLOW, mean), max(_FAST, mean)


class Reuse:
    """How alike the forwards of a block are, and how many there are, learned from past blocks.

    Steps from the first forward to the second are told apart from later ones: a block of masks
    only may use other experts than one with text in it. Every sum fades with the blocks.
    """

    def __init__(self, layers: int, num_experts: int) -> None:
        self._num_experts = num_experts
        self._number = np.full(layers * num_experts, -1)  # the block's last forward that used it
        self._before = [0] * layers  # experts that the layer's last forward used
        self._so_far = [0] * layers  # and all forwards of the block
        self._again = [(0.985, 1.0)] * 2  # by step: used again, of those used before
        self._first = [(0.05, 1.0)] * 2  # used for the first time, of those not used so far
        self._to_come = np.full(_MOST_FORWARDS, 8.0)  # forwards behind each number
        self._last = 0
        self._blocks = 0

    def used(self, keys: IntArray, demand: Demand) -> None:
        """One layer of a preview or commit."""
        self._last = demand.number
        layer = int(keys[0]) // self._num_experts
        if layer % _SAMPLED:
            return
        numbers = self._number[keys]
        first = int((numbers < 0).sum())
        if demand.number and self._before[layer]:
            step = min(demand.number, 2) - 1
            again = int((numbers == demand.number - 1).sum())
            self._again[step] = _plus(self._again[step], again, self._before[layer])
            left = self._num_experts - self._so_far[layer]
            self._first[step] = _plus(self._first[step], first, left)
        self._number[keys] = demand.number
        self._before[layer] = len(keys)
        self._so_far[layer] += first

    def end_block(self) -> None:
        """Takes the block's length into the mean, and forgets the block."""
        forwards = min(self._last + 1, _MOST_FORWARDS)
        self._blocks += 1
        weight = 1 / min(self._blocks + 1, _MEMORY)
        actual = np.arange(forwards - 1, -1, -1)
        self._to_come[:forwards] += weight * (actual - self._to_come[:forwards])
        fade = 1 - 1 / _MEMORY
        self._again = [(part * fade, whole * fade) for part, whole in self._again]
        self._first = [(part * fade, whole * fade) for part, whole in self._first]
        self._number[:] = -1
        self._before = [0] * len(self._before)
        self._so_far = [0] * len(self._so_far)

    def repays(self, demand: Demand) -> bool:
        """Whether a newcomer of this forward is expected to be worth any victim's return."""
        if demand.kind == "commit":
            return False  # it ends the block
        step = min(demand.number, 1)
        gain = _share(self._again[step]) - _share(self._first[step])
        return gain * float(self._to_come[min(demand.number, _MOST_FORWARDS - 1)]) > 1


def _mixed(slow: FloatArray, fast: FloatArray) -> FloatArray:
    return _SLOW_SHARE * slow + (1 - _SLOW_SHARE) * fast


def _plus(share: tuple[float, float], part: float, whole: float) -> tuple[float, float]:
    return share[0] + part, share[1] + whole


def _share(share: tuple[float, float]) -> float:
    return share[0] / share[1] if share[1] else 0.0
