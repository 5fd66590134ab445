"""Figures of a run.

Each function takes plain values, writes `NAME.png`, `NAME.svg` and the numbers as `NAME.csv` into a folder, and returns
the three paths. Equal values give equal bytes.
"""
