"""Every error that rlx raises on purpose. Messages say what was asked, what was found, where, and what to do.

    RlxError
    ├── GraphError                   the graph cannot be built
    │   ├── ShapeError               operand shapes do not fit the op           (also ValueError)
    │   ├── DTypeError               operand dtypes do not fit the op           (also TypeError)
    │   ├── AttributeValueError      an op attribute has no meaning             (also ValueError)
    │   ├── DuplicateNameError       a second leaf or output of the same name   (also ValueError)
    │   ├── VerifyError              a graph or kernel breaks a structural rule
    │   └── ParseError               text that is not a graph                   (also ValueError)
    ├── CompileError                 a sound graph cannot be compiled as asked
    │   ├── UnboundDimError          a named dim has no value
    │   ├── OptionError              a compile option has no meaning            (also ValueError)
    │   └── PlanError                the memory plan fails its independent check (a bug in rlx, never a user error)
    ├── Unsupported                  a feature this version or device does not have
    ├── BindingError                 an argument of a compiled graph does not fit
    │   ├── UnknownNameError         no input, param, handle or output of that name (also KeyError)
    │   ├── MissingInputError        a run without one of the inputs
    │   ├── MissingParamError        a run before every param was set
    │   ├── InputShapeError          wrong shape or element count               (also ValueError)
    │   ├── InputDTypeError          wrong dtype                                (also TypeError)
    │   └── StaleViewError           a view of a run that has been overwritten
    ├── DeviceError                  a device is unknown, unusable or out of memory, or a transfer does not fit
    │   ├── UnknownDeviceError       no backend has that name                   (also ValueError)
    │   ├── DeviceUnavailableError   known, but not usable here
    │   ├── TransferError            device bytes read as host bytes, or a copy that does not fit
    │   └── OutOfMemoryError         the device does not have the planned bytes (also MemoryError)
    ├── NumericsError                a NaN appeared in checked mode
    ├── IndexRangeError              an index in a gather or scatter is out of range (also IndexError)
    ├── ModelError                   a model's files are missing, unsupported or inconsistent
    │   ├── CorruptFileError         a file's sizes, offsets or checksums contradict each other
    │   ├── FormatError              a file is of a format that this version does not read
    │   ├── UntrustedFileError       a file of machine code that another user could have written
    │   └── DownloadError            a model of the Hub is not cached, and cannot be downloaded
    └── CollectiveError              communication between ranks failed; the contents of the arrays are undefined
        ├── HeapBoundsError          bytes outside the symmetric heap           (also IndexError)
        ├── CallMismatchError        ranks made different calls: sizes, dtypes, reductions (also ValueError)
        ├── UnknownRankError         there is no such rank                      (also ValueError)
        └── TransportError           a rank died, left, or was silent past the timeout

A class that also derives from a built-in exception can be caught as either.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class RlxError(Exception):
    """Base of every error that rlx raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class GraphError(RlxError): ...
class ShapeError(GraphError, ValueError): ...
class DTypeError(GraphError, TypeError): ...
class AttributeValueError(GraphError, ValueError): ...
class DuplicateNameError(GraphError, ValueError): ...
class VerifyError(GraphError): ...
class ParseError(GraphError, ValueError): ...


class CompileError(RlxError): ...
class UnboundDimError(CompileError): ...
class OptionError(CompileError, ValueError): ...
class PlanError(CompileError): ...


class Unsupported(RlxError): ...


class BindingError(RlxError): ...
class UnknownNameError(BindingError, KeyError): ...
class MissingInputError(BindingError): ...
class MissingParamError(BindingError): ...
class InputShapeError(BindingError, ValueError): ...
class InputDTypeError(BindingError, TypeError): ...
class StaleViewError(BindingError): ...


class DeviceError(RlxError): ...
class UnknownDeviceError(DeviceError, ValueError): ...
class DeviceUnavailableError(DeviceError): ...
class TransferError(DeviceError): ...
class OutOfMemoryError(DeviceError, MemoryError): ...


class NumericsError(RlxError): ...
class IndexRangeError(RlxError, IndexError): ...


class ModelError(RlxError): ...
class CorruptFileError(ModelError): ...
class FormatError(ModelError): ...
class UntrustedFileError(ModelError): ...
class DownloadError(ModelError): ...


class CollectiveError(RlxError): ...
class HeapBoundsError(CollectiveError, IndexError): ...
class CallMismatchError(CollectiveError, ValueError): ...
class UnknownRankError(CollectiveError, ValueError): ...
class TransportError(CollectiveError): ...


