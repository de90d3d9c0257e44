"""The packed route: trainers gather whole checkpoint tensors in buckets and send one message per bucket; the engine's own
`load_weights` loads them.

It serves engines that cannot be traced and colocated engines that want whole tensors, and it is the classic baseline. It
shares the session (versions, commit, errors, reports) with the direct route. `xfer.connect(route=xfer.Packed())` selects it.

    plan       assigns tensors to buckets by their sizes
    wire       descriptions of buckets, and their checks
    buffer     packs into and unpacks from reused byte buffers
    source     one trainer rank's weights: the framework's stream, its plan, and when both are stale
    agree      small collectives of the trainers
    places     copies of boxes between storages and messages: arithmetic only
    tensors    a stream that assembles messages from boxes that ranks hold
    lockstep   merges many small collectives of a framework's export into a few large ones
    feed       one gather for all replicas, overlapped with sending
    broadcast  messages broadcast to workers, which receive one ahead
    shared     messages that workers of the same host read out of the trainers' buffers instead
    plane      one rank's part in one replica's refit: the plan and the link
    trainer    the trainer's side, and its plane, which sends
    worker     the worker's side, and its plane, which loads
"""
