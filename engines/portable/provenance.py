"""Whose row was read as whose: a run in which every row is tagged with its request.

What a step brings from the host is tagged where it is prepared; from there on tags follow the rows through whatever
gathers and scatters them, also from step to step. Where it is known which request a row is for, at the sub-steps of a
trace, a row with the tag of another one has been misread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engines.portable.device_values import OUTPUTS
from engines.portable.ownership_observation import FIRST_DUMMY_ID
from engines.portable.pyexecutor.resource_manager import SpecResourceManager
from engines.portable.row_tags import RowTags
from engines.portable.session import PortableSession
from engines.portable.speculative.suffix_automaton import sa_manager_of
from faults import Seam
from scenarios import Scenario, Step, StepTrace
from scenarios.trace import PREPARED, RESTORED, VERIFIED, draft

_FIRST_DUMMY: Final = 1 << 20
"""Tags from here on are dummies, one for each row; requests have smaller ids."""
_READ_BY_DRAFTERS: Final = ("input_ids", "position_ids", "hidden_states")
_MTP_PAST: Final = ("mtp_past_tokens_pool", "mtp_past_hidden_states_pool")
_KEPT_BY_SLOT: Final = (*_MTP_PAST, "relaxed_delta_pool", "text", "text_lens")
"""What workers keep of requests, where they have it."""


@dataclass(frozen=True)
class Misread:
    """A row that was read as that of ``request`` and came from ``owner``, None for a dummy."""

    step: int
    substep: str
    field: str
    row: int
    request: int
    owner: int | None

    def __str__(self) -> str:
        return (
            f"steps[{self.step}] {self.substep}: row {self.row} of {self.field} ({_called(self.owner)}) "
            f"was read as {_called(self.request)}'s"
        )


def _called(request: int | None) -> str:
    return "a dummy" if request is None else f"request {request}"


def misread_rows(scenario: Scenario) -> list[Misread]:
    """Run a valid scenario and list the rows that were misread, in order; each place once.

    It runs on the CPU: nobody sees what a CUDA graph does when it is replayed, or what a Triton kernel does.
    """
    session = ProvenanceSession(scenario.config, scenario.requests, torch.device("cpu"), observe=True, record=())
    try:
        session.foresee(scenario.steps)
        for step in scenario.steps:
            if session.step(step).outcome == "fatal":
                break
        return session.misread
    finally:
        session.close()


class ProvenanceSession(PortableSession):
    """A session that watches rows; ``misread`` is what it has seen so far."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.misread: list[Misread] = []
        self._tags = RowTags()
        self._requests_of_rows: list[int] = []
        self._contexts = 0
        self._drafts = 0
        super().__init__(*args, **options)

    def step(self, step: Step) -> StepTrace:
        """See ``PortableSession.step``."""
        with self._tags:
            return super().step(step)

    def _seams(self) -> list[Seam]:
        before = {"model.forward": self._forward_begins, "draft_model.forward": self._drafting}
        after = {
            "model_engine.prepare_inputs": self._prepared,
            "target_model.forward": self._ran,
            "draft_model.forward": self._ran,
            "worker.sample_and_accept_draft_tokens": self._verified,
            "worker.forward": self._returned,
            "cuda_graph.replay": self._returned,
        }
        return [
            replace(
                seam,
                before=_both(before.get(seam.site), seam.before),
                after=_both(after.get(seam.site), seam.after),
            )
            for seam in super()._seams()
        ]

    def _prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """Tag what came from the host, and look at what did not."""
        batch, attn, spec = args[0], result["attn_metadata"], result["spec_metadata"]
        rows = [
            _FIRST_DUMMY + row if request.is_dummy else request.py_request_id
            for row, request in enumerate(batch.all_requests())
        ]
        self._requests_of_rows, self._contexts, n = rows, len(batch.context_requests), len(rows)
        generations = rows[self._contexts :]
        fed = _repeated(rows, attn._seq_lens.tolist())
        inputs = {
            "input_ids": (result["input_ids"], fed),
            "position_ids": (result["position_ids"].flatten(), fed),
            "draft_tokens": (
                spec.draft_tokens,
                _repeated(generations, [len(request.py_draft_tokens) for request in batch.generation_requests]),
            ),
        }
        if hasattr(attn, "kv_lens_cuda"):
            inputs["kv_lens_cuda"] = attn.kv_lens_cuda[:n], rows
        for field, (tensor, owners) in inputs.items():
            self._look(PREPARED, field, tensor, owners)

    def _forward_begins(self, args: Any, kwargs: Any) -> None:
        self._drafts = 0

    def _ran(self, result: Any, args: Any, kwargs: Any) -> None:
        """A model gives each row back to whom it belongs, whatever else it has looked at."""
        given = kwargs.get("input_ids")
        for rows in result if isinstance(result, tuple) else (result,):
            if isinstance(given, Tensor) and isinstance(rows, Tensor) and len(rows) == len(given):
                owners = self._tags.of(given)
                self._tag(rows, owners.reshape(-1, *(1,) * (rows.dim() - 1)))

    def _verified(self, result: Any, args: Any, kwargs: Any) -> None:
        for field, tensor in zip(("accepted_tokens", "num_accepted_tokens"), result):
            self._look(VERIFIED, field, tensor, self._requests_of_rows)

    def _drafting(self, args: Any, kwargs: Any) -> None:
        lens = kwargs["attn_metadata"]._seq_lens.tolist() if "attn_metadata" in kwargs else []
        for field in _READ_BY_DRAFTERS:
            tensor = kwargs.get(field)
            if isinstance(tensor, Tensor):
                tensor = tensor.flatten() if field == "position_ids" else tensor
                self._look(draft(self._drafts), field, tensor, self._owners_of(len(tensor), lens))
        self._drafts += 1

    def _returned(self, result: Any, args: Any, kwargs: Any) -> None:
        for field in OUTPUTS:
            self._look(RESTORED, field, result[field], self._requests_of_rows)
        manager = self._executor.spec_resource_manager
        for kept in {id(m): m for m in (manager, sa_manager_of(manager)) if m is not None}.values():
            self._look_into_slots(kept)

    def _look_into_slots(self, manager: SpecResourceManager) -> None:
        """What a worker keeps of requests, by slot; what one has left behind that has ended does not count."""
        slots = {slot: request for request, slot in manager.slot_manager.taken().items() if request < FIRST_DUMMY_ID}
        owners = [slots.get(slot, _FIRST_DUMMY) for slot in range(max(slots, default=-1) + 1)]
        held = set(slots.values())
        for name in _KEPT_BY_SLOT:
            tensor = getattr(manager, name, None)
            if owners and tensor is not None:
                self._compare(RESTORED, name, tensor[: len(owners)], owners, held.__contains__)

    def _owners_of(self, size: int, lens: Sequence[int]) -> list[int]:
        """Whose the rows of a draft call are: of all sequences, one each or as many as they feed, or of generations."""
        rows, generations = self._requests_of_rows, self._requests_of_rows[self._contexts :]
        if len(lens) == len(rows) and sum(lens) == size:
            return _repeated(rows, lens)
        if generations and size % len(generations) == 0:
            return _repeated(generations, size // len(generations))
        return []

    def _tag(self, tensor: Tensor, owners: Tensor) -> None:
        """Tag what has no request's tag yet."""
        tags = self._tags.of(tensor)
        self._tags.put(tensor, torch.where(tags < 0, owners, tags))

    def _look(self, substep: str, field: str, tensor: Tensor, owners: Sequence[int]) -> None:
        """Compare tags with the owners of the rows, and tag what has none; where no owners are known, nothing."""
        if len(owners) != len(tensor) or not tensor.numel():
            return
        self._compare(substep, field, tensor, owners, lambda tag: True)
        owned = torch.tensor(owners, dtype=torch.int32, device=tensor.device)
        self._tag(tensor, owned.reshape(-1, *(1,) * (tensor.dim() - 1)))

    def _compare(
        self, substep: str, field: str, tensor: Tensor, owners: Sequence[int], counts: Callable[[int], bool]
    ) -> None:
        """Note each row in which another one's tag is, if it is one that counts."""
        for row, (tags, request) in enumerate(zip(self._tags.of(tensor).reshape(len(owners), -1).tolist(), owners)):
            others = [tag for tag in tags if tag >= 0 and tag != request and counts(tag)]
            # What a worker keeps of a dummy may be anything.
            if others and request < _FIRST_DUMMY:
                self.misread.append(Misread(len(self._steps), substep, field, row, request, _request(others[0])))


def _request(tag: int) -> int | None:
    return None if tag >= _FIRST_DUMMY else tag


def _repeated(rows: Sequence[int], counts: int | Sequence[int]) -> list[int]:
    each = [counts] * len(rows) if isinstance(counts, int) else counts
    return [row for row, count in zip(rows, each) for _ in range(count)]


def _both(mine: Callable[..., None] | None, other: Callable[..., None] | None) -> Callable[..., None] | None:
    """Both listeners, one after the other; None for none. What the first one does leaves no tags."""
    if mine is None:
        return other
    untagged = mine

    def listen(*args: Any) -> None:
        with _disable_current_modes():
            untagged(*args)
        if other is not None:
            other(*args)

    return listen
