"""Benchmarks of the delta-rule operator and of a training step: `make bench`, or `python -m benchmarks --help`.

Every program that is measured runs in a process of its own (worker.py) and is asked for one call at a time, in turn with the others, with a
matrix product of known size before each call. The peers live in an environment of their own (peers.py). This package is not installed.
"""
