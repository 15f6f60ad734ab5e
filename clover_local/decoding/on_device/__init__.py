"""What a pick on the device is told by the host."""
