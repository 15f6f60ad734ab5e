"""How fast forwards are on this machine, beside the least time that they could take."""
