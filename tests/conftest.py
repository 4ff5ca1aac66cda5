"""No test reads or writes what the user's compiles keep on disk; those of the cache name folders of their own."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

os.environ["RLX_CACHE"] = "0"  # also of the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Shells ignore SIGINT in the background jobs of a script, and every process started from there would: tests send it to some.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are drawn and run in no time on one machine and not on another: that is no fault of a test.
settings.register_profile("rlx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="ranks that tests/test_ranks_shm.py kills at random moments")
    parser.addoption("--collectives", type=int, default=300, help="random ones of tests/test_collectives.py, over each transport")
