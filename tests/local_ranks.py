"""Ranks as threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.driver import LocalTransport


def on_ranks(ranks: int, run: Callable[[LocalTransport], Any], heap_size: int = 1 << 20, timeout: float = 60) -> list[Any]:
    """The results of `run` with the transport of each rank. The first error that is not another's consequence is raised."""

    def one(transport: LocalTransport) -> Any:
        try:
            return run(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, t) for t in LocalTransport.fan_out(ranks, heap_size, timeout)]
    errors = [e for f in futures if (e := f.exception())]
    if errors:
        raise min(errors, key=lambda e: "left" in str(e))
    return [f.result() for f in futures]
