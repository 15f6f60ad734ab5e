"""What is done with a trace after its run: reading it, running it again, showing it as a page."""
