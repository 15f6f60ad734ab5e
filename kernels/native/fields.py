"""What a compiled function is told: int64 fields by number, in memory that all threads share."""

from enum import IntEnum


class Call(IntEnum):
    """One parallel call of `worker`."""

    TAKEN = 0  # tiles that threads took
    TILES = 1
    JOBS = 2  # pointer to the jobs, one after the other
    BLOCKS = 3  # tiles of a job
    BLOCK = 4  # rows of the weight in a tile
    N = 5
    K = 6
    ROW_BYTES = 7  # of the words of a row of the weight
    GROUPS = 8  # of a row
    GROUP_BYTES = 9  # of the words of a group
    AHEAD = 10  # bytes of words from those in use to those that are asked for
    DIRECT_ROWS = 11  # up to which a job unpacks weights in registers
    CHUNK_GROUPS = 12  # that other jobs unpack at a time
    X = 13  # pointer to float32 rows
    X_STRIDE = 14  # bytes
    X_ROWS = 15  # pointer to int64: which row of x makes each row of y
    Y = 16  # pointer to float32 rows
    Y_STRIDE = 17  # bytes


class Job(IntEnum):
    """A weight, and the rows of y that it makes."""

    FIRST = 0
    ROWS = 1
    DATA = 2  # pointers
    SCALE = 3
    MINIMUM = 4


class Spread(IntEnum):
    """One parallel call of `spread`."""

    TAKEN = 0  # rows that threads took
    ROWS = 1
    X = 2  # pointer to float32 rows
    X_STRIDE = 3  # bytes
    K = 4
    OUT = 5  # pointer to [ROWS, K]
