"""Marks of tests."""

import os

import pytest

from tests.support.proc import PYTHON

BOTH = pytest.mark.skipif(
    not all(map(os.path.exists, PYTHON.values())), reason="needs both environments: scripts/setup.sh has not been run"
)
