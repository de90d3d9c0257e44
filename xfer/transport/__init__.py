"""Bytes between processes: links (group.py), and a program that runs over them (steps.py, p2p.py)."""
