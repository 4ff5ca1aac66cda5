"""Time from process start to the first result: `python benchmarks/startup.py [--model resnet50] [--write]`.

The model is MiniLM-L6 for 1 x 16 tokens, or one of benchmarks/vision.py as an ONNX file that torch exports, which `rlx run`
starts as a user does. Engines: rlx (cold, from its disk cache, and from an artifact file), ONNX Runtime (from the model, and
from an optimised model it saved before), OpenVINO (cold, and from its cache) and CTranslate2 (from the model in its format).
Every start is a new process, and the engines alternate. The table has medians and, in parentheses, minima. First results are
compared. The time after the import includes all the work of a program that has a model's files: weights, graph or model file,
compile, and one run. Files are in the page cache. Memory is the peak of the process and of those that it starts. The install
size includes dependencies.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LENGTH = 16
ENGINES = {  # name -> (worker, whether it uses the cache of an earlier start, the package to measure)
    "rlx": ("rlx", False, "rlx"),
    "rlx, from its cache": ("rlx", True, "rlx"),
    "rlx, from an artifact file": ("artifact", False, "rlx"),
    "ONNX Runtime": ("onnxruntime", False, "onnxruntime"),
    "ONNX Runtime, optimised before": ("onnxruntime", True, "onnxruntime"),
    "OpenVINO": ("openvino", False, "openvino"),
    "OpenVINO, from its cache": ("openvino", True, "openvino"),
    "CTranslate2": ("ctranslate2", False, "ctranslate2"),
}
COMMANDS = {  # in place of the first three, for the networks of benchmarks/vision.py
    "rlx run": ("command", False, "rlx"),
    "rlx run, from its cache": ("command", True, "rlx"),
    "rlx run, an artifact file": ("artifact_command", False, "rlx"),
}
LATER = ("rlx, from its cache", "rlx, from an artifact file", *list(COMMANDS)[1:])  # starts that need no compiler
Start = Callable[[Path, int], tuple[Any, dict[str, float]]]


# -- one start, in a new process: nothing is imported before the clock runs ------------------------------------


def inputs(folder: Path) -> dict[str, Any]:
    import numpy as np

    return {f.stem: np.load(f) for f in sorted(folder.parent.glob("*.npy"))}


def start_rlx(folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    from rlx import Session
    from rlx.frontends.embedding import _read_config, default_folder, set_weights
    from rlx.frontends.models import bert
    from rlx.frontends.weights import read_weights

    imported = time.perf_counter()
    weights = read_weights(default_folder())
    graph = bert.build(_read_config(default_folder()), 1, LENGTH)
    compiled = Session(threads=threads).compile(graph)
    before = time.perf_counter()
    set_weights(compiled, weights)
    packed = time.perf_counter() - before
    (out,) = compiled.run(_masked(inputs(folder)))
    return out, {"import": imported - begun, "first": time.perf_counter() - imported, "weights": packed}


def _masked(found: dict[str, Any]) -> dict[str, Any]:
    """rlx's own network takes a mask of bools."""
    return {**found, "attention_mask": found["attention_mask"].astype("bool")}


