"""Interrupt every stage of a run in every way at five moments: `python -m bench.kills`. paper/RELIABILITY.md.

A moment is the n-th event of a stage: a file opened for writing, a rename, a removal, a half-written tensor file, or a
step of the progress bar. It is therefore the same in every run, without sleeping.
"""
