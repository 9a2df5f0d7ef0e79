"""Commands of the command line that are not training or planning; ``cli`` puts them under their names."""
