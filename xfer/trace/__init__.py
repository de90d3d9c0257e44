"""Which box of which checkpoint tensor lies where in which storage, read from the frameworks' own code."""
