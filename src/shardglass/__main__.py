"""`python -m shardglass` is the command `shardglass`."""

from shardglass.cli import main

if __name__ == "__main__":
    main()
