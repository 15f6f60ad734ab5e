"""Texts for calibration, each with its source and licence."""
