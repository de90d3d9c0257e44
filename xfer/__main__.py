"""`python -m xfer` is the `xfer` command."""

from xfer.cli import main

main()
