"""No test reads or writes what the user's compiles keep on disk; those of the cache name folders of their own."""

from __future__ import annotations

import os

os.environ["RLX_CACHE"] = "0"  # also of the processes that tests start
