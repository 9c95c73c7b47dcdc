"""``AttentionMetadata``: what the attention layers of a forward know of the batch.

One long-lived object per engine, and one per captured graph; every step rewrites it in place. Batch order is
always contexts, then generations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engines.portable._utils import default_device, maybe_pin_memory
from engines.portable.copies import copy_to_device, to_device
from engines.portable.pyexecutor.mamba_cache_manager import Mamba2Metadata, MambaHybridCacheManager

if TYPE_CHECKING:
    from engines.portable.memory_buffer_utils import Buffers
    from engines.portable.pyexecutor.resource_manager import KVCacheManager


T = TypeVar("T")


class _ArgumentProperty(property):
    default: Any

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.default if instance is None else super().__get__(instance, owner)


def argument_property(getter: Callable[[Any], Any], setter: Callable[[Any, Any], None], default: Any) -> Any:
    """A property that the constructor of a dataclass takes as well, as a field with a default."""
    result = _ArgumentProperty(getter, setter)
    result.default = default
    return result


def _plain_properties(cls: type[T]) -> type[T]:
    """Make properties of a dataclass's argument properties, now that it has read their defaults: they read faster."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, _ArgumentProperty):
            setattr(cls, name, property(value.fget, value.fset))
    return cls


@dataclass
class KVCacheParams:
    """What a step knows of the cache before it runs.

    use_cache                  whether there is one
    num_cached_tokens_per_seq  tokens cached before the step, per row
    num_extra_kv_tokens        tokens granted beyond the lengths, room for the draft loop
    """

    use_cache: bool
    num_cached_tokens_per_seq: list[int] = field(default_factory=list)
    num_extra_kv_tokens: int = 0


@dataclass(frozen=True)
class AttentionRuntimeFeatures:
    """How prompts are computed, as far as attention sees it.

    chunked_prefill                    whether prompts may be computed in chunks
    cache_reuse, has_speculative_draft_tokens  part of upstream's constructor; nothing here depends on them
    chunk_size                         cached tokens of a context that one loop of context MLA takes
    chunked_prefill_buffer_batch_size  so many contexts share a loop
    """

    chunked_prefill: bool = False
    cache_reuse: bool = False
    has_speculative_draft_tokens: bool = False
    chunk_size: int = 0
    chunked_prefill_buffer_batch_size: int = 4


