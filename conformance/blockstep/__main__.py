"""The command line, as `python -m blockstep`."""

from blockstep.conformance.command.main import main

if __name__ == "__main__":
    main()
