"""The devices that tests run on: those that compute everywhere, and the one that RLX_DEVICE names, such as "cuda"."""

from __future__ import annotations

import os

ASKED = tuple(filter(None, [os.environ.get("RLX_DEVICE")]))
TWO = ("ref", "cpu", *ASKED)
DEVICES = ("ref", "ref:1", "cpu", *ASKED)
