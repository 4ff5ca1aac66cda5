"""The weights of a language model where they lie: a Hugging Face folder or a GGUF file, read one param at a time.

In: a path, and the form in which matrices shall be kept. Out: a DecoderConfig, the format of each matrix, and for each param
of the network an array in that form. Nothing is read before it is asked for; what was read is given back to the system.
"""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, ModelError, known
from rlx.frontends.gguf import GgufFile, GgufTensor, read_gguf
from rlx.frontends.models.decoder import DecoderConfig, build
from rlx.frontends.models.families import config_of, config_of_gguf, param_name
from rlx.frontends.weights import model_path, read_json, read_weights
from rlx.ir.dtype import DTYPES, as_dtype
from rlx.ir.placement import Split
from rlx.ir.quant import FORMATS

FLOATS = ("f32", "bf16", "f16")
CHUNK = 1 << 18  # elements converted at once: bounds what that takes beside the result
KEPT = (*FLOATS, "int8", "int4")  # forms that weights can be brought into
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
_NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|\.attn_rot_embd\.")  # old files keep these constants


class Checkpoint:
    """`config`; `formats`: how each matrix will be kept, by param; `read(name)`: a param's array."""

    config: DecoderConfig
    gguf: GgufFile | None = None

    def __init__(self, path: str | Path, weights: str | None = None, ranks: int = 1, rank: int = 0) -> None:
        """`weights`: one of KEPT for every matrix; None: each as it is stored. `ranks`, `rank`: who shares the params that are
        read split, and who of them this is.

        Raises ModelError (CorruptFileError) saying what is missing, unsupported, or of the wrong shape.
        """
        self.path, self.weights, self.ranks, self.rank = model_path(path), weights, ranks, rank
        self.nbytes = 0  # of the files, read so far
        if weights is not None and weights not in KEPT:
            raise ModelError(f"weights={weights!r}: choose one of {known(KEPT)}, or None to keep them as stored")
        found = self._read_gguf() if self.path.is_file() else self._read_folder()
        if self.config.tied:
            found.pop("lm_head.weight", None)
        self._tensors = found
        self._mappings = {m for t in found.values() if (m := _mapping(t.data)) is not None}
        self.formats = {n: weights or _kept_as(t.type) for n, t in found.items() if len(t.shape) == 2 and "positions" not in n}
        self._parts = {name: [name] for name in found}  # param -> the tensors that it is made of, one below the other
        alike = self.config.num_key_value_heads % ranks == 0  # else keys and values are not shared as queries are
        for fused, parts in FUSED.items() if alike else list(FUSED.items())[1:]:
            for i in range(self.config.num_hidden_layers):
                prefix, _, joined = f"model.layers.{i}.{fused}".rpartition(".")
                self._fuse(f"{prefix}.{joined}", [f"{prefix}.{p}" for p in parts])
        self._check()

    def read(self, name: str, split: Split | None = None) -> np.ndarray:
        """The param in its declared dims and dtype; with `split`, what this rank holds of it, and nothing else is read."""
        form = self.formats.get(name, "f32")
        pieces = self._pieces(name, split)
        packed = FORMATS.get(form)
        if len(pieces) == 1 and pieces[0].type == form:
            self.nbytes += pieces[0].data.nbytes
            return np.ascontiguousarray(pieces[0].data)
        width = (packed.row_bytes(pieces[0].shape[-1]),) if packed else pieces[0].shape[1:]
        out, at = _empty((sum(t.shape[0] for t in pieces), *width), np.uint8 if packed else DTYPES[form].numpy), 0
        for t in pieces:
            step = max(1, CHUNK // max(1, math.prod(t.shape[1:])))
            for start in range(0, t.shape[0], step):
                rows = t.data[start : start + step]
                out[at : at + len(rows)] = _converted(rows, t, form)
                at += len(rows)
                self.nbytes += rows.nbytes
                self.release()
        return out

    def block(self, name: str) -> int:
        """Elements that stay together where rows of a param are cut: whole blocks as it is stored, and as it is kept."""
        forms = {self.formats.get(name, "f32"), *(self._tensors[part].type for part in self._parts[name])}
        return math.lcm(*(FORMATS[f].block for f in forms if f in FORMATS))

    def _pieces(self, name: str, split: Split | None) -> list[GgufTensor]:
        """Windows on the files that make up the param, or this rank's share of it, one below the other."""
        tensors = [self._tensors[part] for part in self._parts[name]]
        if split is None:
            return tensors
        if split.axis == 1:
            return [_columns(t, *(t.shape[1] * r // self.ranks for r in (self.rank, self.rank + 1))) for t in tensors]
        out = []
        for start, stop in split.ranges(self.ranks, self.rank):
            top = 0
            for t in tensors:
                low, high = max(start - top, 0), min(stop - top, t.shape[0])
                if low < high:
                    out.append(GgufTensor((high - low, *t.shape[1:]), t.type, t.data[low:high]))
                top += t.shape[0]
        return out

    def release(self) -> None:
        """Let the system take back the pages of the files that reads have brought into memory."""
        for mapped in self._mappings:
            mapped.madvise(mmap.MADV_DONTNEED)

    # -- files

    def _read_folder(self) -> dict[str, GgufTensor]:
        if not self.path.is_dir():
            raise ModelError(f"{self.path} is neither a folder with config.json and model.safetensors nor a .gguf file")
        self.config = config_of(read_json(self.path / "config.json"))
        found: dict[str, GgufTensor] = {}
        for name, array in read_weights(self.path).items():
            if _NO_WEIGHTS.search(name):
                continue
            if self.config.family == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
                array = array.T  # GPT-2 alone stores [in, out]
            found[param_name(name, self.config.family)] = GgufTensor(array.shape, as_dtype(array.dtype).name, array)
        return found

    def _read_gguf(self) -> dict[str, GgufTensor]:
        file = self.gguf = read_gguf(self.path)
        tensors = {n: t for n, t in file.tensors.items() if not _NO_WEIGHTS.search(n)}
        factors, table = tensors.pop("rope_freqs.weight", None), tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelError(f"{self.path} has no matrix token_embd.weight: it is no language model, or a part of one")
        names = {param_name(n, "") for n in tensors}
        self.config = config_of_gguf(file.metadata, names, table.shape[0], None if factors is None else factors.data)
        return {param_name(n, self.config.family): t for n, t in tensors.items()}

    # -- what the network asks for

    def _fuse(self, fused: str, parts: list[str]) -> None:
        """One matrix of several that are stored alike."""
        forms = {self.formats.get(f"{p}.weight") for p in parts}
        if len(forms) == 1 and None not in forms:
            self.formats[f"{fused}.weight"] = forms.pop() or ""
            for kind in ("weight", "bias"):
                if all(f"{p}.{kind}" in self._parts for p in parts):
                    self._parts[f"{fused}.{kind}"] = [f"{p}.{kind}" for p in parts]
                    for p in parts:
                        self._parts.pop(f"{p}.{kind}")
                        self.formats.pop(f"{p}.{kind}", None)

    def _check(self) -> None:
        """Every param of the network is there in its shape, and no tensor is left over."""
        try:
            params = build(self.config, 1, 1, 1, self.formats).params
        except KeyError as e:
            raise ModelError(f"{self.path}: the weights lack the tensor {e.args[0]!r}") from None
        names = [str(p.name) for p in params]
        if missing := [n for n in names if n not in self._parts]:
            raise ModelError(f"{self.path}: the weights lack {len(missing)} tensors: {known(missing)}")
        if unused := set(self._parts) - set(names):
            raise ModelError(f"{self.path}: {self.config.family} as built here has no use for the tensors {known(unused)}")
        for p in params:
            shapes = [self._tensors[part].shape for part in self._parts[str(p.name)]]
            form = self.formats.get(str(p.name), "f32")
            width = (FORMATS[form].row_bytes(shapes[0][-1]),) if form in FORMATS else shapes[0][1:]
            if len({s[1:] for s in shapes}) > 1 or (sum(s[0] for s in shapes), *width) != p.dims:
                raise CorruptFileError(f"{self.path}: {p.name!r} is {shapes}, the configuration asks for {p.shape}")
        if odd := {t.type for t in self._tensors.values()} - {*FORMATS, *FLOATS, "f64"}:
            raise ModelError(f"{self.path}: weights of the type {known(odd)} are not supported")


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose memory goes back to the system with it: malloc would keep a part of it for later."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), **private), dtype, math.prod(shape)).reshape(shape)


def _kept_as(stored: str) -> str:
    return stored if stored in FLOATS or stored in FORMATS else "f32"


def _converted(rows: np.ndarray, tensor: GgufTensor, form: str) -> np.ndarray:
    """Some rows of a tensor in another form: a float dtype, or packed."""
    if tensor.type == form:
        return rows
    floats = FORMATS[tensor.type].decode_rows(rows, tensor.shape[-1]) if tensor.type in FORMATS else rows
    return FORMATS[form].encode(floats) if form in FORMATS else floats.astype(DTYPES[form].numpy)


def _columns(t: GgufTensor, low: int, high: int) -> GgufTensor:
    """Some columns of a matrix, whole blocks where it is packed."""
    packed = FORMATS.get(t.type)
    at = [x // packed.block * packed.nbytes if packed else x for x in (low, high)]
    return GgufTensor((t.shape[0], high - low), t.type, t.data[:, at[0] : at[1]])


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array lies in."""
    base: object = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base
