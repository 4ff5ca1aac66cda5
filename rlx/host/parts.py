"""A module in parts: the functions with its loops over much data, each a module of its own, and the function around them.

LLVM takes longer for the code around such loops, with its nests of loops and its addresses, than for the loops, and gains nothing
there. So a renderer that has moved all of them into functions marks the kernel itself with the attributes AROUND: it is compiled
without optimisation. Parts that several kernels have in common are compiled once.
"""

from __future__ import annotations

import hashlib
import re

from rlx.host.emit import AROUND, ATTRIBUTES

_FUNCTION = re.compile(r"define internal (.+) (@[\w.]+)\((.*)\) #0 \{\n")


def parted(text: str) -> tuple[str, dict[str, str]]:
    """The text of a module without its internal functions, which are declared, and a module for each of these by its symbol, a
    digest of its code. A module whose kernel has other attributes than AROUND stays whole."""
    if AROUND not in text:
        return text, {}
    head, *functions, kernel = re.split(r"^(?=define )", text, flags=re.MULTILINE)
    lines = head.splitlines()
    declared = {line[line.index("@") : line.index("(") + 1]: line for line in lines if line.startswith("declare ")}
    metadata, parts, symbols = [line for line in lines if line.startswith("!")], dict[str, str](), dict[str, str]()

    def module(function: str, attributes: str) -> str:
        for name, symbol in symbols.items():
            function = function.replace(name, symbol)
        return "\n".join([*(line for name, line in declared.items() if name in function), *metadata, attributes, function])

    for function in functions:
        found = _FUNCTION.match(function)
        assert found, function.partition("\n")[0]
        returns, name, params = found.groups()
        symbol = f"rlx_{hashlib.sha256(module(function, ATTRIBUTES).encode()).hexdigest()[:16]}"
        types = ", ".join(p.rpartition(" ")[0] for p in params.split(", ")) if params else ""
        own = function.replace(f"define internal {returns} {name}(", f"define {returns} @{symbol}(", 1)
        parts[symbol] = module(own, ATTRIBUTES)
        symbols[f"{name}("], declared[f"@{symbol}("] = f"@{symbol}(", f"declare {returns} @{symbol}({types})"
    return module(kernel, AROUND), parts
