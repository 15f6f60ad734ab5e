"""Controls against repetition beyond the release's: in a block, along a match, of whole loops."""
