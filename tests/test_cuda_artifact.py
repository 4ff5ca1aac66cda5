"""Artifact files of CUDA programs, on a driver without a GPU (fake_cuda)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeDriver

import rlx
from rlx.backends.cuda import backend
from rlx.errors import DeviceUnavailableError

F = np.float32


def test_an_artifact_file_brings_cubins_and_weights(driver: FakeDriver, tmp_path: Path) -> None:
    g = rlx.Graph("net")
    x, total = g.input("x", (3, 5), rlx.f32), g.handle(rlx.BufferHandle("total", (3, 4), rlx.f32))
    y = rlx.relu(x @ g.param("w", (5, 4), rlx.f32)) + total
    g.assign(total, y)
    g.set_outputs([y])
    w, given = np.linspace(-1, 1, 20, dtype=F).reshape(5, 4), np.arange(15, dtype=F).reshape(3, 5)
    both = [rlx.Session(device).compile(g) for device in ("cuda", "cpu")]
    for compiled in both:
        compiled.set_param("w", w)
    rlx.save(tmp_path / "net.rlx", both)
    found = rlx.load(tmp_path / "net.rlx")
    assert found.device.name == "cuda" and found.missing_params() == []
    for _ in range(2):
        assert (found.run({"x": given})[0] == both[0].run({"x": given})[0]).all()
    found.set_param("w", -w)
    both[0].set_param("w", -w)
    assert (found.run({"x": given})[0] == both[0].run({"x": given})[0]).all()
    here = rlx.load(tmp_path / "net.rlx", device="cpu")
    assert (here.run({"x": given})[0] == both[1].run({"x": given})[0]).all()


def test_code_for_another_gpu_is_refused(driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("plus")
    g.set_outputs([g.input("x", (64,), "f32") + 1.0])
    rlx.Session("cuda").compile(g).save(tmp_path / "plus.rlx", weights=False)
    real = backend.CudaBackend.target
    newer = lambda self, *how: replace(real(self, *how), features=("sm_100a",))  # noqa: E731
    monkeypatch.setattr(backend.CudaBackend, "target", newer)
    with pytest.raises(DeviceUnavailableError, match=r"program 'plus' needs sm_\w+, which CUDA of this machine lacks"):
        rlx.load(tmp_path / "plus.rlx")
