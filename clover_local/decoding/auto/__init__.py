"""`auto`: whichever mode is the fastest on this machine and this text."""
