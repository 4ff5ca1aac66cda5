"""LLVM of another process: an emulated one, where LLVM would take ten times as long, has its kernels compiled by the host's.

The host runs `serving`, the emulated process `use`. Both have the same version of LLVM, which writes the same code for a machine
wherever it runs: the first module of a process is compiled in both, and compared. All else is done in the emulated process: the
kernels' text, the checks of it, the linker, the threads and the code itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory

from rlx.host import llvm

Machine = tuple[str, str, str]


@contextmanager
def serving() -> Iterator[str]:
    """The address of a compiler in threads of this process."""
    with TemporaryDirectory(prefix="rlx-llvm-") as folder:
        address, ending = str(Path(folder) / "socket"), threading.Event()
        with Listener(address, "AF_UNIX", backlog=llvm.SLOTS) as listener:
            server = threading.Thread(target=_serve, args=(listener, ending))
            server.start()
            try:
                yield address
            finally:
                ending.set()
                Client(address, "AF_UNIX").close()  # so that the last wait for a request ends
                server.join()


def _serve(listener: Listener, ending: threading.Event) -> None:
    """A thread for each request."""
    while True:
        connection = listener.accept()
        if ending.is_set():
            connection.close()
            return
        threading.Thread(target=_answer, args=(connection,)).start()


def _answer(connection: Connection) -> None:
    with connection, suppress(EOFError, BrokenPipeError):  # the process that asks has ended
        text, machine, assembly = connection.recv()
        try:
            connection.send((llvm.code(text, machine, assembly), ""))
        except llvm.Rejected as fault:
            connection.send((b"", str(fault)))


def use(address: str, version: str) -> None:
    """From now on this process compiles there, if its own compiler is of the same version."""
    if llvm.compiler_version() == version:
        llvm.code = _Remote(address)


class _Remote:
    def __init__(self, address: str) -> None:
        self._connect, self._own, self._compared = partial(Client, address, "AF_UNIX"), llvm.code, threading.Lock()

    def __call__(self, text: str, machine: Machine, assembly: bool = False) -> bytes:
        with self._connect() as connection:
            connection.send((text, machine, assembly))
            made, fault = connection.recv()
        if fault:
            raise llvm.Rejected(fault)
        if self._compared.acquire(blocking=False):  # the first time
            assert made == self._own(text, machine, assembly), "the host's LLVM writes other code for this machine"
        return made
