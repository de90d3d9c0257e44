"""For all tests: property tests have no deadline per example, which a busy machine would miss. What they test is not speed."""

from hypothesis import settings

settings.register_profile("xfer", deadline=None)
settings.load_profile("xfer")
