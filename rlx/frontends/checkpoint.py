"""The weights of a language model on disk: a Hugging Face folder or a GGUF file, read one param at a time.

In: a path, and the wanted format of matrices. Out: a DecoderConfig, the format of each matrix, and for each param of the network
an array in that format. Params are read on demand; `release` returns the file pages to the system.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, ModelError, known, placed_at
from rlx.frontends.gguf import GgufFile, GgufTensor, read_gguf
from rlx.frontends.hub import model_path
from rlx.frontends.models.decoder import DecoderConfig, build
from rlx.frontends.models.families import config_of, config_of_gguf, param_name
from rlx.frontends.scaled import Scaled, block_of, with_factors
from rlx.frontends.weights import read_json, read_weights
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DTYPES, as_dtype
from rlx.ir.placement import Split
from rlx.runtime import in_memory, map_of

FLOATS = ("f32", "bf16", "f16")
CHUNK = 1 << 18  # elements converted at once: bounds the temporary memory
KEPT = (*FLOATS, "int8", "int4")  # formats that weights can be converted to
HALVES = ("gate_proj", "up_proj")
FUSED = (  # params, and the projections that form them if those have one format
    ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp.gate_up_proj", HALVES),
    ("mlp.shared_experts.gate_up_proj", HALVES), ("self_attn.qkv_a_proj", ("q_proj", "kv_a_proj_with_mqa")),
    ("self_attn.qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)  # fmt: skip
BY_HEAD = ("k_b_proj", "v_b_proj")  # projections of latents, one matrix for each head
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|\.attn_rot_embd\.")  # constants in old files


class Checkpoint:
    """`config`; `formats`: format of each matrix in memory, by param; `read(name)`: a param's array. `tensors`: of the files, by
    name as params are called; `parts`: the tensors that form each param."""

    config: DecoderConfig
    gguf: GgufFile | None = None

    def __init__(self, path: str | Path, weights: str | None = None, ranks: int = 1, rank: int = 0) -> None:
        """`weights`: one of KEPT for every matrix; None: each as in the file. `ranks`, `rank`: number of ranks that share split
        params, and the number of this one.

        Raises ModelError (CorruptFileError) saying what is missing, unsupported, or of the wrong shape.
        """
        self.path, self.weights, self.ranks, self.rank = model_path(path), weights, ranks, rank
        self.nbytes = 0  # bytes of the files read so far
        if weights is not None and (not isinstance(weights, str) or weights not in KEPT):
            raise ModelError(f"weights={weights!r}: choose one of {known(KEPT)}, or None to keep them as stored")
        found = self._read_gguf() if self.path.is_file() else self._read_folder()
        if self.config.tied:
            found.pop("lm_head.weight", None)
        over = (t.data.data if isinstance(t.data, Scaled) else t.data for t in found.values())
        self._mappings = {m for array in over if (m := map_of(array)) is not None}
        self._turned: set[str] = set()  # tensors whose data is that of the transposed matrix
        self.tensors = {n: t for name, tensor in found.items() for n, t in self._apart(name, tensor)}
        self.formats = {n: self._format(n, t) for n, t in self.tensors.items() if len(t.shape) == 2 and "positions" not in n}
        self.parts = {name: [name] for name in self.tensors}  # param -> the tensors concatenated along rows to form it
        alike = self.config.num_key_value_heads % ranks == 0  # else keys and values are split differently from queries
        for i in range(self.config.num_hidden_layers):
            for fused, parts in FUSED if alike else FUSED[1:]:
                prefix, _, joined = f"model.layers.{i}.{fused}".rpartition(".")
                self._fuse(f"{prefix}.{joined}", [f"{prefix}.{p}" for p in parts])
            self._fuse_many(f"model.layers.{i}")
        self._check()

    def read(self, name: str, split: Split | None = None) -> np.ndarray:
        """The param in its declared dims and dtype; with `split`, only this rank's share is read."""
        return self._joined(self._pieces(name, split), self.formats.get(name, "f32"))

    def read_expert(self, name: str, expert: int) -> np.ndarray:
        """The rows of one expert in a param of all of a layer's experts, as `read` gives them; no other expert is read."""
        experts, parts = self.config.experts, self.parts[name]
        if experts is None or ".experts." not in name:
            raise ModelError(f"{self.path}: {name!r} is not a param of experts")
        each = len(parts) // experts.count
        return self._joined([self._tensor(part) for part in parts[expert * each : (expert + 1) * each]], self.formats[name])

    def _joined(self, pieces: list[GgufTensor], form: str) -> np.ndarray:
        """The pieces, concatenated along rows in one format."""
        packed = FORMATS.get(form)
        if len(pieces) == 1 and pieces[0].type == form:
            self.nbytes += pieces[0].data.nbytes
            return in_memory(pieces[0].data)
        width = (packed.row_bytes(pieces[0].shape[-1]),) if packed else pieces[0].shape[1:]
        out, at = _empty((sum(t.shape[0] for t in pieces), *width), np.uint8 if packed else DTYPES[form].numpy), 0
        for t in pieces:
            step = max(1, CHUNK // max(1, math.prod(t.shape[1:])))
            for start in range(0, t.shape[0], step):
                piece = t.data[start : start + step]
                # not by the mapping: a truncated file is an error then
                rows = piece.decoded() if isinstance(piece, Scaled) else in_memory(piece)
                out[at : at + len(rows)] = _converted(rows, t, form)
                at += len(rows)
                self.nbytes += piece.nbytes
        return out

    def block(self, name: str) -> int:
        """The granularity for splitting rows of a param, in elements: whole blocks of its format in the file and in memory."""
        forms = {self.formats.get(name, "f32"), *(self.tensors[part].type for part in self.parts[name])}
        return math.lcm(*(FORMATS[f].block for f in forms if f in FORMATS))

    def _pieces(self, name: str, split: Split | None) -> list[GgufTensor]:
        """Views of the files that form the param, or this rank's share of it, when concatenated along rows."""
        tensors = [self._tensor(part) for part in self.parts[name]]
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

    def _tensor(self, part: str) -> GgufTensor:
        t = self.tensors[part]
        if part not in self._turned:
            return t
        t = _plain(t)
        rows = FORMATS[t.type].decode_rows(in_memory(t.data), t.shape[0]) if t.type in FORMATS else t.data
        return GgufTensor(t.shape, "f32" if t.type in FORMATS else t.type, rows.T)

    def arrays(self, name: str) -> Iterator[np.ndarray]:
        """Those over the files that form the param."""
        for data in (self.tensors[part].data for part in self.parts[name]):
            yield from (data.data, data.factors) if isinstance(data, Scaled) else (data,)

    def release(self) -> None:
        """Release the pages of the mapped files that reads have loaded into memory."""
        for mapped in self._mappings:
            mapped.madvise(mmap.MADV_DONTNEED)

    # -- files

    def _read_folder(self) -> dict[str, GgufTensor]:
        if not self.path.is_dir():
            raise ModelError(f"{self.path} is neither a folder with config.json and model.safetensors nor a .gguf file")
        about = read_json(self.path / "config.json")
        with placed_at(self.path):
            self.config = config_of(about)
        more = about.get("num_nextn_predict_layers")  # layers that predict further tokens, after the network's own
        layers = range(self.config.num_hidden_layers, self.config.num_hidden_layers + more if type(more) is int else 0)
        found: dict[str, GgufTensor] = {}
        for name, array in with_factors(read_weights(self.path), block_of(about), self.path).items():
            if _NO_WEIGHTS.search(name) or ((of := _LAYER.match(name)) and int(of[1]) in layers):
                continue
            if self.config.family == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
                array = array.T  # GPT-2 alone stores [in, out]
            kind = "f8e4m3" if isinstance(array, Scaled) else as_dtype(array.dtype).name
            found[param_name(name, self.config.family)] = GgufTensor(array.shape, kind, array)
        return found

    def _read_gguf(self) -> dict[str, GgufTensor]:
        file = self.gguf = read_gguf(self.path)
        tensors = {n: t for n, t in file.tensors.items() if not _NO_WEIGHTS.search(n)}
        factors, table = tensors.pop("rope_freqs.weight", None), tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelError(f"{self.path} has no matrix token_embd.weight: it is no language model, or a part of one")
        names = {param_name(n, "") for n in tensors}
        with placed_at(self.path):
            self.config = config_of_gguf(file.metadata, names, table.shape[0], None if factors is None else factors.data)
        return {param_name(n, self.config.family): t for n, t in tensors.items()}

    # -- the params of the network

    def _apart(self, name: str, t: GgufTensor) -> Iterable[tuple[str, GgufTensor]]:
        """A tensor, as the parts of params: the experts and the heads that it has together, each on its own."""
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        if len(t.shape) == 3 and stem.endswith(".experts"):
            if (count := self.config.experts.count if self.config.experts else 0) != len(t.data):
                raise CorruptFileError(f"{self.path}: {name!r} has {len(t.data)} experts, the configuration says {count}")
            return [(f"{stem}.{e}.{part}.weight", GgufTensor(t.shape[1:], t.type, t.data[e])) for e in range(count)]
        if part == "kv_b_proj":
            return self._heads(stem, name, t)
        if len(t.shape) == 3 and part in BY_HEAD:
            rows = t.shape[0] * t.shape[1]
            return [(name, GgufTensor((rows, t.shape[2]), t.type, t.data.reshape(rows, t.data.shape[2])))]
        if part == "shared_expert_gate":
            t = _plain(t)
            return [(name, GgufTensor((math.prod(t.shape),), t.type, t.data.reshape(-1)))]
        return [(name, t)]

    def _heads(self, stem: str, name: str, t: GgufTensor) -> list[tuple[str, GgufTensor]]:
        """The projections of latents to the keys of each head, transposed so that queries are projected; and to the values."""
        m, heads, out = self.config.latent, self.config.num_attention_heads, []
        if m is None or t.shape != (heads * (m.plain + m.value), m.rank):
            raise CorruptFileError(f"{self.path}: {name!r} is {t.shape}, the configuration has other sizes of heads and latents")
        for head in range(heads):
            own = t.data[head * (m.plain + m.value) : (head + 1) * (m.plain + m.value)]
            key, value = (f"{stem}.{part}.{head}.weight" for part in BY_HEAD)
            self._turned.add(key)
            out += [(key, GgufTensor((m.rank, m.plain), t.type, own[: m.plain]))]
            out += [(value, GgufTensor((m.value, m.rank), t.type, own[m.plain :]))]
        return out

    def _format(self, name: str, t: GgufTensor) -> str:
        """In memory. A router stays as exact as it is: its choice is not to change. So do rows that must be packed again."""
        if name.endswith(".mlp.gate.weight"):
            return t.type if t.type in FLOATS else "f32"
        return self.weights or ("f32" if name in self._turned and t.type in FORMATS else _kept_as(t.type))

    def _fuse_many(self, layer: str) -> None:
        """The params of all experts, and of all heads, of a layer."""
        stem, experts = f"{layer}.mlp.experts", self.config.experts
        if experts is not None and f"{stem}.{experts.count - 1}.down_proj.weight" in self.formats:
            each = range(experts.count)
            self._fuse(f"{stem}.gate_up_proj", [f"{stem}.{e}.{half}" for e in each for half in HALVES])
            for part in ("gate_up_proj", "down_proj", *HALVES):
                self._fuse(f"{stem}.{part}", [f"{stem}.{e}.{part}" for e in each])
        if f"{layer}.self_attn.{BY_HEAD[0]}.0.weight" in self.formats:
            for part in BY_HEAD:
                heads = range(self.config.num_attention_heads)
                self._fuse(f"{layer}.self_attn.{part}", [f"{layer}.self_attn.{part}.{head}" for head in heads])

    def _fuse(self, fused: str, parts: list[str]) -> None:
        """Fuse several matrices of one format into one."""
        forms = {self.formats.get(f"{p}.weight") for p in parts}
        if len(forms) == 1 and None not in forms:
            self.formats[f"{fused}.weight"] = forms.pop() or ""
            for kind in ("weight", "bias"):
                if all(f"{p}.{kind}" in self.parts for p in parts):
                    self.parts[f"{fused}.{kind}"] = [f"{p}.{kind}" for p in parts]
                    for p in parts:
                        self.parts.pop(f"{p}.{kind}")
                        self.formats.pop(f"{p}.{kind}", None)

    def _check(self) -> None:
        """Check that every param of the network is present with its shape, and that no tensor is unused."""
        try:
            params = build(self.config, 1, 1, 1, self.formats).params
        except KeyError as e:
            raise ModelError(f"{self.path}: the weights lack the tensor {e.args[0]!r}") from None
        names = [str(p.name) for p in params]
        if missing := [n for n in names if n not in self.parts]:
            raise ModelError(f"{self.path}: the weights lack {len(missing)} tensors: {known(missing)}")
        if unused := set(self.parts) - set(names):
            raise ModelError(f"{self.path}: {self.config.family} as implemented here has no use for the tensors {known(unused)}")
        for p in params:
            shapes = [self.tensors[part].shape for part in self.parts[str(p.name)]]
            form = self.formats.get(str(p.name), "f32")
            width = (FORMATS[form].row_bytes(shapes[0][-1]),) if form in FORMATS else shapes[0][1:]
            if len({s[1:] for s in shapes}) > 1 or (sum(s[0] for s in shapes), *width) != p.dims:
                raise CorruptFileError(f"{self.path}: {p.name!r} is {shapes}, the configuration asks for {p.shape}")
        if odd := {t.type for t in self.tensors.values() if not isinstance(t.data, Scaled)} - {*FORMATS, *FLOATS, "f64"}:
            raise ModelError(f"{self.path}: weights of the type {known(odd)} are not supported")


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose memory returns to the system when it is freed; malloc would keep part of it."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), **private), dtype, math.prod(shape)).reshape(shape)


def _kept_as(stored: str) -> str:
    if stored == "f8e4m3":  # with factors
        return "bf16"
    return stored if stored in FLOATS or stored in FORMATS else "f32"


def _converted(rows: np.ndarray, tensor: GgufTensor, form: str) -> np.ndarray:
    """Convert some rows of a tensor to another format: a float dtype, or a packed one."""
    if tensor.type == form:
        return rows
    floats = FORMATS[tensor.type].decode_rows(rows, tensor.shape[-1]) if tensor.type in FORMATS else rows
    return FORMATS[form].encode(floats) if form in FORMATS else floats.astype(DTYPES[form].numpy)


def _plain(t: GgufTensor) -> GgufTensor:
    return GgufTensor(t.shape, "f32", t.data.decoded()) if isinstance(t.data, Scaled) else t


def _columns(t: GgufTensor, low: int, high: int) -> GgufTensor:
    """Some columns of a matrix; whole blocks if it is packed."""
    packed = FORMATS.get(t.type)
    at = [x // packed.block * packed.nbytes if packed else x for x in (low, high)]
    return GgufTensor((t.shape[0], high - low), t.type, t.data[:, at[0] : at[1]])
