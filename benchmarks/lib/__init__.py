"""What the benchmarks share, and the processes that they start."""