@_plain_properties
@dataclass(kw_only=True, eq=False, repr=False)
class AttentionMetadata:
    """Lengths and counts of the batch, with the save/restore that draft loops rely on.

    ``seq_lens`` (int32 [n], host), ``seq_lens_cuda`` (int32 [n], device), ``num_contexts``, ``num_generations``,
    ``num_ctx_tokens`` and ``num_tokens`` are properties; assigning the first or the third updates the others, also
    in the constructor. Without a ``kv_cache_manager`` there are no pages to describe. ``draft_kv_cache_manager`` is
    that of a separate draft KV cache; it takes the other's place while drafts are made
    (``speculative.draft_kv_cache``).

    ``mamba_metadata`` is what recurrent layers know of the batch: made by the first ``prepare`` whose manager keeps
    states, False where it keeps none.

    ``padded_num_tokens`` is the number of rows to which the batch is padded for the other ranks, None where it is not;
    that of the target's batch means nothing to a view with other rows.

    Cross attention has metadata of its own, ``cross``, whose queries are the decoder's and whose ``seq_lens_kv``
    (int32 [n], host) are the encoder's tokens; everywhere else ``seq_lens_kv`` is ``seq_lens``, the same object.
    """

    max_num_requests: int
    max_num_tokens: int
    device: torch.device = field(default_factory=default_device)
    # None where there are no pages, which only tests of single methods have: its users need not ask.
    kv_cache_manager: KVCacheManager = None  # type: ignore[assignment]
    draft_kv_cache_manager: KVCacheManager | None = None
    kv_cache_params: KVCacheParams | None = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    all_rank_num_tokens: list[int] | None = None
    is_cuda_graph: bool = False
    cross: AttentionMetadata | None = None
    cuda_graph_buffers: Buffers | None = None
    padded_num_tokens: int | None = field(default=None, init=False)
    use_spec_decoding: bool = field(default=False, init=False)
    mamba_metadata: Mamba2Metadata | bool | None = field(default=None, init=False)
    _seq_lens: torch.Tensor | None = field(default=None, init=False)
    _seq_lens_cuda: torch.Tensor | None = field(default=None, init=False)
    _seq_lens_kv: torch.Tensor | None = field(default=None, init=False)
    _seq_lens_kv_cuda: torch.Tensor | None = field(default=None, init=False)
    _num_contexts: int = field(default=0, init=False)
    _num_generations: int = field(default=0, init=False)
    _num_ctx_tokens: int = field(default=0, init=False)
    _num_tokens: int = field(default=0, init=False)
    _saved_tensors: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Allocate the buffers; called again on the copy that belongs to a graph.

        Raises ``AssertionError`` when ``cross`` is neither of the same class nor, for cross attention, this object.
        """
        self.mamba_metadata = None
        if self._seq_lens_kv is not None:
            assert self.cross in (None, self), "cross: metadata of cross attention has no other for it"
            self.cross = self
        else:
            same = self.cross is None or type(self.cross) is type(self)
            assert same, f"cross: a {type(self.cross).__name__} beside a {type(self).__name__}"

    def get_empty(self, shape: Sequence[int], dtype: torch.dtype, cache_name: str) -> torch.Tensor:
        """A device buffer: new and zeroed, or for a graph that has a pool whatever the pool keeps under this name."""
        if self.cuda_graph_buffers is None:
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        return self.cuda_graph_buffers.get_buffer(shape, dtype, cache_name, self.is_cuda_graph)

    def on_update(self) -> None:
        """Recompute the counters from the lengths and ``num_contexts``; host work only."""
        lens = None if self._seq_lens is None else self._seq_lens.tolist()
        lens_kv = lens if self._seq_lens_kv is None else self._seq_lens_kv.tolist()
        if lens is not None and 0 <= self._num_contexts <= len(lens):
            self._num_ctx_tokens = sum(lens[: self._num_contexts])
            self._num_generations = len(lens) - self._num_contexts
        if lens_kv is not None:
            self._num_tokens = sum(lens_kv)

    def _get_seq_lens(self) -> torch.Tensor:
        """Tokens that each row feeds: int32 [n], host."""
        assert self._seq_lens is not None, "seq_lens is read before it is set"
        return self._seq_lens

    def _set_seq_lens(self, value: torch.Tensor | None) -> None:
        if value is None:
            return
        self._seq_lens = value
        self.on_update()
        self._seq_lens = maybe_pin_memory(value, self.device)
        if self.is_cuda_graph and self._seq_lens_cuda is not None:
            # The captured graph knows this address.
            copy_to_device("_seq_lens_cuda", self._seq_lens_cuda, self._seq_lens)
        else:
            self._seq_lens_cuda = to_device("_seq_lens_cuda", self._seq_lens, self.device, copy=True)
        if self.has_cross_sub_metadata:
            assert self.cross is not None
            self.cross._seq_lens, self.cross._seq_lens_cuda = self._seq_lens, self._seq_lens_cuda

    seq_lens: torch.Tensor = argument_property(_get_seq_lens, _set_seq_lens, None)  # noqa: RUF009 - one for the class, as a property is

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """Tokens that each row feeds: int32 [n], device."""
        assert self._seq_lens_cuda is not None, "seq_lens_cuda is read before seq_lens is set"
        return self._seq_lens_cuda

    def _get_seq_lens_kv(self) -> torch.Tensor:
        """Tokens that each row adds to the cache: int32 [n], host; ``seq_lens`` itself but for cross attention."""
        return self.seq_lens if self._seq_lens_kv is None else self._seq_lens_kv

    def _set_seq_lens_kv(self, value: torch.Tensor | None) -> None:
        if value is None:
            return
        self._seq_lens_kv = value
        self.on_update()
        self._seq_lens_kv = maybe_pin_memory(value, self.device)
        if self.is_cuda_graph and self._seq_lens_kv_cuda is not None:
            copy_to_device("_seq_lens_kv_cuda", self._seq_lens_kv_cuda, self._seq_lens_kv)
        else:
            self._seq_lens_kv_cuda = to_device("_seq_lens_kv_cuda", self._seq_lens_kv, self.device, copy=True)

    seq_lens_kv: torch.Tensor = argument_property(_get_seq_lens_kv, _set_seq_lens_kv, None)  # noqa: RUF009 - one for the class, as a property is

    @property
    def seq_lens_kv_cuda(self) -> torch.Tensor:
        """The same on the device."""
        return self.seq_lens_cuda if self._seq_lens_kv_cuda is None else self._seq_lens_kv_cuda

    @property
    def is_cross(self) -> bool:
        """Whether keys and values are those of other tokens than the queries."""
        return self._seq_lens is not None and self.seq_lens is not self.seq_lens_kv

    @property
    def has_cross_sub_metadata(self) -> bool:
        """Whether there is metadata of cross attention beside this one."""
        return self.cross is not None and self.cross is not self

    def _get_num_contexts(self) -> int:
        """Context rows, the first of the batch."""
        return self._num_contexts

    def _set_num_contexts(self, value: int) -> None:
        self._num_contexts = value
        self.on_update()

    num_contexts: int = argument_property(_get_num_contexts, _set_num_contexts, 0)

    @property
    def context_lens(self) -> torch.Tensor:
        """Tokens that each context row feeds: int32 [num_contexts], host."""
        return self.seq_lens[: self.num_contexts]

    @property
    def num_generations(self) -> int:
        """Generation rows; follows from ``seq_lens`` and ``num_contexts``."""
        return self._num_generations

    @property
    def num_ctx_tokens(self) -> int:
        """Tokens of the context rows."""
        return self._num_ctx_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self._num_tokens

    @property
    def num_seqs(self) -> int:
        """Rows of the batch."""
        return self.seq_lens.shape[0]

    def prepare(self) -> None:
        """Fill the buffers of the backend from the fields of the step."""
        if self.mamba_metadata is None:
            keeps_states = isinstance(self.kv_cache_manager, MambaHybridCacheManager)
            self.mamba_metadata = keeps_states and Mamba2Metadata(self.max_num_requests, self.device)
        if isinstance(self.mamba_metadata, Mamba2Metadata):
            self.mamba_metadata.prepare(self)

    def prepare_encoder_only(self) -> None:
        """The same for an encoder, which has no cache."""
        self.prepare()

    def on_update_kv_lens(self) -> None:
        """Told when the device's KV lengths were written outside ``prepare``."""

    def update_for_spec_dec(self) -> None:
        """Told by a draft loop when it has changed lengths or layout."""

    def update_spec_dec_param(
        self,
        is_spec_decoding_enabled: bool,
        spec_metadata: Any,
        batch_size: int = 0,
        num_contexts: int = 0,
        spec_tree_manager: Any = None,
    ) -> None:
        """Told what the kernels have to know of drafts, and whether there are any."""
        self.use_spec_decoding = is_spec_decoding_enabled

    def prepare_for_spec_dec(self, *fields: str) -> None:
        """Save the tensors of ``fields`` and put clones in their place, for a draft loop to write on.

        The originals, whose addresses captured graphs know, are not written until ``restore_from_spec_dec`` puts
        them back. Raises ``AssertionError`` when something is still saved or a field holds no tensor, and
        ``AttributeError`` when there is no such field.
        """
        assert not self._saved_tensors, (
            f"prepare_for_spec_dec: {', '.join(self._saved_tensors)} of an earlier call not restored; "
            "call restore_from_spec_dec first"
        )
        for name in fields:
            tensor = getattr(self, name)
            assert isinstance(tensor, torch.Tensor), f"prepare_for_spec_dec: {name} is no tensor and cannot be saved"
            # Saved first: if the clone fails, restoring is right, as the original is still in place.
            self._saved_tensors[name] = tensor
            setattr(self, name, tensor.clone())

    def restore_from_spec_dec(self) -> None:
        """Put every saved tensor back, the object itself; does nothing when none is saved."""
        for name, tensor in self._saved_tensors.items():
            setattr(self, name, tensor)
        self._saved_tensors.clear()

    @property
    def has_spec_dec_saved_state(self) -> bool:
        """Whether ``prepare_for_spec_dec`` waits for its ``restore_from_spec_dec``."""
        return bool(self._saved_tensors)

    def create_cross_metadata(
        self, encoder_seq_lens: torch.Tensor, cross_kv_cache_manager: Any, encoder_num_cached: list[int] | None = None
    ) -> AttentionMetadata:
        """Metadata of cross attention beside this one, which shares queries and requests with it; also its ``cross``.

        encoder_seq_lens    int32 [n], host: encoder tokens of the step, 0 for a row whose encoder has run
        encoder_num_cached  encoder tokens cached before the step; None leaves what this object has
        """
        metadata = copy.copy(self)
        metadata._saved_tensors = {}
        metadata.cross = None
        metadata.cuda_graph_buffers = None
        self.cross = metadata
        metadata._seq_lens_kv_cuda = None
        self.update_cross_metadata(encoder_seq_lens, cross_kv_cache_manager, encoder_num_cached)
        metadata.__post_init__()
        return metadata

    def update_cross_metadata(
        self, encoder_seq_lens: torch.Tensor, cross_kv_cache_manager: Any, encoder_num_cached: list[int] | None = None
    ) -> None:
        """Bring the metadata of cross attention up to date with a step; raises ``RuntimeError`` if there is none."""
        if self.cross is None or self.cross is self:
            raise RuntimeError("update_cross_metadata: there is no cross metadata; call create_cross_metadata first")
        metadata = self.cross
        metadata.kv_cache_manager = cross_kv_cache_manager
        metadata._seq_lens, metadata._seq_lens_cuda = self._seq_lens, self._seq_lens_cuda
        metadata.request_ids, metadata.prompt_lens = self.request_ids, self.prompt_lens
        metadata._num_contexts = self._num_contexts
        metadata.seq_lens_kv = encoder_seq_lens
        if encoder_num_cached is not None:
            use_cache = self.kv_cache_params.use_cache if self.kv_cache_params else cross_kv_cache_manager is not None
            metadata.kv_cache_params = KVCacheParams(use_cache, encoder_num_cached)

    def create_cuda_graph_metadata(
        self,
        max_batch_size: int,
        sub_cross_metadata: bool = False,
        max_draft_tokens: int = 0,
        buffers: Buffers | None = None,
        encode_only: bool = False,
    ) -> Any:
        """The metadata of a graph of ``max_batch_size`` generations with ``max_draft_tokens`` draft slots each.

        It has buffers of its own, out of the pool ``buffers`` if there is one, which keep their addresses; its
        lengths are fixed. Graph metadata returns itself.

        sub_cross_metadata  it is that of cross attention, which has its queries from the one that it belongs to
        encode_only         the graph of an encoder: contexts of one token, whose number stays as it is
        """
        if self.is_cuda_graph:
            return self
        metadata = copy.copy(self)
        metadata.is_cuda_graph = True
        metadata.cuda_graph_buffers = buffers
        # Upstream's copy shares the dict, so a save that leaks from one object blocks all of them.
        metadata._saved_tensors = {}
        if self.has_cross_sub_metadata:
            assert self.cross is not None
            metadata.cross = self.cross.create_cuda_graph_metadata(max_batch_size, True, max_draft_tokens, buffers)
        elif self.cross is self:
            metadata.cross = metadata
        if not sub_cross_metadata:
            tokens = 1 if encode_only else 1 + max_draft_tokens
            metadata._seq_lens_cuda = None
            metadata.seq_lens = torch.full((max_batch_size,), tokens, dtype=torch.int32)
        if self._seq_lens_kv is not None:
            metadata._seq_lens_kv_cuda = None
            metadata.seq_lens_kv = torch.zeros(max_batch_size, dtype=torch.int32)
        if not encode_only:
            metadata.num_contexts = 0
        metadata.__post_init__()
        return metadata
