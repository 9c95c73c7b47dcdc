"""The sites of one session: seams wrapped on the instances of the engine, torch functions and lines on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from faults.bracket import Bracket, Shelter, Visitor
from faults.lines import Lines
from faults.sites import DEFAULT_CLASSES, LINES, SEAMS, TORCH, Seam, SiteClass, family
from scenarios import Fault
from scenarios.errors import ScenarioError, UsageError, closest

_ABSENT: Final = object()


class HarnessError(BaseException):
    """An error of the suite itself, met while the code under test was running.

    Not an ``Exception``, so that no ``except Exception`` of the code under test takes it for a failure of its own.
    """


@dataclass
class _Wrapped:
    """A seam with its wrapper and what the owner's ``__dict__`` held before (``_ABSENT``: nothing)."""

    seam: Seam
    wrapper: Callable[..., Any]
    original: Any

    def remove_from(self, owner: Any) -> None:
        """Give ``owner`` back what it had; nothing where the attribute has been set to something else since."""
        namespace = vars(owner)
        if namespace.get(self.seam.attribute) is not self.wrapper:
            return
        if self.original is _ABSENT:
            del namespace[self.seam.attribute]
        else:
            namespace[self.seam.attribute] = self.original


class Sites:
    """Wraps the seams of an engine instance; ``close()`` puts every attribute back.

    Outside a bracket the wrappers only call listeners. What a listener does is never counted nor made to fail;
    what it raises surfaces as ``HarnessError``, but for CUDA errors: they come late, and are not its own. Not
    thread-safe.

    roots, base  source folders whose lines are sites, and what their paths are relative to (see ``Lines``)

    Raises ``UsageError`` when an owner lacks the attribute of its seam or has no ``__dict__``.
    """

    def __init__(
        self, seams: Iterable[Seam] = (), *, roots: Iterable[str | Path] = (), base: str | Path | None = None
    ) -> None:
        self._wrapped: list[_Wrapped] = []
        self._visitors: dict[str, Visitor] = {}
        self._shelter = Shelter()
        self._lines = Lines(roots, base)
        self._bracket: Bracket | None = None
        self._double = False
        self._closed = False
        self._error: HarnessError | None = None
        try:
            for seam in seams:
                self._install(seam)
        except BaseException:  # an interrupt would leave wrappers behind as well
            self.close()
            raise

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take every wrapper off again; a wrapper that somebody kept calls straight through from now on."""
        self._closed = True
        while self._wrapped:
            wrapped = self._wrapped.pop()
            wrapped.remove_from(wrapped.seam.owner)

    def adopt(self, copy: Any, original: Any) -> None:
        """Give ``copy``, a shallow copy of the owner ``original``, its own wrappers.

        ``copy.copy`` takes the instance's ``__dict__`` along, wrappers bound to the original included; upstream
        makes the attention metadata of a CUDA graph that way.
        """
        for wrapped in [w for w in self._wrapped if w.seam.owner is original]:
            wrapped.remove_from(copy)
            self._install(replace(wrapped.seam, owner=copy))

    @contextmanager
    def bracket(
        self, fault: Fault | None = None, record: Collection[str] = (), *, double: bool = False
    ) -> Iterator[Bracket]:
        """Count the sites of the families in ``record``, and raise ``fault`` when its occurrence comes.

        double  whether restore code can fail too

        Raises ``ScenarioError`` when ``fault`` names a seam that is not there, ``UsageError`` when an injector is
        not to be had here, ``HarnessError`` when a listener failed and the code under test swallowed that.
        """
        if self._bracket is not None:
            raise RuntimeError("a bracket is open already; close it first")
        bracket = Bracket(fault, record, self._shelter)
        self._check(fault, double)
        try:
            with ExitStack() as stack:
                self._bracket, self._double, self._error = bracket, double, None
                stack.callback(self._leave)
                self._enter(bracket, stack)
                yield bracket
        finally:
            if self._error is not None:
                raise self._error

    def shelter(self) -> AbstractContextManager[None]:
        """Within it sites are neither counted nor made to fail, unless the bracket asks for double faults.

        For restore code. Re-entrant. Calls of seams of class restore are sheltered by themselves.
        """
        return nullcontext() if self._double else self._shelter

    def _enter(self, bracket: Bracket, stack: ExitStack) -> None:
        visit = bracket.visitor(SEAMS)
        if visit is not None:
            classes = set(SiteClass) if self._double else DEFAULT_CLASSES
            self._visitors.update((c.value, visit) for c in classes)
        visit = bracket.visitor(LINES)
        if visit is not None:
            stack.enter_context(self._lines.monitor(visit, restoring=self._double))
        visit = bracket.visitor(TORCH)
        if visit is not None:
            from faults.torch_ops import TorchSites

            stack.enter_context(TorchSites(visit))

    def _leave(self) -> None:
        self._bracket = None
        self._visitors.clear()

    def _check(self, fault: Fault | None, double: bool) -> None:
        if fault is None or family(fault.site) != SEAMS:
            return
        classes = {w.seam.site: w.seam.site_class for w in self._wrapped if w.seam.site_class is not None}
        if fault.site not in classes:
            raise ScenarioError("fault.site", f"no seam is called {fault.site!r}", closest(fault.site, classes))
        if classes[fault.site] is SiteClass.RESTORE and not double:
            raise ScenarioError(
                "fault.site", f"{fault.site!r} restores state and is assumed not to fail", "ask for double faults"
            )

    def _install(self, seam: Seam) -> None:
        owner = type(seam.owner).__name__
        try:
            namespace = vars(seam.owner)
            call = getattr(seam.owner, seam.attribute)
        except TypeError:
            raise UsageError(f"seam {seam.site}: {owner} has no __dict__; wrap the object that calls it") from None
        except AttributeError:
            remedy = closest(seam.attribute, dir(seam.owner))
            raise UsageError(f"seam {seam.site}: {owner} has no attribute {seam.attribute!r}; {remedy}") from None
        wrapped = _Wrapped(seam, self._wrap(seam, call), namespace.get(seam.attribute, _ABSENT))
        # Past __setattr__, which may be anything: a module's, a frozen dataclass's.
        namespace[seam.attribute] = wrapped.wrapper
        self._wrapped.append(wrapped)

    def _wrap(self, seam: Seam, call: Callable[..., Any]) -> Callable[..., Any]:
        site, before, after, visitors = seam.site, seam.before, seam.after, self._visitors
        # The value: hashing a member of an Enum is a call of Python code.
        site_class = seam.site_class.value if seam.site_class else ""
        restores = seam.site_class is SiteClass.RESTORE

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            """The call, with its listeners around it; a fault that is due is raised in its place."""
            if before is not None:
                self._listen(seam, before, args, kwargs)
            visit = visitors.get(site_class)
            if visit is not None:
                visit(site)
            if restores:
                with self.shelter():
                    result = call(*args, **kwargs)
            else:
                result = call(*args, **kwargs)
            if after is not None:
                self._listen(seam, after, result, args, kwargs)
            return result

        # A session has dozens of them; nobody asks for more than a name.
        return functools.update_wrapper(wrapper, call, assigned=("__name__",), updated=())

    def _listen(self, seam: Seam, listener: Callable[..., None], *args: Any) -> None:
        if self._closed:
            return
        try:
            with self._shelter:
                listener(*args)
        except Exception as error:
            if "CUDA error" in str(error):
                # A kernel of the code under test failed; whoever waits for the device first is told.
                raise
            self._error = HarnessError(f"a listener of {seam.site} failed: {type(error).__name__}: {error}")
            raise self._error from error
