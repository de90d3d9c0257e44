"""`python -m xfer.cli` is the `xfer` command, too."""

from xfer.cli import main

main()
