"""The synthetic questions that the demo model is trained on, one file per family."""
