"""How many examples a property test tries."""

import os

EXAMPLES = max(1, int(os.environ.get("XFER_EXAMPLES", "50")))
"""CI's number. The wide matrix takes 200, and searches take thousands by hand. A test whose examples take long takes a part of them."""
FIXED = "XFER_EXAMPLES" not in os.environ
"""Whether a test of orders of events takes the same examples in every run, which CI does. Other orders are searched by hand."""
