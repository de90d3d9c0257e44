"""The coordinator: membership, plans, links and the two-phase commit of one job, as a state machine without I/O.

`Coordinator.handle(event, now)` takes an event and returns effects. It opens no socket, starts no thread, reads no clock
and does not import torch, so a test can drive it with a fake clock through any order of events. The rendezvous server
(rendezvous/server.py) connects it to sockets.

    messages     all control messages and their coding
    events       events, effects and timers
    coordinator  membership, and the handler of each message
    state        clients, replicas and their phases, the store, the options of the job, the rules of admission
    planning     how a replica gets a plan and a data link; how trainers take their storages back
    layouts      which rank needs which layout, each sent once; their coding
    refits       the queue of refits: prepared, running, finished
    refit        what a refit and a first copy share; one refit: trainers enter, drain and are ready; replicas begin
    commit       one replica in a refit: its phases, the decision, the way back
    first_copy   the first weights of a replica that joins, from another one
    relays       chains and rings of replicas that read from each other
    rolling      replicas that take turns
    failures     what ends when a process reports an error
    exports      whether training reaches the engines
    deadlines    all waits beyond the caller's deadline
    status       texts for people: `xfer status`, log lines, rejected connections
"""
