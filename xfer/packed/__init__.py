"""The packed route: whole checkpoint tensors, gathered in buckets, one message per bucket, loaded by the engine's own
`load_weights`.

For engines that cannot be traced, colocated engines that want whole tensors, and as the classic baseline. It shares the
session (versions, commit, errors, reports) with the direct route and is chosen by `xfer.connect(route=xfer.Packed())`.

    wire      what is said about a bucket, and how what was said is checked
    plan      which tensors go into which bucket, from sizes alone
    buffer    packing into and unpacking from reused byte buffers
    agree     the small collectives of the trainers
    megatron, tensors    what a trainer framework gives: tensors of one bucket at a time
    lockstep  many small collectives of a framework's own export as a few large ones
    feed      one gather for all replicas, overlapped with sending
    lane      one rank's part in one replica's refit
    vllm_model    a vLLM worker's model that is loaded
    shared    the same between processes of one host, through shared memory or CUDA IPC
    native    feeding vLLM's own weight transfer backends
"""
