"""The rendezvous: messages over sockets between the coordinator and the processes of a job. Nothing is ever unpickled.

channel      addresses, the proof of the token, frames; a client's connection
server       the coordinator's connections, in trainer 0's process
client       a process's connection: inbox, questions and their answers, lanes, one `Done` for several lanes
layouts      the layouts of other ranks, fetched when needed
store        torch's Store over the connection
"""
