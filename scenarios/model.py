"""The scenario: a plain, frozen value that says what an executor does, step by step.

Everything else in the suite is a function of it. It holds causes only (who is in the batch, how long, how well
the drafter does, what fails); every length that follows from them is derived by ``scenarios.schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from scenarios import tracer
from scenarios.traits import BACKENDS, WORKERS, WorkerTraits

FORMAT_VERSION: Final = 1


class Phase(str, Enum):
    """What the executor does with a step."""

    WARMUP = "warmup"
    """General warm-up: dummies at some shape, eager. An out-of-memory error is tolerated, no other error is."""
    CAPTURE = "capture"
    """Warm-up runs of one CUDA graph, then its capture, with dummy generations. No error is tolerated."""
    EAGER = "eager"
    """A served batch, run by Python. Errors are tolerated within the error budget; active requests fail."""
    REPLAY = "replay"
    """A served batch, run by replaying the graph that was captured for its size and draft length."""

    @property
    def is_startup(self) -> bool:
        """Whether the step belongs to start-up and so holds dummies only."""
        return self in (Phase.WARMUP, Phase.CAPTURE)


class FaultKind(str, Enum):
    """What a fault raises."""

    OOM = "oom"
    """``torch.OutOfMemoryError``: the only kind that general warm-up tolerates."""
    CUDA = "cuda"
    """A CUDA error: fatal everywhere, as the context is lost."""
    ERROR = "error"
    """``RuntimeError``: tolerated in serving within the error budget."""


KV_CACHE_MANAGERS: Final = ("V1", "V2")
"""Versions of the KV-cache manager; nothing that is served may differ between them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of the engine, fixed for the whole scenario.

    worker            class name of the worker, a key of ``WORKERS``
    max_draft_len     Kmax, at least 1
    tokens_per_block  tokens of one KV-cache page
    num_blocks        pages of the KV-cache pool
    max_num_requests  most rows of a batch
    max_num_tokens    most rows of a target forward
    max_seq_len       longest KV length of a request, extra tokens included
    graph_warmup_runs forwards before each capture (upstream: ``WARMUP_STEPS``)
    error_budget      failed serving steps that are tolerated
    seed              seed of the prompts
    attention_backend a key of ``BACKENDS``
    index_topk        positions that a sparse backend selects per row, at least 1; 0 for a dense one
    window_size       tokens, its own included, that a row sees uncompressed; 0 where nothing is compressed
    compress_ratios   tokens of one compressed token, per layer of the target: 1, one with an indexer and, if any, one
                      without; empty where nothing is compressed (upstream: 1, 4 and 128)
    dynamic_tree_max_topK   candidates per node of a draft tree, at least 2; 0 without a tree
    max_total_draft_tokens  nodes of a draft tree, the root not counted; 0 without a tree
    force_num_accepted_tokens  drafts that generations accept whatever was drafted, its fraction the chance of one more;
                      0 accepts what the target agrees with. See ``forced_acceptance``
    draft_vocab_map   whether the draft head speaks a vocabulary of its own (upstream: the draft model has ``d2t``)
    guided_decoding   whether a grammar restricts what requests choose (upstream: ``GuidedDecoder``)
    use_relaxed_acceptance_for_thinking  whether requests that think accept drafts close to the target's choice
    relaxed_topk      among how many choices of the target such a draft has to be, at least 1; 0 without
    relaxed_delta     how far below the first choice its probability may be; 0 without
    use_separate_draft_kv_cache  whether the drafter has a KV cache of its own, with a manager of its own
    draft_num_blocks        pages of that cache; 0 without one
    draft_tokens_per_block  tokens of one of its pages; 0 without one
    kv_cache_manager        one of ``KV_CACHE_MANAGERS``, for target and drafter
    host_offload            whether pages move in their pool between steps, as when they are swapped to the host and
                            back: what a page is called then is not where it lies
    sa_threshold      from which match length on a suffix automaton's drafts take the place of the model's (upstream:
                      ``sa_config.threshold``); 0 without automata beside the model
    overlap           whether a step is launched before the host knows what the last one came to (upstream:
                      ``disable_overlap_scheduler`` off). The host then counts all rows of that step as accepted, and
                      the device takes back what was not
    recurrent         whether the target has recurrent layers beside attention: a live state per request, and one for
                      each row that verification has yet to accept
    rejection_sampling  whether drafts are verified by what the drafter has proposed, kept per request until then, and
                      not by the target's choice alone
    stall_copies      whether copies from the host run as late as the host lets them, as on a device that is behind;
                      what is served may not differ
    tp_size           ranks of tensor parallelism, which run the same rows; the draft head of each has a part of the
                      vocabulary
    tp_rank           which of them this engine is
    pp_size           ranks of a pipeline, 1 or 2. Of the last one all is shown but for what is prepared and what the
                      host makes of a step: these are another rank's, which runs no worker; see ``pipeline``
    ragged_verify     whether a generation may verify fewer of its drafts than another one; see ``ragged``
    enable_block_reuse  whether a prompt begins with the pages of an earlier one that has the same tokens; see ``reuse``
    attention_dp_size ranks of attention data parallelism, each with requests of its own
    attention_dp_rank which of them this engine is
    """

    worker: str
    max_draft_len: int
    tokens_per_block: int = 4
    num_blocks: int = 64
    max_num_requests: int = 8
    max_num_tokens: int = 256
    max_seq_len: int = 128
    graph_warmup_runs: int = 2
    error_budget: int = 8
    seed: int = 0
    attention_backend: str = "TRTLLM"
    index_topk: int = 0
    dynamic_tree_max_topK: int = 0
    max_total_draft_tokens: int = 0
    force_num_accepted_tokens: float = 0.0
    draft_vocab_map: bool = False
    guided_decoding: bool = False
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 0
    relaxed_delta: float = 0.0
    use_separate_draft_kv_cache: bool = False
    draft_num_blocks: int = 0
    draft_tokens_per_block: int = 0
    kv_cache_manager: str = "V1"
    host_offload: bool = False
    attention_dp_size: int = 1
    attention_dp_rank: int = 0
    sa_threshold: int = 0
    window_size: int = 0
    compress_ratios: tuple[int, ...] = ()
    overlap: bool = False
    recurrent: bool = False
    rejection_sampling: bool = False
    stall_copies: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    enable_block_reuse: bool = False
    ragged_verify: bool = False

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """Pages, and tokens of a page, of each KV cache: the target's, then the drafter's if it has its own."""
        target = self.num_blocks, self.tokens_per_block
        draft = self.draft_num_blocks, self.draft_tokens_per_block
        return (target, draft) if self.use_separate_draft_kv_cache else (target,)

    @property
    def shares_target_kv(self) -> bool:
        """Whether the drafter reads the target's KV cache through a view and writes to none."""
        is_view = BACKENDS[self.attention_backend].draft_view and self.traits.draft_model
        return is_view and not self.use_separate_draft_kv_cache

    @property
    def traits(self) -> WorkerTraits:
        """Traits of the configured worker."""
        return WORKERS[self.worker]

    @property
    def min_draft_len(self) -> int:
        """Smallest runtime draft length of a step."""
        return self.max_draft_len if self.traits.fixed_draft_len else self.traits.min_draft_len

    @property
    def least_history(self) -> int:
        """Fewest tokens of a prompt, or of what a dummy generation has cached.

        The last layer of vanilla MTP reads the first K slots of the target, and K rows before the end of a request
        must be its own.
        """
        return self.max_draft_len if self.traits.feeds_history else 0

    def tokens_per_gen_step(self, draft_len: int) -> int:
        """Rows per generation in the target forward (upstream: ``runtime_tokens_per_gen_step``)."""
        if self.traits.tree:
            return 1 + self.max_total_draft_tokens
        return 2 * draft_len if self.traits.parallel else draft_len + 1

    @property
    def num_extra_kv_tokens(self) -> int:
        """Tokens granted beyond a request's length: room for the draft loop (upstream: Kmax - 1).

        A parallel drafter writes one token beyond the verified ones even for Kmax 1, where upstream's
        formula gives 0, so it gets at least 1 here. The layers of a tree append ``dynamic_tree_max_topK`` nodes
        each to a request that may have advanced by K + 1. A drafter that writes nothing needs none.
        """
        depth = self.max_draft_len
        if self.shares_target_kv:
            return 0
        if self.traits.tree:
            return max(depth - 1, depth * (1 + self.dynamic_tree_max_topK) - self.max_total_draft_tokens)
        return max(depth - 1, 1 if self.traits.parallel else 0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of a user: its prompt is that of ``tracer.prompt``.

    thinking    its prompt ends with the token that begins a thinking phase, which lasts as long as the request
    prefix_of   the id whose prompt tokens this prompt begins with, that of a request or not; None for no other's
    prefix_len  how many of its tokens these are
    """

    id: int
    prompt_len: int
    thinking: bool = False
    prefix_of: int | None = None
    prefix_len: int = 0

    def prompt(self, seed: int) -> list[int]:
        """Its prompt."""
        return tracer.prompt(seed, self.id, self.prompt_len, self.thinking, self.prefix_of, self.prefix_len)


@dataclass(frozen=True, kw_only=True)
class Context:
    """A context (prefill) row: the next ``chunk`` prompt tokens of ``request``.

    With ``Config.enable_block_reuse`` the first chunk also counts the tokens that are reused, and computes the rest.

    ``request`` is None for a dummy, whose whole prompt is the chunk. ``agree`` is how many of the drafts made
    in this step the target will agree with, from the first on (0..draft_len), and ``near`` how many after these are
    the target's second choice: relaxed acceptance may take them.
    """

    request: int | None
    chunk: int
    agree: int = 0
    near: int = 0


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation (decode) row of ``request``: it verifies the drafts that its last step made.

    ``agree`` and ``near`` as for a context, for the drafts made in *this* step; so the next step of the request accepts
    1 + min(agree, drafts it verifies) tokens, and near ones too if relaxed acceptance takes them. A dummy (``request``
    None) has ``past`` cached tokens, and its drafts are such that the target accepts ``accept`` tokens
    (1..draft_len+1, or verify+1); both are left at their defaults for a real request. A served step has dummies only as
    ``ranks.padding`` says.

    ``match`` is how long the match is that the request's suffix automaton finds in this step. From
    ``Config.sa_threshold`` on its drafts are those of the row, and ``agree`` speaks of them.

    ``verify`` is how many of its drafts the row verifies with ``Config.ragged_verify`` (0..draft_len), None for all.
    """

    request: int | None
    agree: int = 0
    near: int = 0
    past: int = 0
    accept: int = 1
    match: int = 0
    verify: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An exception of ``kind`` raised at the ``occurrence``-th call (from 1) of ``site`` within its step."""

    site: str
    occurrence: int
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.site}@{self.occurrence}:{self.kind.value}"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What another rank has in a step: what its contexts compute, and how many generations; nothing when idle."""

    contexts: tuple[int, ...] = ()
    generations: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One iteration of the executor: contexts first, then generations, in this order.

    With ``Config.overlap`` one without rows only processes the step in flight, and a request may have a row in the step
    after the one that it finished with: the host does not know yet, and the row is wasted.

    draft_len   runtime draft length K of the step: drafts verified per generation and drafts made
    finish      requests that end after the step
    fault       what fails in it
    peers       the batches of the other ranks, in rank order; empty in start-up, where all ranks run the same
    """

    phase: Phase = Phase.EAGER
    draft_len: int
    contexts: tuple[Context, ...] = ()
    generations: tuple[Generation, ...] = ()
    finish: tuple[int, ...] = ()
    fault: Fault | None = None
    peers: tuple[Peer, ...] = ()

    @property
    def rows(self) -> tuple[Context | Generation, ...]:
        """Rows of the batch in order."""
        return (*self.contexts, *self.generations)

    def row_field(self, index: int, field: str) -> str:
        """Path of the row with this index in the batch, ``field`` being the step's."""
        generation = index - len(self.contexts)
        return f"{field}.contexts[{index}]" if generation < 0 else f"{field}.generations[{generation}]"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A configuration and what happens in it. ``note`` is free text for the reader."""

    config: Config
    requests: tuple[Request, ...] = ()
    steps: tuple[Step, ...] = ()
    note: str = ""
