"""The way in: `kvledger` and `python -m ledger`. It imports nothing before it can answer an interrupt."""

import sys


def main() -> None:
    """Run the command line and end the process with its status, also when Ctrl-C comes while modules are loaded."""
    try:
        # Here and not above: the import takes a fifth of a second, in which nobody else would answer.
        from ledger.cli import commands  # noqa: PLC0415

        commands.main()
    except KeyboardInterrupt:
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - it is None after `2>&-`
            sys.stderr.write("kvledger: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
