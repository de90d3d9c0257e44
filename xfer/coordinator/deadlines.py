"""All waits of the control plane beyond the deadline that a caller gives.

`nccl_xfer_refit` returns or raises within `deadline_s + CALL_GRACE_S` on every rank, whatever process died or hangs:

    deadline    the coordinator aborts every replica that is not decided
    + STOP      it stops waiting for workers to stop (to install, after a decision)
    + ANSWER    it stops waiting for controllers, and tells the trainers
    + CALL      a trainer that was told nothing raises by itself
"""

STOP_GRACE_S = 5.0
"""Seconds that armed workers have to stop after an abort, or to install after the decision. After that, bytes count as mixed."""
ANSWER_GRACE_S = 3.0
"""Seconds beyond the deadline (or the end of stopping) that trainers wait for a controller to say what its engine serves."""
CALL_GRACE_S = 10.0
"""Seconds beyond its deadline by which a refit has returned or raised on every rank."""
SILENCE_S = 3.0
"""Seconds in which the coordinator answers a client that has waited to its deadline and asks whether the coordinator lives."""
LEAVE_S = 1.0
"""Seconds in which the coordinator closes the connection of a client that leaves; then the client closes it itself."""
TOLD_S = 1.0
"""Seconds that a connecting trainer waits beyond a deadline that the coordinator has too: the coordinator knows which rank is missing."""
SETTLE_GRACE_S = 60.0
"""Seconds that a controller has to bring its engine back into service; later, the replica counts as lost. Trainers do not wait for
it beyond their deadline: the replica takes part in refits again when its engine is back."""
APART_S = 2.0
"""Seconds that data-parallel workers in the update call wait for the others before the call is made again. They double with every
such call of a refit."""
ARM_AHEAD_S = 0.002
"""Seconds by which engines are to be armed before the last trainer is ready, judging by the refit before."""
TOGETHER_S = 5.0
"""Seconds that replicas which could begin wait for others. On the packed route all replicas of one gather begin together; in a relay
chain a replica begins after the one before it."""
OWNER_S = 1.0
"""Seconds after which another rank with an equal layout is asked for it: the one that was asked may hang."""
CAUSE_S = 0.25
"""Seconds that the end of a refit waits for the reason, after a rank reported only that a connection closed."""
HOLD_S = 0.002
"""Seconds that a `Go`, `Done` or `Drained` of a large job may wait for others, to travel with them as one message."""
HOLD_PAIRS = 2048
"""Pairs of a trainer and a replica from which on a job is large: a message for each pair costs the coordinator about 10 us."""


def hold_s(trainers: int, replicas: int) -> float:
    """How long messages of a job of this size may be held back. 0.0 for a single replica and for small jobs."""
    return HOLD_S if replicas > 1 and trainers * replicas >= HOLD_PAIRS else 0.0
