"""`python -m ds_parity`: the command line, also where its script is not on the path."""

from ds_parity.cli import main

main()
