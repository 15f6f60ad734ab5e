"""Modes, controls, randomness, traces: what happens between two forward passes."""
