"""From logits to tokens and to what a row of logits says about them."""
