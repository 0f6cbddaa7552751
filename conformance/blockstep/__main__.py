"""`python -m blockstep`: the command line."""

from blockstep.conformance.command.main import main

if __name__ == "__main__":
    main()
