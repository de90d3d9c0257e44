"""Bytes between processes: links (group.py), a program run over one (steps.py, p2p.py), and the oracle (golden.py)."""
