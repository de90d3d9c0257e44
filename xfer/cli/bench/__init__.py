"""`xfer bench`: refits of a user's model between processes of one host or several, timed beside their floor, every bit compared.

command      arguments and the table
run          has the processes started, tells them what to do, and collects the result
hosts        several hosts: the first one has the others start processes, and hands orders on to them
rank         one such process: a trainer rank or an engine worker
synthetic    storages with the true layouts and made-up bytes, as a trainer's and an engine's adapter
"""
