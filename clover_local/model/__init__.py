"""The Clover model: a page of mathematics per file."""
