"""The names of the cache policies, for flags: needs no numpy."""

POLICY_NAMES = ("lfru", "lfu", "lru", "block_lru", "static")
DEFAULT_POLICY = "lfru"
"""The one of fewest misses on the traces of docs/routing.md."""
