"""`xfer doctor`: checks of one machine, and of the network between several, before a job.

facts.py has what one process sees and what was measured; look.py reads it. addresses.py tells which interfaces gloo and NCCL
choose. checks.py turns all of it into findings and does no I/O. meeting.py brings the processes together, visits.py measures between two
of them, cli/line.py has their connections. page.py prints, command.py has the arguments.
"""
