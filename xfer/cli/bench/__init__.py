"""`xfer bench`: refits of a user's model between processes of this host, timed beside their floor, every bit compared.

command      arguments and the table
run          starts the processes, tells them what to do, and collects the result
rank         one such process: a trainer rank or an engine worker
synthetic    storages with the true layouts and made-up bytes, as a trainer's and an engine's adapter
"""
