"""`python -m surgery`, and so `accelerate launch -m surgery`."""

from surgery.cli import main

if __name__ == "__main__":
    main()
