"""Benchmarks. Run one from a checkout as `python -m benchmarks.<name> --help`. Measured figures are in RESULTS.md.

Every module here is a command; `benchmarks.lib` holds what they share. Benchmarks that start a real vLLM on GPUs use the
harness of `tests/support`.
"""