def known(names) -> str:
    """The end of an 'unknown name' message: the names that exist, at most 12 of them."""
    names = sorted(str(n) for n in names)
    shown = ", ".join(repr(n) for n in names[:12])
    return (shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")) or "none"


def as_path(path: Any, name: str = "a path") -> str:
    """The path as text. OptionError: it is none."""
    try:
        found = os.fspath(path)
        if isinstance(found, str) and found and b"\0" not in os.fsencode(found):
            return found
    except (TypeError, UnicodeEncodeError):
        pass
    raise OptionError(f"{name} is text or a pathlib.Path, got {path!r:.60}")


def check_writable(*paths: Any, model: Any = None) -> None:
    """OptionError, before the work rather than after it, if a file cannot be written there, or is one of the model at this path.
    None: there is no file."""
    check_apart(model, *paths)
    for path in filter(None, paths):
        folder, why = os.path.dirname(path) or ".", ""
        if not os.path.isdir(folder):
            why = f"there is no folder {folder}"
        elif os.path.isdir(path):
            why = "it is a folder"
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            why = "the system permits no writing there"
        if why:
            raise OptionError(f"cannot write {path}: {why}")


WEIGHTS = (".safetensors", ".gguf", ".onnx")  # ends of the names of files that a model's folder may have weights in


def check_apart(model: Any, *paths: Any) -> None:
    """OptionError: a file that is about to be written holds the weights of the model at this path, which would be lost."""
    if not model or not os.path.exists(model):
        return
    own = [f.path for f in os.scandir(model) if f.name.endswith(WEIGHTS) and f.is_file()] if os.path.isdir(model) else [model]
    for path in (as_path(path) for path in paths if path is not None):
        if os.path.exists(path) and any(os.path.samefile(path, file) for file in own):
            raise OptionError(f"cannot write {path}: it is a file of the model {model}, which would be lost; give another name")


@contextmanager
def writing(path: Any) -> Iterator[str]:
    """The path as text. OptionError: it is none; or in place of an OSError, as the file cannot be written."""
    found = as_path(path)
    try:
        yield found
    except OSError as e:
        raise OptionError(f"cannot write {found!r}: {e.strerror or e}") from e


@contextmanager
def placed_at(path: Any) -> Iterator[None]:
    """Errors in the contents of a model begin with its path."""
    try:
        yield
    except ModelError as e:
        raise type(e)(f"{path}: {e}") from None


@contextmanager
def reading() -> Iterator[None]:
    """Also a decorator. ModelError in place of an OSError: the system refuses to read a file of a model."""
    try:
        yield
    except OSError as e:
        raise ModelError(f"{e.filename or 'a file of the model'} cannot be read: {e.strerror or e}") from e


def whole(name: str, value: Any, least: int | None = None, error: type[RlxError] = OptionError) -> int:
    """`value` as an int. `error` if it is not an integer, or less than `least`."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        raise error(f"{name} is a whole number{'' if least is None else f' of at least {least}'}, got {value!r:.60}")
    return found


def unmasked(label: str, array: Any) -> Any:
    """`array`. BindingError if it is a masked array of numpy, of which a conversion takes the elements under the mask."""
    if hasattr(array, "mask") and hasattr(array, "filled"):
        raise BindingError(f"{label}: a masked array has elements without a value; fill them: array.filled(0)")
    return array


def flag(name: str, value: Any) -> bool:
    """`value`. OptionError if it is no bool: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is True or False, got {value!r:.60}")
    return value


def called(name: str, value: Any, arguments: str) -> Any:
    """`value`. OptionError if it is neither None nor can be called, with these arguments."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} is called with {arguments}, got {type(value).__name__} {value!r:.60}")
    return value


def items(wanted: str, given: Any, error: type[RlxError]) -> list[Any]:
    """`given` as a list. `error`, which begins with `wanted`: it has no items, or is text or a mapping."""
    try:
        if not isinstance(given, (str, bytes, Mapping)):
            return list(given)
    except TypeError:  # also of arrays without dims, which have __iter__
        pass
    raise error(f"{wanted}; got {type(given).__name__} {given!r:.60}")


def utf8(wanted: str, given: Any, error: type[RlxError], least: int = 0) -> str:
    """`given`. `error`, which begins with `wanted`: it is not text that files can hold, or has less than `least` characters."""
    if not isinstance(given, str) or len(given) < least or any("\ud800" <= c <= "\udfff" for c in given):
        raise error(f"{wanted}, got {given!r:.60}")
    return given
