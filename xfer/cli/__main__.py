"""Makes `python -m xfer.cli` the same as the `xfer` command."""

from xfer.cli import main

main()
