"""Which lines are sites. The code objects come from text, so that line numbers are in sight."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import pytest

from faults.source import fallible_lines, leaves_with, restore_lines

since_312 = pytest.mark.skipif(sys.version_info < (3, 12), reason="the bytecode of 3.12 and newer is meant")


def code_of(text: str, name: str) -> CodeType:
    namespace: dict[str, object] = {}
    exec(compile(text, "text.py", "exec"), namespace)
    code = getattr(namespace[name], "__code__")  # noqa: B009 - the value is any object to mypy
    assert isinstance(code, CodeType)
    return code


@since_312
def test_lines_without_an_instruction_that_can_raise_are_no_sites() -> None:
    text = '''def step(x):
    """What it does."""
    total = 0
    try:
        total = call(x)
    except ValueError:
        pass
    def inner(y):
        return y + total
    while True:
        if inner(x):
            break
    x.pending = True
    x[0] = 1
    return x
'''
    assert fallible_lines(code_of(text, "step")) == {5, 6, 11, 13, 14}


@since_312
def test_generators_and_conditions_are_judged_alike() -> None:
    text = """def rows(xs):
    for x in xs:
        yield x
    assert xs
"""
    assert fallible_lines(code_of(text, "rows")) == {2, 3, 4}


def test_finally_blocks_and_exit_methods_are_restore_code(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        """class Saved:
    def __enter__(self):
        save()

    def __exit__(self, *exc_info):
        restore(
            self,
        )

def step():
    try:
        work()
    except ValueError:
        handle()
    finally:
        restore()
        if pending():
            rewind()
    with (
        Saved() as a,
        Saved() as b,
    ):
        work()
    async def later():
        async with Saved():
            work()
"""
    )
    restoring, entering = restore_lines(str(file))
    assert restoring == {6, 7, 8, 16, 17, 18}
    assert entering == {19, 20, 21, 25}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")
def test_the_end_of_a_try_with_except_star_is_restore_code(tmp_path: Path) -> None:
    file = tmp_path / "groups.py"
    file.write_text("try:\n    work()\nexcept* OSError:\n    pass\nfinally:\n    restore()\n")
    assert restore_lines(str(file))[0] == {6}


def test_a_file_that_is_gone_has_no_restore_code() -> None:
    assert restore_lines("nowhere.py") == (frozenset(), frozenset())


@since_312
@pytest.mark.parametrize("body", ["work()", "return work()"])
def test_the_end_of_a_with_block_is_told_from_its_start(body: str) -> None:
    code = code_of(f"def step():\n    with saved():\n        {body}\n", "step")
    starts = [start for start, _, line in code.co_lines() if line == 2]
    assert [leaves_with(code, start) for start in starts[:2]] == [False, True]


def outer() -> object:
    def inner() -> object:
        return lambda: None

    return inner
