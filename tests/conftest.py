"""No test reads or writes what the user's compiles keep on disk; those of the cache name folders of their own."""

from __future__ import annotations

import os

import pytest

os.environ["RLX_CACHE"] = "0"  # also of the processes that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="ranks that tests/test_ranks_shm.py kills at random moments")
    parser.addoption("--collectives", type=int, default=300, help="random ones of tests/test_collectives.py, over each transport")
