"""The memory plan: what lies where, how many experts the device holds, and what speed follows."""
