"""The names of the cache policies, for flags: needs no numpy."""

POLICY_NAMES = ("lfru", "lfu", "lru", "block_lru", "static")
DEFAULT_POLICY = "lfru"
"""Of those that need no profile, the one of fewest misses on the traces of docs/routing.md."""
