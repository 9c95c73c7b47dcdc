"""TRT-110: what suffix automata draft is to take the place of the model's drafts, row by row, from a threshold on."""

from __future__ import annotations

from typing import Any

from museum.bug import DFLASH, DSPARK, EAGLE3, MTP, MTP_EAGLE, PARD, Patch, bug

_REFERENCE = "TensorRT-LLM, no public number"
_OVERRIDDEN = ("long-match-overrides-drafts", "drafts-equal-reference")
_TEXT = ("automaton-holds-text", "history-equals-reference", "automata-equal-reference")


@bug(
    "TRT-110",
    kind="K14",
    workers=(EAGLE3, MTP_EAGLE, PARD, MTP, DFLASH, DSPARK),
    title="The automaton's drafts are made and then not used",
    reference=_REFERENCE,
    caught_by=_OVERRIDDEN,
)
def left_out(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    patch(SADraftEnhancer, "maybe_override_all_draft_tokens", lambda self, draft_tokens: draft_tokens)


@bug(
    "TRT-110",
    kind="K6",
    workers=(EAGLE3, PARD, MTP),
    variant="rows",
    title="Whether the automaton takes over is looked up in the row of a neighbour",
    reference=_REFERENCE,
    caught_by=_OVERRIDDEN,
)
def neighbours(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer
    from engines.process import replaced

    override = SADraftEnhancer.maybe_override_all_draft_tokens

    def maybe_override_all_draft_tokens(self: Any, draft_tokens: Any) -> Any:
        with replaced(self, "match_len", self.match_len[: len(draft_tokens)].roll(1)):
            return override(self, draft_tokens)

    patch(SADraftEnhancer, "maybe_override_all_draft_tokens", maybe_override_all_draft_tokens)


@bug(
    "TRT-110",
    kind="K14",
    workers=(MTP_EAGLE, DFLASH),
    variant="threshold",
    title="A match that is just long enough does not count",
    reference=_REFERENCE,
    caught_by=_OVERRIDDEN,
)
def too_strict(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    construct = SADraftEnhancer.__init__

    def __init__(self: Any, threshold: int, *sizes: Any) -> None:
        construct(self, threshold + 1, *sizes)

    patch(SADraftEnhancer, "__init__", __init__)


@bug(
    "TRT-110",
    kind="K14",
    workers=(EAGLE3, PARD),
    variant="any-match",
    title="Any match counts, however short",
    reference=_REFERENCE,
    caught_by=("drafts-equal-reference", "acceptance-follows-agreement"),
)
def too_lax(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    construct = SADraftEnhancer.__init__

    def __init__(self: Any, threshold: int, *sizes: Any) -> None:
        construct(self, 1, *sizes)

    patch(SADraftEnhancer, "__init__", __init__)


@bug(
    "TRT-110",
    kind="K14",
    workers=(EAGLE3, MTP_EAGLE),
    variant="fed-back",
    title="The automaton's drafts are fed to the model too, which is then asked to go on from them",
    reference=_REFERENCE,
    caught_by=("inputs-equal-reference",),
)
def fed_back(patch: Patch) -> None:
    from engines.portable.speculative.linear import LinearSpecWorker

    sample = LinearSpecWorker.sample_draft_tokens

    def sample_draft_tokens(self: Any, logits: Any, spec_metadata: Any, draft_step: int | None = None) -> Any:
        tokens = sample(self, logits, spec_metadata, draft_step)
        if self.sa_enhancer is not None and spec_metadata.num_generations:
            gens = slice(len(tokens) - spec_metadata.num_generations, None)
            enhancer = self.sa_enhancer
            takes_over = enhancer.match_len[: spec_metadata.num_generations] >= enhancer.threshold
            sa_tokens = enhancer.draft_tokens[: spec_metadata.num_generations, draft_step]
            tokens[gens] = sa_tokens.where(takes_over, tokens[gens])
        return tokens

    patch(LinearSpecWorker, "sample_draft_tokens", sample_draft_tokens)


@bug(
    "TRT-110",
    kind="K3",
    workers=(EAGLE3, DSPARK),
    variant="stale",
    title="The model's drafts are overridden before the automata of this step are done: with what the last one found",
    reference=_REFERENCE,
    caught_by=_OVERRIDDEN,
)
def not_waited_for(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer
    from engines.process import replaced

    extend = SADraftEnhancer.extend_and_prepare
    override = SADraftEnhancer.maybe_override_all_draft_tokens

    def extend_and_prepare(self: Any, *args: Any) -> None:
        self.last = self.match_len.clone(), self.draft_tokens.clone()
        extend(self, *args)

    def maybe_override_all_draft_tokens(self: Any, draft_tokens: Any) -> Any:
        match_len, found_tokens = self.last
        with replaced(self, "match_len", match_len), replaced(self, "draft_tokens", found_tokens):
            return override(self, draft_tokens)

    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)
    patch(SADraftEnhancer, "maybe_override_all_draft_tokens", maybe_override_all_draft_tokens)


@bug(
    "TRT-110",
    kind="K5",
    workers=(EAGLE3, PARD),
    variant="grown",
    title="The enhancer's buffers are replaced when a batch is larger than all before; graphs write to the old ones",
    reference=_REFERENCE,
    caught_by=("graph-buffers-stable",),
)
def grown(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    extend, construct = SADraftEnhancer.extend_and_prepare, SADraftEnhancer.__init__

    def __init__(self: Any, threshold: int, max_num_requests: int, max_draft_len: int, device: Any) -> None:
        construct(self, threshold, 1, max_draft_len, device)

    def extend_and_prepare(self: Any, sa_manager: Any, accepted: Any, counts: Any, num_gens: int, *sizes: int) -> None:
        if num_gens > len(self.match_len):
            self.match_len = self.match_len.new_zeros(num_gens)
            self.draft_tokens = self.draft_tokens.new_zeros(num_gens, self.draft_tokens.shape[1])
        extend(self, sa_manager, accepted, counts, num_gens, *sizes)

    patch(SADraftEnhancer, "__init__", __init__)
    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)


@bug(
    "TRT-110",
    kind="K10",
    workers=(EAGLE3, MTP_EAGLE, DFLASH),
    variant="hole",
    title="A step without drafts leaves the texts as they are, which lack its token from then on",
    reference="TensorRT-LLM #16888",
    caught_by=("automaton-holds-text", "history-equals-reference"),
)
def hole(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    extend = SADraftEnhancer.extend_and_prepare

    def extend_and_prepare(self: Any, *args: Any) -> None:
        if args[-1]:
            extend(self, *args)

    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)


@bug(
    "TRT-110",
    kind="K10",
    workers=(EAGLE3, PARD),
    variant="first-token",
    title="The texts lack the first generated token, which no generation commits",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def first_token(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import SpecResourceManager
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager

    patch(SuffixAutomatonManager, "prepare_resources", SpecResourceManager.prepare_resources)


@bug(
    "TRT-110",
    kind="K14",
    workers=(MTP_EAGLE, MTP, DSPARK),
    variant="rejected",
    title="Rejected drafts are appended to the texts as well",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def rejected(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    extend = SADraftEnhancer.extend_and_prepare

    def extend_and_prepare(self: Any, sa_manager: Any, accepted: Any, counts: Any, *sizes: int) -> None:
        extend(self, sa_manager, accepted, counts * 0 + sizes[-1] + 1, *sizes)

    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)


@bug(
    "TRT-110",
    kind="K6",
    workers=(EAGLE3, DFLASH),
    variant="contexts",
    title="Texts of generations are extended with what the first rows of the batch accept, contexts included",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def first_rows(patch: Patch) -> None:
    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    extend = SADraftEnhancer.extend_and_prepare

    def extend_and_prepare(
        self: Any, sa_manager: Any, accepted: Any, counts: Any, num_gens: int, num_contexts: int, max_draft_len: int
    ) -> None:
        extend(self, sa_manager, accepted, counts, num_gens, 0, max_draft_len)

    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)


@bug(
    "TRT-110",
    kind="K6",
    workers=(PARD,),
    variant="stride",
    title="Accepted tokens are read as the rows of 2K that PARD pads them to afterwards",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def stride(patch: Patch) -> None:
    from torch.nn.functional import pad

    from engines.portable.speculative.sa_enhancer import SADraftEnhancer

    extend = SADraftEnhancer.extend_and_prepare

    def extend_and_prepare(
        self: Any, sa_manager: Any, accepted: Any, counts: Any, num_gens: int, num_contexts: int, max_draft_len: int
    ) -> None:
        width = 2 * max_draft_len
        tokens = accepted[num_contexts:].flatten()
        gens = pad(tokens, (0, num_gens * width))[: num_gens * width].view(num_gens, width)
        extend(self, sa_manager, gens, counts[num_contexts:], num_gens, 0, max_draft_len)

    patch(SADraftEnhancer, "extend_and_prepare", extend_and_prepare)


@bug(
    "TRT-110",
    kind="K6",
    workers=(EAGLE3, MTP),
    variant="by-row",
    title="The text of a request is that of its row, and the rows are not followed when requests leave and join",
    reference=_REFERENCE,
    caught_by=_TEXT,
)
def by_row(patch: Patch) -> None:
    from engines.portable.speculative.suffix_automaton import SuffixAutomatonManager

    prepare = SuffixAutomatonManager.prepare

    def prepare_by_row(self: Any, request_ids: Any) -> None:
        prepare(self, request_ids)
        self.batch_slots[: len(request_ids)].copy_(self.batch_slots.new_tensor(range(len(request_ids))))

    patch(SuffixAutomatonManager, "prepare", prepare_by_row)


@bug(
    "TRT-110",
    kind="K9",
    workers=(EAGLE3, MTP, DFLASH),
    variant="kept",
    title="A request that ends gives back what its worker keeps, but not its automaton",
    reference=_REFERENCE,
    caught_by=("automata-belong-to-requests",),
)
def kept(patch: Patch) -> None:
    from engines.portable.pyexecutor.resource_manager import SpecResourceManager

    def free_resources(self: Any, request: Any) -> None:
        self.slot_manager.remove_slot(request.py_request_id)

    patch(SpecResourceManager, "free_resources", free_resources)
