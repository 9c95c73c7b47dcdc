"""TRT-100: the pool and the counter of forced acceptance, which all ranks, graphs and replays are to share.

Upstream allocates them in the first forward that draws; as warm-up forwards of a graph draw nothing, that may be its
capture. The others are what would go wrong with a counter kept anywhere but on the device, or moved anywhere else.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from museum.bug import DRAFT_TARGET, EAGLE3, MTP, MTP_EAGLE, SA, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_COUNTER = "forced-counter-moves-once"
_COUNTS = "acceptance-equals-reference"


def _applying(patch: Patch, change: Any) -> None:
    """Let ``change(worker, apply, counts, num_contexts, draft_len, spec_metadata)`` stand around forced acceptance."""
    from engines.portable.speculative.interface import SpecWorkerBase

    apply = SpecWorkerBase._apply_force_accepted_tokens

    def _apply(self: Any, *args: Any) -> None:
        change(self, apply, *args)

    patch(SpecWorkerBase, "_apply_force_accepted_tokens", _apply)


@bug(
    "TRT-100",
    kind="K10",
    workers=(EAGLE3, SA),
    title="The pool of forced acceptance is drawn in the first forward that needs it, which may be a capture",
    reference=_REFERENCE,
    caught_by=(_COUNTER,),
)
def allocated_when_needed(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    allocate = SpecWorkerBase.set_force_num_accepted_tokens

    def set_force(self: Any, value: float, device: Any) -> None:
        self.force_num_accepted_tokens = value

    def apply(self: Any, method: Any, counts: Any, contexts: int, draft_len: int, spec: Any) -> None:
        from engines.portable._utils import is_graph_warmup

        if self._force_accept_rng_pool is None and not is_graph_warmup(spec):
            allocate(self, self.force_num_accepted_tokens, counts.device)
        method(self, counts, contexts, draft_len, spec)

    patch(SpecWorkerBase, "set_force_num_accepted_tokens", set_force)
    _applying(patch, apply)


@bug(
    "TRT-100",
    kind="K2",
    workers=(EAGLE3, MTP),
    variant="warm-up",
    title="Acceptance is forced in the forwards that warm a graph up, and they use numbers up",
    reference=_REFERENCE,
    caught_by=(_COUNTER, _COUNTS),
)
def forced_in_warm_up(patch: Patch) -> None:
    from engines.portable.speculative import forced_acceptance

    # Nothing else of that module asks.
    patch(forced_acceptance, "is_graph_warmup", lambda metadata: False)


@bug(
    "TRT-100",
    kind="K10",
    workers=(EAGLE3, DRAFT_TARGET),
    variant="host",
    title="The counter of forced acceptance is a number of the host, and replays draw what their capture drew",
    reference=_REFERENCE,
    caught_by=(_COUNTER, _COUNTS),
)
def counted_by_the_host(patch: Patch) -> None:
    def apply(self: Any, method: Any, counts: Any, contexts: int, draft_len: int, spec: Any) -> None:
        if self._force_accept_rng_counter is not None:
            self._force_accept_rng_counter = self._force_accept_rng_counter.clone()
        method(self, counts, contexts, draft_len, spec)

    _applying(patch, apply)


@bug(
    "TRT-100",
    kind="K9",
    workers=(EAGLE3, MTP_EAGLE),
    variant="seed",
    title="Each rank draws numbers of its own to force acceptance by, and ranks disagree about what is accepted",
    reference=_REFERENCE,
    caught_by=(_COUNTS, "kv-ledger-equals-reference"),
)
def own_seed(patch: Patch) -> None:
    from engines.portable.speculative import forced_acceptance

    patch(forced_acceptance, "FORCE_ACCEPT_SEED", forced_acceptance.FORCE_ACCEPT_SEED + 1)


@bug(
    "TRT-100",
    kind="K6",
    workers=(EAGLE3, SA),
    variant="contexts",
    title="Acceptance is forced on contexts as well, which have one token to accept",
    reference=_REFERENCE,
    caught_by=("acceptance-in-range", _COUNTS),
)
def forced_on_contexts(patch: Patch) -> None:
    def apply(self: Any, method: Any, counts: Any, contexts: int, draft_len: int, spec: Any) -> None:
        method(self, counts, 0, draft_len, spec)

    _applying(patch, apply)


@bug(
    "TRT-100",
    kind="K6",
    workers=(EAGLE3,),
    variant="rows",
    title="Rows of generations draw by their place in the batch, contexts counted",
    reference=_REFERENCE,
    caught_by=(_COUNTS,),
)
def drawn_by_batch_row(patch: Patch) -> None:
    def apply(self: Any, method: Any, counts: Any, contexts: int, draft_len: int, spec: Any) -> None:
        first = counts[:contexts].clone()
        method(self, counts, 0, draft_len, spec)
        counts[:contexts].copy_(first)

    _applying(patch, apply)


@bug(
    "TRT-100",
    kind="K2",
    workers=(EAGLE3,),
    variant="rolled-back",
    title="A failed forward takes the counter of forced acceptance back, and its rank is one behind the others",
    reference=_REFERENCE,
    caught_by=(_COUNTER,),
)
def taken_back(patch: Patch) -> None:
    from engines.portable.speculative.interface import SpecWorkerBase

    forward = SpecWorkerBase.forward

    def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        counter = self._force_accept_rng_counter
        with ExitStack() as on_failure:
            if counter is not None:
                on_failure.callback(counter.copy_, counter.clone())
            outputs = forward(self, *args, **kwargs)
            on_failure.pop_all()
        return outputs

    patch(SpecWorkerBase, "forward", _forward)


@bug(
    "TRT-100",
    kind="K8",
    workers=(EAGLE3,),
    variant="full",
    title="The counter moves on in forwards in which all drafts are accepted by force, and nothing is drawn",
    reference=_REFERENCE,
    caught_by=(_COUNTER,),
)
def moved_without_drawing(patch: Patch) -> None:
    def apply(self: Any, method: Any, counts: Any, contexts: int, draft_len: int, spec: Any) -> None:
        method(self, counts, contexts, draft_len, spec)
        if int(self.force_num_accepted_tokens) >= draft_len and self._force_accept_rng_counter is not None:
            self._force_accept_rng_counter.add_(1)

    _applying(patch, apply)
