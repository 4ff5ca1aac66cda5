"""The conformance suite on a GPU under NVIDIA's compute-sanitizer, as much of it as there is time for.

    python -m tests.cuda_sanitizer memcheck
    python -m tests.cuda_sanitizer racecheck --seconds 60 --part 2/4      # every fourth check, from the second on
    python -m tests.cuda_sanitizer initcheck --only "op soft"

initcheck reports what a kernel reads and nobody has written: for it the arena is not cleared, as it is otherwise. It leaves out
the checks of lengths: tiles of a product read whole, also rows past the active extent, and drop what comes of these.
The checks that time left out are named. The exit status is 1 if the sanitizer finds anything or a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where the tests' modules find one another

INSIDE = "RLX_SANITIZED"  # set in the process that the sanitizer watches
FOUND = 9


def leave_undefined() -> None:
    """Memory that runs must write before they read it is left as it comes. States, counters and statuses begin at zero."""
    from rlx.backends.cuda import gpu
    from rlx.driver import arena

    clearing, made, plain = gpu.Gpu.allocate, arena.Arena.__init__, []

    def allocate(self: gpu.Gpu, nbytes: int) -> int:
        if not plain:
            return clearing(self, nbytes)
        return int(gpu.check(self.driver.cuMemAlloc(max(1, nbytes)), "allocating"))

    def undefined(self: arena.Arena, *given: object) -> None:
        plain.append(True)
        try:
            made(self, *given)  # type: ignore[arg-type]
        finally:
            plain.clear()

    gpu.Gpu.allocate, arena.Arena.__init__ = allocate, undefined  # type: ignore[method-assign]


def watched(options: argparse.Namespace) -> None:
    """The checks, in the process that the sanitizer watches."""
    import device_conformance as conformance

    from rlx.backends.cuda import gpu

    end, failed = time.monotonic() + options.seconds, 0
    if options.tool == "initcheck":
        leave_undefined()
        conformance.poison = lambda compiled: None  # it writes to all of it
    number, parts = map(int, options.part.split("/"))
    padded = "length" if options.tool == "initcheck" else "no check"
    checks = [(n, check) for n, check in conformance.checks("cuda") if options.only in n and not n.startswith(padded)]
    chosen = checks[number - 1 :: parts]
    left = list(chosen)
    while left and time.monotonic() < end:
        name, check = left.pop(0)
        try:
            check()
            gpu.gpu(0).wait()
        except Exception as e:  # noqa: BLE001  it is reported
            failed += 1
            print(f"{name}: {type(e).__name__}: {str(e).strip()[:500]}", flush=True)
    print(f"{options.tool}: {len(chosen) - len(left) - failed} of {len(chosen)} checks pass; no time for {len(left)}", flush=True)
    print(*(f"    {name}" for name, _ in left), sep="\n", flush=True)
    raise SystemExit(bool(failed) or len(left) == len(chosen))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    options.add_argument("--seconds", type=float, default=3600.0, help="for the checks; one that has begun is finished")
    options.add_argument("--part", default="1/1", help="I/N: every N-th check, from the I-th on")
    options.add_argument("--only", default="", help="checks with this in their name")
    given = options.parse_args()
    if INSIDE in os.environ:
        watched(given)
    command = ["compute-sanitizer", "--tool", given.tool, "--error-exitcode", str(FOUND), "--print-limit", "200"]
    command += ["--check-api-memory-access", "no"] * (given.tool == "initcheck")  # outputs of buckets are read with their padding
    again = [sys.executable, "-m", "tests.cuda_sanitizer", *sys.argv[1:]]
    raise SystemExit(subprocess.run([*command, *again], env={**os.environ, INSIDE: "1"}).returncode)


if __name__ == "__main__":
    main()
