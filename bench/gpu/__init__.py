"""Benchmarks that need a GPU."""
