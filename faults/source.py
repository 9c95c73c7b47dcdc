"""Which lines of loaded Python code are fault sites.

Not a site: a line none of whose instructions can raise (``def``, ``try:``, docstrings, plain locals) and, as
restore code is assumed not to fail, the lines of ``finally`` blocks and of ``__exit__`` methods and the moment in
which a ``with`` block is left.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import cache
from types import CodeType

# Names of every version from 3.12 on; a version that lacks one simply has no such instruction.
_HARMLESS_NAMES = (
    "CACHE NOP RESUME NOT_TAKEN RETURN_GENERATOR RETURN_VALUE RETURN_CONST POP_TOP POP_EXCEPT PUSH_NULL END_FOR "
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT "
    "COPY_FREE_VARS MAKE_CELL LOAD_CLOSURE BUILD_TUPLE MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE "
    "LOAD_CONST LOAD_SMALL_INT LOAD_FAST LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW "
    "STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_DEREF"
)
_HARMLESS = frozenset(dis.opmap[name] for name in _HARMLESS_NAMES.split() if name in dis.opmap)
_EXIT = bytes([dis.opmap["LOAD_CONST"]] * 3)
_SWAP = bytes([dis.opmap["SWAP"]]) if "SWAP" in dis.opmap else b""


def fallible_lines(code: CodeType) -> set[int]:
    """Lines of ``code`` with an instruction that can raise."""
    instructions = code.co_code
    return {
        line
        for start, end, line in code.co_lines()
        if line is not None and not _HARMLESS.issuperset(instructions[start:end:2])
    }


@cache
def restore_lines(filename: str) -> tuple[frozenset[int], frozenset[int]]:
    """Lines of a file that are restore code, and lines of its ``with`` statements."""
    restoring: set[int] = set()
    entering: set[int] = set()
    for node in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
        # Both kinds of ``try`` have it; ``except*`` is from 3.11 on.
        body: list[ast.stmt] = getattr(node, "finalbody", [])
        if isinstance(node, ast.FunctionDef) and node.name == "__exit__":
            body = node.body
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            entering.add(node.lineno)
            entering.update(item.context_expr.lineno for item in node.items)
        for statement in body:
            restoring.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return frozenset(restoring), frozenset(entering)


def leaves_with(code: CodeType, offset: int) -> bool:
    """Whether the instructions of a ``with`` line from ``offset`` on call ``__exit__``: with three times None.

    The line is reported when the block is entered and again when it is left. A fault in the second moment would
    skip ``__exit__``, which nothing but a failure of ``__exit__`` itself can do.
    """
    return code.co_code[offset : offset + 8 : 2].removeprefix(_SWAP).startswith(_EXIT)
