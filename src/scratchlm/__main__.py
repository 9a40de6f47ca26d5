"""`python -m scratchlm`: the command line, as `torchrun -m scratchlm` starts it."""

from scratchlm.cli import main

if __name__ == "__main__":
    main()
