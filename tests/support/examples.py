"""How many examples a property test tries."""

import os

USUAL = 50
EXAMPLES = max(1, int(os.environ.get("XFER_EXAMPLES", USUAL)))
"""CI's number. The wide matrix takes 200, and searches take thousands by hand. A test whose examples take long takes a part of them."""
FIXED = EXAMPLES <= USUAL
"""Whether property tests take the same examples in every run, which CI does. The wide matrix, and searches by hand, draw others."""
