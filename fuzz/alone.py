"""Running what may end its process in a process of its own, and how that ends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Protocol, TypeVar

import fuzz.engines
from engines.base import run
from fuzz.audit import SUITE_ERRORS, ProcessEnded, surviving, unexpected
from fuzz.journal import Case
from invariants import verify
from museum import seeded
from scenarios import Scenario, Trace, UsageError

T = TypeVar("T")

_DONE: Final = "done"
_REFUSED: Final = "refused"
PATIENCE: Final = 20.0
"""Seconds that a process may take to end once its pipe is closed: whatever it was running may have a core to dump."""


class Died(Exception):
    """The process of a call ended before the call did. ``killed``: by SIGKILL, which no code does to itself."""

    def __init__(self, cause: str, *, killed: bool = False) -> None:
        super().__init__(f"the process {cause}")
        self.killed = killed


class Caller(Protocol):
    """Whoever calls functions, here or elsewhere."""

    def call(self, function: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
        """What the function returns; raises ``Died`` and ``UsageError``."""
        ...

    def close(self) -> None:
        """Call no more."""
        ...


class Apart:
    """Calls functions in a spawned process, one after the other, and in another one after one that died.

    Functions, arguments and results are pickled. Torch need not be in the process that calls.
    """

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._busy = False
        self._connection: Connection | None = None

    def call(self, function: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
        """What the function returns, within ``seconds`` if that is given.

        Raises ``Died`` if the process ends or hangs, and ``UsageError`` if the function raises one, or an error.
        """
        connection = self._started()
        self._busy = True
        try:
            connection.send((function, args))
            if not connection.poll(seconds):
                self.close()
                raise Died(f"did not end within {seconds:g} s")
            how, result = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        self._busy = False
        if how == _REFUSED:
            raise UsageError(result)
        value: T = result
        return value

    def _started(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            # No daemon, as it may have to run something in a process of its own again.
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()
        return self._connection

    def _death(self) -> Died:
        """How the process ended, which has closed its end of the pipe."""
        process = self._process
        assert process is not None
        process.join(PATIENCE)
        code = process.exitcode
        self.close()
        return Died(how_it_ended(code), killed=code == -signal.SIGKILL)

    def close(self) -> None:
        """End the process, in the middle of a call as well."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            if not self._busy:
                self._process.join(PATIENCE)
            self._process.kill()
            self._process.join()
            self._process.close()
        self._process = self._connection = None


class Here:
    """Calls functions in this process, which has the terminal that a debugger needs. What ends it ends everything."""

    def call(self, function: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
        """What the function returns, however long it takes: a person may be looking at it."""
        return function(*args)

    def close(self) -> None:
        """Nothing to end."""


def caller() -> Caller:
    """Who runs an engine for a command: another process, as this one has to say how that ended."""
    return Apart()


def elsewhere(function: Callable[..., T], *args: Any) -> T:
    """What the function returns in a process of its own; ``UsageError`` if that ends before."""
    with closing(caller()) as apart:
        try:
            return apart.call(function, *args)
        except Died as died:
            raise UsageError(f"--engine: {died}; `specfuzz run` looks for a scenario in which it does") from died


def _serve(connection: Connection) -> None:
    """Body of the process: calls in, results out."""
    fuzz.engines.settle_process()
    fuzz.engines.quieten()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    threading.Thread(target=follow_parent, daemon=True).start()
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone
        try:
            answer = pickle.dumps((_DONE, function(*args)))
        except UsageError as error:
            answer = pickle.dumps((_REFUSED, str(error)))
        except SUITE_ERRORS as error:
            answer = pickle.dumps((_REFUSED, unexpected(error)))
        connection.send_bytes(answer)


def follow_parent() -> None:
    """End this process with its parent, in the middle of its work as well: nobody would hear of the rest."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def death(case: Case, seconds: float) -> str | None:
    """Run a case in a process of its own, for ``seconds`` at most; how that ended, None if it survived.

    One that somebody else has killed counts as one that survived.
    """
    with closing(Apart()) as apart:
        try:
            return apart.call(run_once, case, seconds=seconds)
        except Died as died:
            return None if died.killed else str(died)


def run_once(case: Case) -> str | None:
    """Run the scenario and what invariants compare it with; look at nothing but whether that ends the process."""

    def execute(scenario: Scenario) -> Trace:
        with surviving():
            return run(engine, scenario)

    try:
        engine = fuzz.engines.load(case.engine, case.device)
        with seeded(case.bug):
            verify(case.scenario, execute)
    except ProcessEnded as ended:
        return str(ended)
    except SUITE_ERRORS:
        pass  # no death
    return None


def how_it_ended(code: int | None) -> str:
    """The exit status of a process in words that follow "the process"; None for one that still runs."""
    if code is None:
        return "closed its connection and did not end"
    if code >= 0:
        return f"ended with status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
