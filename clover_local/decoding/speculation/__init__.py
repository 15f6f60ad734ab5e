"""Self-speculation: a preview proposes tokens, one causal forward verifies them."""
