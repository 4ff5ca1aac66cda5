"""Declares ops: adds a row to the op table (rlx/ir/op.py) and returns the function that builds nodes of it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter as _P
from inspect import Signature
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, GraphError
from rlx.ir.methods import FUNCTIONS, attach
from rlx.ir.node import Value, apply
from rlx.ir.op import OPS, Attrs, OpDef
from rlx.ir.shape import Shape
from rlx.records import field_names


def _rounding(reference: Callable[..., Any], infer: Callable[..., Any], as_stored: bool) -> Callable[..., Any]:
    """`reference` with 16-bit and 8-bit floats widened to f32 (unless `as_stored`) and the results rounded once to the result
    dtype; numpy's warnings are off."""

    def run(attrs: Attrs | None, *arrays: Any) -> Any:
        arrays = tuple(np.asarray(a) for a in arrays)
        shapes = [Shape(a.shape, a.dtype) for a in arrays]
        want = infer(attrs, *shapes)
        with np.errstate(all="ignore"):
            seen = (a if as_stored else a.astype(s.dtype.compute.numpy, copy=False) for a, s in zip(arrays, shapes))
            made = reference(attrs, *seen)
            made = made if isinstance(made, tuple) else (made,)
            results = tuple(
                np.asarray(m).astype(w.dtype.compute.numpy, copy=False).astype(w.dtype.numpy, copy=False)
                for m, w in zip(made, want if isinstance(want, tuple) else (want,), strict=True)
            )
        return results if isinstance(want, tuple) else results[0]

    return run


def op(name: str, **facts: Any) -> Callable[..., Any]:
    """Declare an op. Returns its constructor, which takes Values (or Python and numpy constants) and attributes and returns
    Values.

    Positional arguments after the operands are attributes, in order of declaration: `reshape(x, (2, 3))`. A variadic op also
    takes its operands as one list: `concat([a, b], 0)`.
    """
    if name in OPS:
        raise GraphError(f"op {name!r} is declared twice")
    facts["reference"] = _rounding(facts["reference"], facts["infer"], facts.get("as_stored", False))
    declared = OPS[name] = OpDef(name=name, **facts)
    most = declared.arity[1]
    attr_names = _attribute_names(declared)

    def build(*operands: Any, shape: Any = None, name: str | None = None, **attrs: Any) -> Value | tuple[Value, ...]:
        extra: tuple[object, ...] = ()
        if most is not None:
            operands, extra = operands[:most], operands[most:]
        elif operands and isinstance(operands[0], (list, tuple)):
            operands, extra = tuple(operands[0]), operands[1:]
        if extra:
            many = len(extra) - len(attr_names)
            if many > 0 or (twice := [n for n in attr_names[: len(extra)] if n in attrs]):
                problem = f"{many} too many arguments" if many > 0 else f"{', '.join(twice)} given twice"
                raise AttributeValueError(f"{declared.name}: {problem}; attributes are: {', '.join(attr_names) or 'none'}")
            attrs.update(zip(attr_names, extra))
        return apply(declared, operands, attrs, shape=shape, name=name)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = declared.doc
    build.op = declared  # type: ignore[attr-defined]
    build.__signature__ = _signature(declared)  # type: ignore[attr-defined]
    FUNCTIONS[name] = build
    if most != 0:
        attach(Value, name, build)
    return build


def _attribute_names(op: OpDef) -> list[str]:
    """In order of declaration. Their types take ten times as long: they are found when they are asked for."""
    return field_names(op.attrs) if op.attrs else []


def _signature(op: OpDef) -> Signature:
    """As help() and editors show it: operands by position, then attributes; those without a default must be given."""
    names = op.operand_names
    many = any(name.startswith("*") for name in names)
    out = [_P(n[1:], _P.VAR_POSITIONAL) if n.startswith("*") else _P(n, _P.POSITIONAL_ONLY) for n in names]
    for name in _attribute_names(op):
        default = getattr(op.attrs, name, _P.empty)
        out.append(_P(name, _P.KEYWORD_ONLY if many else _P.POSITIONAL_OR_KEYWORD, default=default))
    return Signature([*out, *(_P(name, _P.KEYWORD_ONLY, default=None) for name in ("shape", "name"))], return_annotation="Value")
