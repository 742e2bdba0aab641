"""Benchmarks: `python -m bench` or one of its modules. Ratios measured side by side, written to bench/results/."""
