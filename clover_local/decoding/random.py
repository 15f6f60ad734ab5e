"""Philox4x32-10: random numbers that are a function of (seed, counter), the same on every device.

J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter names what
the number is for, so a draw depends neither on earlier draws nor on how rows are batched.
"""

PICK, ACCEPT, BOUNDARY = 0, 1, 2
"""Purposes: the third counter word."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit random words for four 32-bit counter words and two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first = _MULTIPLIERS[0] * c0
        second = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, *, pass_number: int, purpose: int, retry: int = 0) -> float:
    """The random number in [0, 1) for one decision: the first word's top 24 bits.

    Args:
        seed: 64 bits.
        position: 1-based position in the response.
        pass_number: pass in the block, from 0 (0 where there are no passes).
        purpose: `PICK`, `ACCEPT` or `BOUNDARY`.
        retry: how often this decision was made before.
    """
    key = (seed & _WORD, seed >> 32 & _WORD)
    word = philox4x32((position & _WORD, pass_number, purpose, retry), key)[0]
    return float(word >> 8) / (1 << 24)
