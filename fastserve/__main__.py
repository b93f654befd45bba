"""`python -m fastserve`: the command of that name."""

from fastserve.cli import main

main(prog_name="fastserve")
