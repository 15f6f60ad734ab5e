"""Plain-tensor operators of the Clover forward passes; knows tensors only."""
