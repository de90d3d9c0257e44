"""In the path of processes that tests start under XFER_JITTER_CHILDREN=1 (jitter.py): their threads stop at random calls, too. Not
their main threads, which import the frameworks."""

import threading

from tests.support import jitter

threading.setprofile(jitter.stop)
