"""Makes torch's MKL use its fast kernels on AMD processors, where it picks slow ones by default, for fair comparisons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def mkl_on_amd() -> dict[str, str]:
    """Environment with a library that lets torch's MKL use its fast kernels on AMD processors, if there is a C compiler."""
    compiler = shutil.which("cc")
    if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text() or not compiler:
        return {}
    folder = Path(tempfile.gettempdir(), f"rlx-bench-mkl-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    source, library = folder / "mkl.c", folder / "libmkl_amd.so"
    if not library.exists():
        source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


def favour_amd() -> None:
    """Restart this program with that library."""
    if "RLX_BENCH_MKL" not in os.environ and (environment := mkl_on_amd()):
        os.environ.update(environment, RLX_BENCH_MKL="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
