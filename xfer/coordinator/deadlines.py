"""How long anything may take beyond the deadline that a caller gave. All of them are here.

`nccl_xfer_refit` returns or raises within `deadline_s + CALL_GRACE_S`, on every rank, whoever died or hangs:

    deadline    the coordinator aborts what is not decided
    + STOP      it no longer waits for workers to stop (to install, after a decision)
    + ANSWER    it no longer waits for controllers, and tells the trainers
    + CALL      trainers that were not told anything raise by themselves
"""

STOP_GRACE_S = 5.0
"""Seconds that armed workers have to stop after an abort, or to install after the decision. Later, bytes count as mixed."""
ANSWER_GRACE_S = 3.0
"""Seconds beyond the deadline (or the end of stopping) that trainers wait for a controller to say what its engine serves."""
CALL_GRACE_S = 10.0
"""Seconds beyond its deadline by which a refit has returned or raised on every rank."""
SILENCE_S = 3.0
"""Seconds in which the coordinator answers a client that has waited to its deadline and asks whether the coordinator lives."""
LEAVE_S = 1.0
"""Seconds in which the coordinator closes the connection of a client that leaves; then the client closes it itself."""
TOLD_S = 1.0
"""Seconds that a trainer which connects waits beyond a deadline that the coordinator has too: the coordinator knows who is missing."""
SETTLE_GRACE_S = 60.0
"""Seconds that a controller has to bring its engine back into service. Trainers do not wait for that beyond their
deadline: the replica takes part in refits again once it has; later than that, it counts as lost."""
APART_S = 2.0
"""Seconds that data-parallel workers in the update call wait for the others before the call is made again. They double with every such
call of a refit."""
TOGETHER_S = 5.0
"""Seconds that replicas which could begin wait for others: on the packed route for those that could be fed from the same
gather, in a row of replicas for the one before, which they would read from."""
CAUSE_S = 0.25
"""Seconds that the end of a refit which failed since a connection closed waits for whoever closed it to say why."""
