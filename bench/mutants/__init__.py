"""Mutation testing of the core modules: `python -m bench.mutants`. paper/RELIABILITY.md has the results.

A mutant is a module with one small change, such as `<` instead of `<=`. The unit tests of that module have to fail on
it. A mutant on which they pass has survived, and shows a line whose result no test checks.
"""
