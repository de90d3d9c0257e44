"""Traces of the frameworks' own code: they say which box of a checkpoint tensor lies where in which storage."""
