"""Mutated inputs for every command: `python -m bench.fuzz --seed 0 --cases 2000`. paper/RELIABILITY.md has the results.

A case is a function of (seed, number): a folder with mutated files and one command. It runs in a forked child and is
checked for tracebacks, hangs, executed code, half-written output, changed inputs and writes outside its own folder.
"""
