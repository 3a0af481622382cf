"""``python -m sgdol`` is the command line ``sgdol``."""

from sgdol.cli import main

if __name__ == "__main__":
    main()
