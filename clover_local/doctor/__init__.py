"""What this machine has of what the runtime wants, each with the remedy where it lacks it."""
