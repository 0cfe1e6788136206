"""The named phases of a step, a view change and a join: every place where a fault can be put.

Role: one list shared by progress blocks (where a replica is), probes (where a fault strikes) and reports. A phase
that a driver passes must stand here, and the fault campaign visits each. Not for timing: that is the driver's.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["OWNED", "WAITS", "Phase"]


class Phase(IntEnum):
    """Values are stable: they are written into shared progress blocks."""

    IDLE = 0
    # a step, in order
    LOAD = 1  # fetching the microbatch's samples
    BODY = 2  # the user's code between two microbatches
    BACKWARD = 3
    MERGE = 4  # adding the microbatch's gradient to its partial sum
    SCATTER = 5  # a bucket's partial sums are about to be offered
    SCATTERED = 6  # a bucket was offered; slices of the others are awaited
    REDUCE = 7  # reducing this member's slice of a bucket
    GATHER = 8  # the reduced slice is about to be offered
    GATHERED = 9  # slices of the others are being copied
    HEADER = 10  # all buckets complete, headers awaited
    VERDICT = 11  # decided, not yet applied
    OPTIMIZER = 12  # inside the optimizer's step
    COMMIT = 13  # applied, not yet told to the loop
    AUDIT = 14  # all buckets complete, about to compute a microbatch beside my share
    # a view change
    LEAVE = 20  # the view is abandoned, nothing acknowledged yet
    CONNECT = 21  # forming the new group
    ROLL_CALL = 22
    HAND_OVER_SEND = 23
    HAND_OVER_RECEIVE = 24
    RECOMPUTE = 25  # about to compute an orphan
    FINAL = 26  # the last step's closing barrier
    DEPART = 27  # a graceful leaver's last step is committed
    # joining
    JOIN_HELLO = 30
    JOIN_SCHEMA = 31
    JOIN_SNAPSHOT = 32
    JOIN_REPLAY = 33
    JOIN_READY = 34
    SERVE_SNAPSHOT = 35  # a donor's frozen copy begins
    SERVE_STREAM = 36  # a donor sends a step to a joiner
    # a save, on threads of its own: fault points, never a rank's own phase
    SAVE_BEGAN = 50
    SAVE_SEALED = 51  # the snapshot in the launcher's memory counts
    SAVE_WRITTEN = 52
    SAVE_DATA_DURABLE = 53
    SAVE_PART_WRITTEN = 54
    SAVE_PART_DURABLE = 55  # the promise may be given
    PUBLISH_BEGAN = 56
    PUBLISH_DONE = 57
    # the processes beside the replicas
    PERSIST = 40
    TELL = 41
    SPAWN = 42
    KILL = 43


OWNED = frozenset(p for p in Phase if p not in {Phase.IDLE, Phase.LOAD, Phase.BODY})
"""Phases that outlast owns, hence has learned deadlines for; the others are the loop's own (`outside_s`)."""

WAITS = frozenset(
    {
        Phase.IDLE,
        Phase.SCATTERED,
        Phase.GATHERED,
        Phase.HEADER,
        Phase.LEAVE,
        Phase.CONNECT,
        Phase.ROLL_CALL,
        Phase.HAND_OVER_RECEIVE,
        Phase.FINAL,
    }
)
"""Phases in which a member mostly waits for others: who is long in one of them need not be who is late."""
