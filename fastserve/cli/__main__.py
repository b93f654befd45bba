"""`python -m fastserve.cli` is `fastserve`, for where the script is not on PATH."""

from fastserve.cli import main

main(prog_name="fastserve")
