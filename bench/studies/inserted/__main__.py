"""`python -m bench.studies.inserted`."""

from bench.studies.inserted.study import main

if __name__ == "__main__":
    raise SystemExit(main())
