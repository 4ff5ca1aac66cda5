"""Element types. A DType has a width, a kind and a host form (numpy or ml_dtypes).

The dtypes that a device supports are facts of its Target.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rlx.errors import DTypeError, known
from rlx.records import record


@record(eq=False)
class DType:
    """One element type. `kind`: 'f' float, 'i' signed, 'u' unsigned, 'b' bool, 'c' complex. One object each."""

    name: str
    bits: int
    kind: str

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        """Also equal to its name and to numpy's form of it, as numpy's dtypes are: `x.dtype == np.float32`."""
        if self is other:
            return True
        if isinstance(other, (str, type, np.dtype)):
            try:
                return as_dtype(other) is self
            except DTypeError:
                return False
        return NotImplemented

    __hash__ = object.__hash__

    def __copy__(self) -> DType:
        return self

    def __deepcopy__(self, memo: object) -> DType:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _of_name, (self.name,)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.bits // 8

    @cached_property
    def is_float(self) -> bool:
        return self.kind == "f"

    @cached_property
    def is_int(self) -> bool:
        """Signed or unsigned integer (not bool)."""
        return self.kind in "iu"

    @cached_property
    def numpy(self) -> np.dtype:
        """The host form. bf16 and f8 come from ml_dtypes, imported on first use."""
        if self.name in _NUMPY:
            return np.dtype(_NUMPY[self.name])
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[self.name]))

    @cached_property
    def compute(self) -> DType:
        """The dtype in which arithmetic on this dtype is done: 16-bit and 8-bit floats widen to f32."""
        return f32 if self.is_narrow else self

    @property
    def is_narrow(self) -> bool:
        """True for the storage-only floats: f16, bf16, f8e4m3, f8e5m2."""
        return self.kind == "f" and self.bits < 32


_NUMPY = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16,
    "i64": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8,
    "u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8,
    "bool": np.bool_, "c64": np.complex64, "index": np.int64,
}  # fmt: skip
_ML_DTYPES = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}

f64, f32, f16, bf16 = DType("f64", 64, "f"), DType("f32", 32, "f"), DType("f16", 16, "f"), DType("bf16", 16, "f")
f8e4m3, f8e5m2 = DType("f8e4m3", 8, "f"), DType("f8e5m2", 8, "f")
i64, i32, i16, i8 = DType("i64", 64, "i"), DType("i32", 32, "i"), DType("i16", 16, "i"), DType("i8", 8, "i")
u64, u32, u16, u8 = DType("u64", 64, "u"), DType("u32", 32, "u"), DType("u16", 16, "u"), DType("u8", 8, "u")
bool_, c64 = DType("bool", 8, "b"), DType("c64", 64, "c")
# The dtype of addresses, loop variables and counts in kernels, like the index type of MLIR: signed, and as wide as a device's
# addresses need (i64 on the host, i32 if a renderer knows that every buffer is small enough). No tensor has this dtype: a cast
# converts data to an index.
index_ = DType("index", 64, "i")

DTYPES: dict[str, DType] = {
    d.name: d for d in (f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool_, c64)
}
_FLOATS = {  # bits of exponent and fraction
    "f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "f8e4m3": (4, 3), "f8e5m2": (5, 2),
}  # fmt: skip
_BY_NUMPY = {np.dtype(v): DTYPES[k] for k, v in _NUMPY.items() if k in DTYPES}
_BY_NUMPY_NAME = {v: DTYPES[k] for k, v in _ML_DTYPES.items()}


def _of_name(name: str) -> DType:
    return index_ if name == index_.name else DTYPES[name]


def as_dtype(x: DType | str | np.dtype | type | None) -> DType:
    """A DType from itself, its rlx name ("f32"), or any numpy / ml_dtypes dtype or scalar type."""
    if isinstance(x, DType):
        return x
    if isinstance(x, str) and x in DTYPES:
        return DTYPES[x]
    try:
        if x is None:
            raise TypeError  # numpy takes it for f64
        host = np.dtype(x)
    except (TypeError, ValueError):
        raise DTypeError(f"{x!r:.60} is not a dtype; known: {known(DTYPES)}") from None
    found = _BY_NUMPY.get(host) or _BY_NUMPY_NAME.get(host.name)
    if found is None:
        raise DTypeError(f"numpy dtype {host} has no rlx form; known: {known(DTYPES)}")
    return found


def holds(wide: DType, narrow: DType) -> bool:
    """True if the cast from `narrow` to `wide`, of the same kind (bool: any kind), is exact for every value."""
    if narrow.kind == "b":
        return wide.kind in "bfiuc"
    if wide.kind == "c":
        return narrow == wide or (narrow.is_float and holds(f32, narrow))
    if narrow.is_float and wide.is_float:
        return all(a >= b for a, b in zip(_FLOATS[wide.name], _FLOATS[narrow.name]))
    room = wide.bits - narrow.bits - (narrow.kind != wide.kind)  # an unsigned number needs one bit more to be signed
    return (narrow.kind, wide.kind) in {("i", "i"), ("u", "u"), ("u", "i")} and room >= 0


def product(a: DType, b: DType) -> DType | None:
    """The result dtype of a contraction of `a` with `b`: the common dtype; for two floats the one that holds the other, else
    f32; f32 for two 8-bit floats, which are too narrow for sums. None: the pair is not supported."""
    if a == b:
        return f32 if a.is_float and a.bits == 8 else a
    if not (a.is_float and b.is_float):
        return None
    return a if holds(a, b) else b if holds(b, a) else f32
