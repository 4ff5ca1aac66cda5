"""Strict binding: arguments are checked against the program's declarations before any byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.driver.foreign import DeviceArray, detached, on_host
from rlx.errors import BindingError, InputDTypeError, InputShapeError, MissingInputError, UnknownNameError, known, unmasked, utf8
from rlx.ir.dtype import DType, as_dtype, f16
from rlx.ir.graph import Active
from rlx.ir.program import BufferDecl
from rlx.ir.shape import Shape

NUMBERS = {"b": "b", "i": "iuf", "u": "iuf", "f": "f", "c": "c"}  # kind of a list's or number's elements -> dtypes that hold them


class Declared(NamedTuple):
    """An input, output or param of a compiled graph."""

    name: str
    shape: Shape
    dtype: DType

    def __repr__(self) -> str:
        return f"{self.name} {self.shape}"


Adopt = Callable[[object], DeviceArray | None]  # Executable.adopt


def fits(label: str, array: object, shape: Shape, adopt: Adopt | None = None) -> Any:
    """`array` as an ndarray, or adopted by the device, of exactly this dtype and these dims. The error says what was expected and
    what was found."""
    try:
        array = unmasked(label, array)
        found = array if isinstance(array, (np.ndarray, DeviceArray)) else adopt(detached(array)) if adopt else None
        found = on_host(array) if found is None else found
    except (ValueError, TypeError, RuntimeError, BufferError) as e:  # ragged lists; tensors that refuse to be numpy arrays
        raise InputDTypeError(f"{label} is {shape}; got a {type(array).__name__} that is not an array: {e}") from e
    own = isinstance(array, np.ndarray)
    if found.dtype.kind in ("USMm" if own else "OUSMm"):  # None, text, lists of them; an array of objects may hold numbers
        given = f"an array of {found.dtype}" if own else f"{type(array).__name__} {array!r:.60}"
        raise InputDTypeError(f"{label} is {shape}; got {given}, which holds no numbers: give an array of {shape.dtype}")
    if found.dtype != shape.dtype.numpy:
        raise InputDTypeError(f"{label} is {shape}; got {found.dtype}. Convert it: array.astype({shape.dtype.numpy.name!r})")
    if found.shape != shape.static:
        raise InputShapeError(f"{label} is {shape}; got dims {list(found.shape)}")
    return found


def converted(label: str, given: object, shape: Shape, adopt: Adopt | None = None) -> Any:
    """As `fits`; numbers and lists of Python become arrays of the declared dtype, if it holds them exactly or is a wider kind."""
    if isinstance(given, (bool, int, float, complex, list, tuple)) and not isinstance(given, np.generic):
        try:
            kind = np.asarray(given).dtype.kind
            if shape.num_elements and shape.dtype.kind not in NUMBERS.get(kind, ""):
                raise InputDTypeError(f"{label} is {shape}; got {given!r:.60}, which that dtype does not hold: convert it first")
            with np.errstate(over="ignore"):  # infinity, as in a constant
                given = np.asarray(given, shape.dtype.numpy)
        except (ValueError, OverflowError) as e:  # ragged; integers past the dtype's range
            if isinstance(e, InputDTypeError):
                raise
            raise InputDTypeError(f"{label} is {shape}; got {given!r:.60}: {e}") from e
    return fits(label, given, shape, adopt)


def named(label: str, name: object) -> str:
    """`name`, checked to be a string."""
    return utf8(f"the name of {'an' if label[0] in 'aeiou' else 'a'} {label} must be a string", name, UnknownNameError)


def by_name(label: str, given: Mapping[str, object], decls: Sequence[BufferDecl], adopt: Adopt | None = None) -> list[Any]:
    """Named arrays in declaration order. All must be given, no others, each with the declared shape and dtype."""
    if not isinstance(given, Mapping):
        raise BindingError(f"{label}s are given by name, {{name: array}}; got {type(given).__name__}")
    names = [d.name for d in decls]
    if unknown := [n for n in given if n not in names]:
        raise UnknownNameError(f"no {label} is called {known(unknown)}; there are {known(names)}")
    if missing := [n for n in names if n not in given]:
        raise MissingInputError(f"{label} {known(missing)} missing; given: {known(given)}")
    return [fits(f"{label} {d.name!r}", given[d.name], d.shape, adopt) for d in decls]


def by_position(label: str, given: Sequence[object], decls: Sequence[BufferDecl], adopt: Adopt | None = None) -> list[Any]:
    """Arrays given in declaration order, checked as by_name does."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BindingError(f"{label}s by position are a sequence of arrays; got {type(given).__name__}")
    if len(given) != len(decls):
        wanted = ", ".join(f"{d.name!r} {d.shape}" for d in decls)
        error = MissingInputError if len(given) < len(decls) else BindingError
        raise error(f"{len(decls)} {label}s ({wanted or 'none'}), got {len(given)}")
    return [fits(f"{label} {d.name!r}", array, d.shape, adopt) for array, d in zip(given, decls)]


def filled_rows(array: np.ndarray, actives: Iterable[Active], rows: int) -> np.ndarray:
    """`array` without the padding beyond the first `rows` of its active axes. A fresh array if it has active axes."""
    for a in actives:
        array = array.compress(np.arange(array.shape[a.axis]) // a.inner % a.upper < rows, a.axis)
    return array


def shaped(array: np.ndarray, shape: Shape) -> np.ndarray:
    """A row-major array viewed as `shape`: with other dims, or with pairs of floats as complex numbers."""
    return (array if array.dtype == shape.dtype.numpy else array.reshape(-1).view(shape.dtype.numpy)).reshape(shape.static)


def from_bytes(label: str, data: bytes | bytearray | memoryview, dtype: DType | str, shape: Shape) -> np.ndarray:
    """Raw little-endian bytes of `dtype` as an array of `shape`, as many as its elements need. Floats become the declared
    float; other dtypes must be equal."""
    given = as_dtype(dtype)
    if given != shape.dtype and not (given.is_float and shape.dtype.is_float):
        raise InputDTypeError(f"{label} is {shape}; got bytes of {given}. Declare it as {given}, or convert the bytes")
    try:
        view = memoryview(data)
    except TypeError:
        raise InputDTypeError(f"{label} is {shape}; got {type(data).__name__}, which has no bytes") from None
    if view.nbytes != (wanted := shape.num_elements * given.itemsize):
        raise InputShapeError(f"{label} is {shape}, {wanted} bytes of {given}; got {view.nbytes}")
    found = np.frombuffer(view if view.c_contiguous else view.tobytes(), given.numpy).reshape(shape.static)
    return found if given == shape.dtype else rounded(found, shape.dtype)


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Floats as another float dtype: to the nearest, ties to even; NaN and infinities stay.

    ml_dtypes rounds f64 to f32 first. So that nothing is rounded twice, f64 goes through an f32 whose last bit is set if it is
    not exact ("round to odd": Boldo and Melquiond, 2008)."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if array.dtype != np.float64 or dtype.bits >= 32 or dtype == f16:
            return array.astype(dtype.numpy)
        near = array.astype(np.float32)
        down = np.where(np.abs(near) > np.abs(array), np.nextafter(near, np.float32(0)), near)
        odd = (down.view(np.uint32) | (down != array)).view(np.float32)
        return np.where(np.isnan(array), near, odd).astype(dtype.numpy)
