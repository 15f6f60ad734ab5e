"""Offline work on checkpoints; the runtime never imports it."""
