"""The coordinator: membership, plans, links and the two-phase commit of one job, as a state machine without I/O.

`Coordinator.handle(event, now)` takes an event and returns effects. It opens no socket, starts no thread, reads no clock
and does not import torch, so a test can drive it with a fake clock through any order of events. The rendezvous server
(rendezvous/server.py) feeds it real connections.

    events       what can happen to it, and what it asks for
    coordinator  membership, and the handler of each message
    state        clients, replicas and their phases, the options of the job
    planning     how a replica gets a plan and a data link; how trainers take their storages back
    layouts      which rank needs which layout, each sent once
    refits       the queue of refits: prepared, running, finished
    refit        one refit: trainers enter, drain and are ready; replicas are let go
    commit       one replica's part in a refit: its phases, the decision, the way back
    relays       chains of replicas that read from each other
    keyvalue     the store in which communicators meet
    status       what `xfer status` shows
"""
