"""Weights from the hub: what a repository has, and what fetches it into the cache."""
