"""Unmasking rules: which masked rows of a block leave the mask in a pass, one file a rule."""
