"""The command ``sgdol``, and ``python -m sgdol``."""

from sgdol._interrupts import watch


def main() -> None:
    """The entry point. The command line is imported once Ctrl-C is taken care of: its imports take seconds."""
    watch()
    from sgdol.cli import main as run

    run()


if __name__ == "__main__":
    main()
