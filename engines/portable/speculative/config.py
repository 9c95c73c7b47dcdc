"""What the engine is told about speculation."""

from __future__ import annotations

from dataclasses import dataclass

from engines.portable.speculative.mode import SpeculativeDecodingMode


@dataclass(frozen=True)
class DecodingConfig:
    """Configuration of speculation (upstream: a ``DecodingBaseConfig``).

    spec_dec_mode             which worker drafts
    max_draft_len             Kmax
    num_extra_kv_tokens       tokens granted beyond a request's length
    mask_token_id             what a parallel drafter is given for tokens to predict
    dynamic_tree_max_topK     candidates per node of a tree of drafts; 0 without one
    dynamic_tree_max_nodes    nodes that a tree keeps, its root not counted
    force_num_accepted_tokens drafts that generations accept whatever was drafted, 0 for those that the target agrees
        with; its fraction is the chance of one more (upstream: an environment variable)
    use_relaxed_acceptance_for_thinking  whether requests that think accept drafts close to the target's choice
    relaxed_topk              among how many of its choices they have to be
    relaxed_delta             how far below the first choice their probability may be
    begin_thinking_phase_token  a token that the prompts of requests that think have
    sa_threshold              from which match length on a suffix automaton drafts instead; 0 without one
    ragged_verify             whether generations verify numbers of drafts of their own
    use_shared_kv_cache       whether the drafter reads the target's KV cache and writes to none
    """

    spec_dec_mode: SpeculativeDecodingMode
    max_draft_len: int
    num_extra_kv_tokens: int
    mask_token_id: int
    dynamic_tree_max_topK: int = 0
    dynamic_tree_max_nodes: int = 0
    force_num_accepted_tokens: float = 0.0
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 0
    relaxed_delta: float = 0.0
    begin_thinking_phase_token: int = -1
    sa_threshold: int = 0
    ragged_verify: bool = False
    use_shared_kv_cache: bool = False

    @property
    def use_dynamic_tree(self) -> bool:
        """Whether drafts are the nodes of a tree, not of a chain."""
        return self.dynamic_tree_max_topK > 0

    @property
    def keeps_context(self) -> bool:
        """Whether the worker keeps the drafter's context itself, in slots."""
        return self.spec_dec_mode.is_dflash() or self.spec_dec_mode.is_dspark()

    def get_runtime_drafts(self, runtime_draft_len: int) -> int:
        """Drafts that the worker makes for a generation."""
        return self.dynamic_tree_max_nodes if self.use_dynamic_tree else runtime_draft_len

    def get_runtime_tokens_per_gen_step(self, runtime_draft_len: int) -> int:
        """Rows that a generation feeds to the target."""
        if self.spec_dec_mode.is_pard():
            return 2 * runtime_draft_len
        return self.get_runtime_drafts(runtime_draft_len) + 1

    @property
    def spec_tree_width(self) -> int:
        """Most rows of a sequence that masks speak of: in the target, or in a layer of the drafter; 0 without trees."""
        if not self.use_dynamic_tree:
            return 0
        return max(1 + self.dynamic_tree_max_nodes, self.max_draft_len * self.dynamic_tree_max_topK)

    @property
    def num_draft_layers(self) -> int:
        """Layers of the KV cache that belong to the drafter."""
        return self.max_draft_len if self.spec_dec_mode.is_mtp_vanilla() else 1

    @property
    def max_total_draft_tokens(self) -> int:
        """Draft slots of a generation at most."""
        return self.get_runtime_tokens_per_gen_step(self.max_draft_len) - 1
