"""Layouts of both sides on a host without GPUs, weights or peers, read by the frameworks' own code.

processes.py starts child.py in each framework's own Python; megatron.py and vllm.py build a rank there.
"""
