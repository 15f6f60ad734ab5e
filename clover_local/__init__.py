"""Runs Clover, a block-diffusion mixture-of-experts language model, on one consumer card."""
