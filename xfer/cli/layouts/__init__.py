"""Layouts of both sides on a host without GPUs, weights or peers, read by the frameworks' own code.

processes.py starts child.py in each framework's own Python; trainers/megatron_ranks.py and engines/vllm_ranks.py build a rank there.
"""
