"""Triton kernels: one file each, every one defined by a plain operator beside this package."""