def start_artifact(folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    import rlx

    load = rlx.load  # imports what a load needs first
    imported = time.perf_counter()
    compiled = load(folder.parent / "model.rlx", threads=threads)
    loaded = time.perf_counter()
    (out,) = compiled.run(_masked(inputs(folder)))
    ended = time.perf_counter()
    return out, {"import": imported - begun, "first": ended - imported, "load": loaded - imported}


def start_command(folder: Path, threads: int, file: str = "model.onnx") -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    from rlx.cli.main import run

    imported = time.perf_counter()
    given = [part for f in sorted(folder.parent.glob("*.npy")) for part in ("--input", f"{f.stem}={f}")]
    try:
        run(["run", str(folder.parent / file), *given, "--output", str(folder / "results"), "--threads", str(threads)])
    except SystemExit as e:
        assert not e.code
    ended = time.perf_counter()
    import numpy as np

    return np.load(next((folder / "results").iterdir())), {"import": imported - begun, "first": ended - imported}


def start_onnxruntime(folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    import onnxruntime as ort

    imported = time.perf_counter()
    options, made = ort.SessionOptions(), folder / "optimised.onnx"
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if made.exists():
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    elif folder.name == "kept":
        options.optimized_model_filepath = str(made)
    path = made if made.exists() else folder.parent / "model.onnx"
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, inputs(folder))
    return out, {"import": imported - begun, "first": time.perf_counter() - imported}


def start_openvino(folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    import openvino as ov

    imported = time.perf_counter()
    core = ov.Core()
    how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    if folder.name == "kept":
        how["CACHE_DIR"] = str(folder / "openvino")
    compiled = core.compile_model(str(folder.parent / "model.onnx"), "CPU", how)
    out = next(iter(compiled(inputs(folder)).values()))
    return out, {"import": imported - begun, "first": time.perf_counter() - imported}


def start_ctranslate2(folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    begun = time.perf_counter()
    import ctranslate2

    imported = time.perf_counter()
    how: dict[str, Any] = {"device": "cpu", "intra_threads": threads, "compute_type": "float32"}
    encoder = ctranslate2.Encoder(str(folder.parent / "ctranslate2"), **how)
    import numpy as np

    ids = inputs(folder)["input_ids"]
    hidden = np.array(encoder.forward_batch(ids.tolist()).last_hidden_state).mean(axis=1)
    out = hidden / np.linalg.norm(hidden)  # the pooling that the other engines' graphs have
    return out, {"import": imported - begun, "first": time.perf_counter() - imported}


STARTS: dict[str, Start] = {
    "rlx": start_rlx, "artifact": start_artifact, "onnxruntime": start_onnxruntime, "openvino": start_openvino,
    "ctranslate2": start_ctranslate2, "command": start_command,
    "artifact_command": partial(start_command, file="model.rlx"),
}  # fmt: skip


def peak_bytes() -> int:
    """Peak memory of this process (that of getrusage includes the parent) and of the largest that it started and that ended."""
    with open("/proc/self/status") as f:
        own = int(next(line for line in f if line.startswith("VmHWM")).split()[1])
    return own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


# -- all of them ---------------------------------------------------------------------------------------------------


def one(engine: str, scratch: Path, threads: int) -> dict[str, Any]:
    worker, kept, _ = {**ENGINES, **COMMANDS}[engine]
    folder = scratch / ("kept" if kept else "fresh")
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "RLX_CACHE": "1", "RLX_CACHE_DIR": str(folder / "rlx"), "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: with compiled modules next to the sources
    environment["PYTHONPYCACHEPREFIX"] = str(scratch / "bytecode")
    command = [sys.executable, __file__, "--worker", worker, str(folder), "--threads", str(threads)]
    command += ["--begun", str(time.monotonic())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_encoder(place: Path, threads: int) -> None:
    """MiniLM-L6 as an ONNX model and as an artifact, and its inputs."""
    import numpy as np

    import rlx
    from benchmarks.encoder_onnx import onnx_model
    from rlx.frontends.embedding import set_weights
    from rlx.frontends.models import bert

    np.save(place / "input_ids.npy", np.arange(1000, 1000 + LENGTH, dtype=np.int32)[None])
    np.save(place / "attention_mask.npy", np.ones((1, LENGTH), np.int32))
    model = rlx.models.load(rlx.models.default_folder())
    made = onnx_model(model.config, model.weights, (1, LENGTH), False).SerializeToString()
    (place / "model.onnx").write_bytes(made)
    compiled = rlx.Session(threads=threads).compile(bert.build(model.config, 1, LENGTH))
    set_weights(compiled, model.weights)
    compiled.save(place / "model.rlx")
    if _installed("ctranslate2"):  # its converter reads the model with torch and transformers
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(rlx.models.default_folder())).convert(str(place / "ctranslate2"))


def write_vision(place: Path, threads: int, name: str) -> None:
    """A network for images, of one image, as write_encoder."""
    import numpy as np
    import onnx

    import rlx
    from benchmarks.vision import SHAPES, Task

    task = Task(name, 1, int(SHAPES[name][0].partition("x")[2]), threads)
    np.save(place / "image.npy", task.image)
    onnx.save(task.exported, place / "model.onnx")
    net = rlx.load(place / "model.onnx", session=rlx.Session(threads=threads))
    net.save(place / "model.rlx", {"image": task.image})


def install_bytes(*packages: str) -> int:
    """Size of the files of packages and of their dependencies, where these are installed."""
    todo, seen, total = [*packages], set(), 0
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        needs: list[str] = []
        if name == "rlx":
            total += sum(p.stat().st_size for p in (ROOT / "rlx").rglob("*.py"))
            import tomllib

            needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        elif _installed(name):
            files = importlib.metadata.files(name) or []
            total += sum(p.stat().st_size for f in files if f.suffix != ".pyc" and (p := Path(str(f.locate()))).is_file())
            needs = [r for r in importlib.metadata.requires(name) or [] if "extra ==" not in r and "platform" not in r]
        todo += [re.split(r"[\s<>=!~;\[(]", r, maxsplit=1)[0] for r in needs]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    parser.add_argument("--model", default="minilm", help="minilm, or a network of benchmarks/vision.py")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        out, seconds = STARTS[args.worker[0]](Path(args.worker[1]), args.threads)
        seconds |= {"all": time.monotonic() - args.begun, "CPU": time.process_time()}
        said = {**seconds, "peak": peak_bytes(), "first values": [float(v) for v in out.reshape(-1)[:8]]}
        print(json.dumps({**said, "compiler": "libllvmlite" in Path("/proc/self/maps").read_text()}))
        return
    from benchmarks.measure import append, header
    from benchmarks.vision import SHAPES

    if args.model not in ("minilm", *SHAPES):
        parser.error(f"--model {args.model}: choose minilm, {', '.join(SHAPES)}")
    encoder = args.model == "minilm"
    found = {e: about for e, about in ENGINES.items() if encoder or about[2] not in ("rlx", "ctranslate2")}
    found = found if encoder else {**COMMANDS, **found}
    engines = [e for e, (_, _, package) in found.items() if package == "rlx" or _installed(package)]
    with tempfile.TemporaryDirectory() as place:
        write_encoder(Path(place), args.threads) if encoder else write_vision(Path(place), args.threads, args.model)
        for engine in engines:  # fills the caches for later starts
            one(engine, Path(place), args.threads)
        runs: dict[str, list[dict[str, Any]]] = {e: [] for e in engines}
        for _ in range(args.rounds):
            for engine in engines:
                runs[engine].append(one(engine, Path(place), args.threads))
    about = header(*(p for p in ("onnxruntime", "openvino", "ctranslate2", "llvmlite") if _installed(p)))
    parts = ("of it setting weights", "of it the load") if encoder else ()
    columns = ["start", "import, ms", "first result after it, ms", *parts, "process start to it, ms"]
    columns += ["CPU time, ms", "peak memory, MB", "install, MB"]
    rows = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *(_row(engine, runs, bool(parts)) for engine in engines)]
    print(about, *rows, sep="\n")
    if args.write:
        command = f"`python benchmarks/startup.py --model {args.model} --threads {args.threads}`"
        append(f"Start to first result, {time.strftime('%Y-%m-%d')}, {command}", about, rows)


def _row(engine: str, runs: dict[str, list[dict[str, Any]]], parts: bool) -> str:
    """A table row of medians. SystemExit: its result differs from that of rlx."""
    found, want = runs[engine], next(iter(runs.values()))[0]["first values"]
    apart = max(abs(a - b) for run in found for a, b in zip(run["first values"], want))
    if apart > 1e-4 * max(1.0, *map(abs, want)):
        raise SystemExit(f"{engine}: the first result is {apart} from that of rlx")
    if engine in LATER and any(run["compiler"] for run in found):
        raise SystemExit("a start from a file loaded the compiler")
    cells = []
    for phase in ("import", "first", *(("weights", "load") if parts else ()), "all", "CPU"):
        times = [run[phase] * 1e3 for run in found if phase in run]
        cells.append(f"{statistics.median(times):.0f} ({min(times):.0f})" if times else "")
    peak = statistics.median(run["peak"] for run in found)
    size = install_bytes(*(("rlx", "onnx") if engine in COMMANDS else (ENGINES[engine][2],)))
    return f"| {engine} | {' | '.join(cells)} | {peak / 1e6:.0f} | {size / 1e6:.0f} |"


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
