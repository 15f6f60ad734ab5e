"""Products with packed weights: one kernel, a table of configurations for each width."""
