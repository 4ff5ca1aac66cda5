"""No test reads or writes what the user's compiles keep on disk; those of the cache name folders of their own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import bytecode
import pytest
import shared_code
from hypothesis import HealthCheck, settings

os.environ["RLX_CACHE"] = "0"  # also of the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # no test uses the network
# Pools of torch and numpy spin while they wait, which takes the time of other tests; no test has work for more than one thread.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of a GPU that other processes of the tests use
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Shells ignore SIGINT in the background jobs of a script, and every process started from there would: tests send it to some.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are drawn and run in no time on one machine and not on another: that is no fault of a test.
settings.register_profile("rlx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlx")
# Hypothesis would parse every module of the package and of the tests in each process, for constants to draw: seconds, and other
# examples in a process that has imported other modules. The versions that do have this function.
if hasattr(found := sys.modules.get("hypothesis.internal.conjecture.providers"), "_local_constants"):
    setattr(found, "_get_local_constants", lambda: found._local_constants)  # noqa: B010  of no module

bytecode.share()
shared_code.share()

LONG = (  # files that take long, the longest first
    "ops", "language", "aarch64", "tensor_parallel", "cuda_chain", "experts", "cuda_kernels", "cuda", "padding", "cpu_attention",
    "cuda_residency", "ranks_mpi", "c_backend", "cli", "cpu_contract", "lines", "ranks_shm", "generated_code", "expert_budget",
    "cpu_amx", "cuda_shapes", "cuda_blocks", "expert_residency", "add_an_op_doc", "cuda_narrow", "generate", "limits",
    "kernel_texts", "convolution", "artifact_models", "launch", "vision_models", "cpu_conv", "boxes", "models", "cuda_factors",
    "tune", "onnx_backend", "cuda_scatter", "cuda_attention", "late_device", "cpu_quant", "forks", "cuda_lines", "memory", "int8",
    "verifying", "partition", "expert_pool", "image_functions", "language_experts", "crossing", "chat", "ops_reference", "size",
    "explain_command", "cpu_amx_results", "cpu_render", "plan_mutations", "cuda_executable", "cuda_experts", "onnx_models",
    "numbers", "collectives", "fuse", "groups", "text", "onnx_control", "package", "reductions", "calls", "graph_collectives",
    "cuda_decode", "docs", "c_style", "cuda_networks", "emulated_amx",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="ranks that tests/test_ranks_shm.py kills at random moments")
    parser.addoption("--collectives", type=int, default=300, help="random ones of tests/test_collectives.py, over each transport")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that the processes that share the files end at the same time."""
    place = {f"test_{name}.py": at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than CPUs: in tests of ranks and threads, processes wait for each other."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    bytecode.before_workers()


def pytest_collection(session: pytest.Session) -> None:
    """Objects that are imported and collected stay: looking for garbage among it would take a fifth of the time."""
    gc.disable()
    if (worker := getattr(session.config, "workerinput", None)) is not None:
        bytecode.import_part(int(worker["workerid"].removeprefix("gw")), worker["workercount"], session.config.args)


def pytest_collection_finish() -> None:
    bytecode.link_libraries()
    gc.freeze()
    # A compile makes many objects that live long: with the usual thresholds, the collections in tests take a twelfth of the time.
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    bytecode.remove()
    shared_code.remove()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Tests that collect garbage need not look at the objects of all modules, which takes half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM and NVRTC compile each text anew."""
    for module, (name, function) in shared_code.OWN.items():
        monkeypatch.setattr(module, name, function)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """A CUDA driver without a GPU, as that of this process."""
    from fake_cuda import FakeDriver, installed  # which needs the bindings

    made = FakeDriver()
    with installed(made, monkeypatch):
        yield made
