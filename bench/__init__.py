"""Benchmarks; installed as `gpucoll.bench`."""
