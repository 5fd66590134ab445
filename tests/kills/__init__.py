"""Every stage of a run, interrupted in every way at five moments: `python -m tests.kills`. docs/RELIABILITY.md.

A moment is the n-th event of a stage: a file opened for writing, a rename, a removal, a file of tensors half-written, a
tick of the progress. So it is the same in every run, without sleeping.
"""
