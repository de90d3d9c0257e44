"""The rendezvous: bytes to messages and back, between the coordinator and the processes of a job. Nothing is ever unpickled."""
