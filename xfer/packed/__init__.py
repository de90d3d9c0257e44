"""The packed route: trainers gather whole checkpoint tensors in buckets and send one message per bucket; the engine's own
`load_weights` loads them.

It serves engines that cannot be traced and colocated engines that want whole tensors, and it is the classic baseline. It
shares the session (versions, commit, errors, reports) with the direct route. `xfer.connect(route=xfer.Packed())` selects it.

    wire      descriptions of buckets, and their checks
    plan      assigns tensors to buckets by their sizes
    places    copies of boxes between storages and messages: arithmetic only
    buffer    packs into and unpacks from reused byte buffers
    agree     small collectives of the trainers
    source    one trainer rank's weights: the framework's stream, its plan, and when both are stale
    tensors   a stream that puts messages together from boxes that ranks hold
    lockstep  merges many small collectives of a framework's export into a few large ones
    feed      one gather for all replicas, overlapped with sending
    ahead     broadcasts, one ahead of the wait
    arrivals  a worker receives the next message while it loads the current one
    shared    messages between processes of one host, through shared memory or CUDA IPC
    sides     the session's interface to the route
    plane     one rank's part in one replica's refit
"""
