"""Python with rlx on an emulated processor: aarch64 by qemu's user mode, on x86-64 Linux of the Debian family, or with AMX.

    python -m tests.emulated                                          # all of conformance on the CPU: ten minutes on one core
    python -m tests.emulated --cpu cortex-a76 -m pytest tests/test_cpu_contract.py -k bytes
    python -m tests.emulated --amx -m pytest -q tests/test_cpu_attention.py       # this processor with AMX: emulated_amx.py

The emulator and an aarch64 Python are Debian packages, numpy and llvmlite are aarch64 wheels. They are unpacked to build/aarch64
once and not installed: no right to do so is needed, and nothing else of the system changes. Code is made by the product's own
compiler on the emulated processor, linked, and run by several threads there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TOP = Path(__file__).parents[1]
FOLDER = TOP / "build" / "aarch64"
EMULATOR = "qemu-user-static:amd64"
SYSTEM = ("python3", "libstdc++6")  # and the packages that they need
WHEELS = ("numpy", "llvmlite", "ml_dtypes", "typer", "rich", "pytest", "hypothesis")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


class Unavailable(Exception):
    """The packages cannot be had on this machine."""


@dataclass(frozen=True)
class Emulated:
    emulator: Path
    python: Path

    def command(self, *args: str, cpu: str = "max") -> list[str]:
        return [str(self.emulator), "-cpu", cpu, "-L", str(FOLDER / "root"), str(self.python), *args]

    def environment(self) -> dict[str, str]:
        places = TOP, TOP / "tests", FOLDER / "site"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "RLX_", "VIRTUAL_ENV"))}
        return {**kept, "PYTHONPATH": os.pathsep.join(map(str, places)), "RLX_CACHE_DIR": str(FOLDER / "cache")}


def emulated() -> Emulated:
    """The emulated Python, which is made if it is not there. Unavailable: why not."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable("the emulator's packages are for x86-64 Linux")
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise Unavailable(f"there is no {missing[0]} to fetch Debian's packages with")
    if not (FOLDER / "complete").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        _packages(FOLDER / "packages")
        _wheels(FOLDER / "wheels")
        (FOLDER / "complete").touch()
    return _found()


def _found() -> Emulated:
    """The programs among the unpacked packages."""
    emulators = sorted((FOLDER / "root" / "usr" / "bin").glob("qemu-aarch64*"))
    pythons = [p for p in (FOLDER / "root" / "usr" / "bin").glob("python3.*") if p.suffix[1:].isdigit()]
    if not emulators or not pythons:
        raise Unavailable("the packages have no qemu-aarch64, or no Python")
    return Emulated(next((p for p in emulators if "_be" not in p.name), emulators[0]), pythons[0])


def _packages(folder: Path) -> None:
    """Debian's packages of the emulator and the Python, unpacked to `root`; apt's lists and files are kept in `folder`."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "APT::Sandbox::User": "", "Debug::NoLocking": "1",
        "Dir::State::Lists": str(folder / "lists"), "Dir::State::status": "/dev/null", "Dir::Cache": str(folder / "cache"),
    }  # fmt: skip
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in settings.items()), "-oAPT::Architectures::=amd64", "--quiet"]
    _run(*apt, "update")
    _run(*apt, "install", "--yes", "--download-only", "--no-install-recommends", *SYSTEM, EMULATOR)
    for package in (folder / "cache" / "archives").glob("*.deb"):
        if not package.name.endswith("_amd64.deb"):
            _run("dpkg-deb", "--extract", str(package), str(FOLDER / "root"))
        elif package.name.startswith("qemu"):  # of a hundred emulators the first, and no more is unpacked
            (FOLDER / "root" / "usr" / "bin").mkdir(parents=True, exist_ok=True)
            pipe = 'dpkg-deb --fsys-tarfile "$0" | tar -xC "$1" --occurrence --wildcards "./usr/bin/qemu-aarch64*"'
            _run("sh", "-c", pipe, str(package), str(FOLDER / "root"))
    shutil.rmtree(folder)


def _wheels(folder: Path) -> None:
    version = _found().python.suffix.removeprefix(".")
    tags = [f"--platform={name}" for name in PLATFORMS]
    _run(
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", *tags,
        f"--python-version=3.{version}", "--implementation=cp", f"--dest={folder}", *WHEELS,
    )  # fmt: skip
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(FOLDER / "site")
    shutil.rmtree(folder)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Unavailable(f"{Path(command[0]).name} {command[-1]} failed: {' '.join(last)}")


def with_amx(*args: str) -> NoReturn:
    sys.path.insert(0, str(TOP / "tests"))
    import emulated_amx

    if why := emulated_amx.lacking():
        raise Unavailable(why)
    done = subprocess.run(emulated_amx.command(*args), env=emulated_amx.environment(), cwd=TOP, check=False)
    raise SystemExit(done.returncode)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cpu", default="max", help="as qemu-aarch64 calls it: max has bf16, i8mm, dotprod and fullfp16")
    options.add_argument("--amx", action="store_true", help="this processor, which needs AVX-512, with an emulated AMX")
    given, args = options.parse_known_args()
    args = args or ["-m", "tests.conformance", "--device", "cpu"]
    if given.amx:
        with_amx(*args)
    here = emulated()
    raise SystemExit(subprocess.run(here.command(*args, cpu=given.cpu), env=here.environment(), cwd=TOP, check=False).returncode)


if __name__ == "__main__":
    main()
