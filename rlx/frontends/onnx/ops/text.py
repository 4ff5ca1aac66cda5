"""Operators on text, in Python: all operands are known when the model is compiled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx

from rlx.frontends.onnx.call import Call, is_text
from rlx.frontends.onnx.proto import text_array
from rlx.frontends.onnx.regex import Pattern
from rlx.frontends.onnx.table import handler


def texts(n: Call, i: int = 0) -> np.ndarray:
    """Operand i, which is text."""
    found = n.known(i)
    return found if is_text(found) else n.refuse(f"operand {i} is {found.dtype}, and text is needed")


@handler("StringConcat")
def concat(n: Call) -> np.ndarray:
    a, b = np.broadcast_arrays(texts(n), texts(n, 1))
    n.check_size(a.size)
    n.check_size(sum(map(len, a.flat)) + sum(map(len, b.flat)))
    return text_array([x + y for x, y in zip(a.reshape(-1), b.reshape(-1))], a.shape)


@handler("StringNormalizer")
def normalised(n: Call) -> np.ndarray:
    """Without the stop words, in upper or lower case; one empty text if nothing is left."""
    x, exact = texts(n), n.attr("is_case_sensitive", 0)
    if x.ndim != 1 and (x.ndim != 2 or x.shape[0] != 1):
        n.refuse(f"operand 0 has dims [C] or [1, C], got {list(x.shape)}")
    case = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}.get(action := n.attr("case_change_action", "NONE"))
    if case is None:
        n.refuse(f"case_change_action {action!r} is not NONE, LOWER or UPPER")
    stop = {w if exact else w.lower() for w in n.attr("stopwords", ())}
    left = [case(w) for w in x.reshape(-1) if (w if exact else w.lower()) not in stop] or [""]
    return text_array(left, (1,) * (x.ndim - 1) + (len(left),))


@handler("StringSplit")
def split(n: Call) -> tuple[np.ndarray, np.ndarray]:
    """The parts of each text, filled up with empty ones, and their number."""
    x, most = texts(n), n.attr("maxsplit", -1)
    parts = [w.split(n.attr("delimiter", "") or None, most) for w in x.reshape(-1)]
    longest = max(map(len, parts), default=0)
    n.check_size(longest * len(parts))
    filled = [e for p in parts for e in (*p, *[""] * (longest - len(p)))]
    return text_array(filled, (*x.shape, longest)), np.array([len(p) for p in parts], np.int64).reshape(x.shape)


@handler("RegexFullMatch")
def full_match(n: Call) -> np.ndarray:
    x, pattern = texts(n), Pattern(n.attr("pattern", ""))
    return np.array([pattern.matches(w) for w in x.reshape(-1)], np.bool_).reshape(x.shape)


@handler("TfIdfVectorizer")
def counted(n: Call) -> np.ndarray:
    """How often each n-gram of the pool occurs in a row, with up to `max_skip_count` elements left out between two of it."""
    x = np.asarray(n.known(0))
    pool, at, indexes = n.attr("pool_strings", ()) or n.attr("pool_int64s", ()), n.attr("ngram_counts"), n.attr("ngram_indexes")
    parts = [*zip(at, (*at[1:], len(pool)))]  # of the pool, by the size of the n-grams in it
    inside = all(0 <= start <= end for start, end in parts)
    sized = enumerate(parts if inside else [], 1)
    every = [tuple(pool[i : i + size]) for size, (start, end) in sized for i in range(start, end - size + 1, size)]
    if x.ndim > 2 or min(indexes, default=-1) < 0 or not inside or len(every) > len(indexes):
        n.refuse(f"operand 0 has dims {list(x.shape)} (at most 2), or ngram_counts and ngram_indexes do not fit the pool")
    least, most, columns = n.attr("min_gram_length"), n.attr("max_gram_length"), max(indexes) + 1
    grams = {g: i for g, i in zip(every, indexes) if least <= len(g) <= most}
    rows = (x if x.ndim == 2 else x.reshape(1, -1)).tolist()
    length = len(rows[0]) if rows else 0
    sizes, skips = sorted({len(g) for g in grams}), range(1, min(n.attr("max_skip_count") + 1, max(length, 1)) + 1)
    n.check_size(max(len(rows) * columns, len(rows) * length * len(sizes) * len(skips) * 8))
    found = [Counter[int]() for _ in rows]
    for row, counts in zip(rows, found):
        for skip in skips:
            for size in sizes:
                span = skip * (size - 1)  # from the first element to the last one
                if span < length and (size > 1 or skip == 1):
                    parts = zip(*(row[skip * i : length - span + skip * i] for i in range(size)))
                    counts.update(grams[g] for g in parts if g in grams)
    return _weighted(n, found, columns).reshape((*x.shape[:-1], columns) if x.ndim else (columns,))


def _weighted(n: Call, found: list[Counter[int]], columns: int) -> np.ndarray:
    mode, made = n.attr("mode"), np.zeros((len(found), columns), np.float32)
    for row, counts in zip(made, found):
        row[list(counts)] = list(counts.values())
    if mode == "TF":
        return made
    if mode not in ("IDF", "TFIDF"):
        n.refuse(f"mode {mode!r} is not TF, IDF or TFIDF")
    weights = np.ones(columns, np.float32)
    given = n.attr("weights", ())[:columns]
    weights[: len(given)] = given
    return (np.minimum(made, 1) if mode == "IDF" else made) * weights


# -- from and to numbers -------------------------------------------------------------------------------------------------


_KINDS = {"string": ("_Unused", object), "int64": (-1, np.int64), "float": (-0.0, np.float32)}


@handler("LabelEncoder", since=2, domain="ai.onnx.ml")
def encoded(n: Call) -> np.ndarray:
    """Values by keys; the last one of equal keys counts, and NaN is a key."""
    x, (keys, _, _), (values, default, dtype) = np.asarray(n.known(0)), _list(n, "keys"), _list(n, "values")
    if len(keys) != len(values):
        n.refuse(f"{len(keys)} keys have {len(values)} values")
    table = {_key(k): v for k, v in zip(keys, values)}
    return np.array([table.get(_key(k), default) for k in x.reshape(-1).tolist()], dtype).reshape(x.shape)


def _key(x: Any) -> Any:
    return x if x == x else "NaN of a float"


def _list(n: Call, name: str) -> tuple[list[Any], Any, Any]:
    """The keys or values, what stands for a missing one, and the dtype."""
    if f"{name}_tensor" in n.attrs:
        array, kind = n.attr(f"{name}_tensor"), n.attr("default_tensor", None)
        unset = "_Unused" if is_text(array) else -1 if array.dtype.kind in "iu" else -0.0
        return array.reshape(-1).tolist(), unset if kind is None else kind.reshape(-1)[0], array.dtype
    for element, (unset, dtype) in _KINDS.items():
        if f"{name}_{element}s" in n.attrs:
            return list(n.attr(f"{name}_{element}s")), n.attr(f"default_{element}", unset), dtype
    n.refuse(f"it has no {name}_strings, {name}_int64s, {name}_floats or {name}_tensor")


def cast(n: Call, code: int) -> np.ndarray:
    """Text of numbers, numbers of text, or text of text."""
    x = np.asarray(n.known(0))
    if code == onnx.TensorProto.STRING:
        return x if is_text(x) else text_array([str(e) for e in x.reshape(-1)], x.shape)
    kind = onnx.helper.tensor_dtype_to_np_dtype(code)
    read = int if kind.kind in "iu" else float
    try:
        return np.array([read(w) for w in x.reshape(-1)], kind).reshape(x.shape)
    except (ValueError, OverflowError) as e:
        n.refuse(f"the text is no number of {kind}: {e!s:.100}")
