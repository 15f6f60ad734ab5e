"""What a gated DeltaNet layer does between its projections."""
