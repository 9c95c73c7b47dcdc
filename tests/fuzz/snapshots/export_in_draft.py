"""DraftTargetOneModelWorker violates kv-lens-balanced.

Exported by specfuzz from finding 9b4166c1, found on engine tensorrt_llm. Known bugs with this
symptom: TRT-01 (PR #16382), TRT-37.

    steps[0] draft[1]: kv_lens_cuda is [4] and should be [3]

    scenario: DraftTargetOneModelWorker max_draft_len=2
      requests (prompt tokens): 0 (2)
    > steps[0] eager K=2: context 0 (2 tokens)
"""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import torch

try:
    from tensorrt_llm._torch.attention.backends.interface import AttentionMetadata
except ImportError:
    from tensorrt_llm._torch.attention_backend.interface import AttentionMetadata
from tensorrt_llm._torch.speculative.draft_target import (
    DraftTargetOneModelSpecMetadata,
    DraftTargetOneModelWorker,
)
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode
from tensorrt_llm.mapping import Mapping

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_DRAFT_LEN, MAX_TOTAL_DRAFT_TOKENS = 2, 2
VOCAB_SIZE, DRAFT_TOKEN, TARGET_TOKEN = 8, 1, 2


class Metadata(AttentionMetadata):
    """Attention metadata with the buffers that workers expect of a backend."""

    def __post_init__(self):
        super().__post_init__()
        rows = self.max_num_requests
        self.host_request_types = torch.zeros(rows, dtype=torch.int32)
        self.kv_lens_cuda = torch.zeros(rows, dtype=torch.int32, device=DEVICE)


def one_hot(tokens):
    """Logits that choose these tokens."""
    tokens = torch.tensor(tokens, dtype=torch.int64, device=DEVICE)
    return torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()


class DraftModel(torch.nn.Module):
    """Drafts DRAFT_TOKEN everywhere."""

    lm_head = None
    model = property(lambda self: self)

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, input_ids, position_ids, attn_metadata, **kwargs):
        self.seen.append(attn_metadata.kv_lens_cuda[: attn_metadata.num_seqs].tolist())
        return torch.zeros(len(input_ids), 1, device=DEVICE)

    def logits_processor(self, hidden_states, lm_head, attn_metadata, return_context_logits=False):
        return one_hot([DRAFT_TOKEN] * len(hidden_states))


class Step(NamedTuple):
    """A batch: contexts, then generations, one entry per sequence in each list."""

    draft_len: int  # runtime draft length
    width: int  # tokens of a generation in the target forward
    num_contexts: int
    seq_lens: list[int]  # tokens of each in the target forward
    cached: list[int]  # tokens in the KV cache before it
    accepted: list[int]  # tokens accepted, the target's own included


STEPS = [
    # steps[0]: eager
    Step(draft_len=2, width=3, num_contexts=1, seq_lens=[2], cached=[0], accepted=[1]),
]


def prepare(step, attn_metadata, spec_metadata):
    """Fill in a batch as the model engine does."""
    num_seqs, num_contexts = len(step.seq_lens), step.num_contexts
    seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32)
    if not attn_metadata.is_cuda_graph:
        attn_metadata.seq_lens = seq_lens
    attn_metadata.request_ids = list(range(num_seqs))
    attn_metadata.num_contexts = num_contexts
    attn_metadata.host_request_types[:num_contexts] = 0
    attn_metadata.host_request_types[num_contexts:num_seqs] = 1
    attn_metadata.kv_lens_cuda[:num_seqs] = torch.tensor(step.cached) + seq_lens
    attn_metadata.use_spec_decoding = True
    attn_metadata.prepare()

    ends = list(itertools.accumulate(step.seq_lens))
    gather_ids = [end - 1 for end in ends[:num_contexts]]
    gather_ids += range(sum(step.seq_lens[:num_contexts]), ends[-1])
    drafts = [DRAFT_TOKEN] * ((num_seqs - num_contexts) * (step.width - 1))
    spec_metadata.request_ids = attn_metadata.request_ids
    spec_metadata.num_generations = num_seqs - num_contexts
    spec_metadata.num_tokens = ends[-1]
    spec_metadata.runtime_draft_len = step.draft_len
    spec_metadata.runtime_tokens_per_gen_step = step.width
    spec_metadata.gather_ids = torch.tensor(gather_ids, dtype=torch.int32, device=DEVICE)
    spec_metadata.draft_tokens = torch.tensor(drafts, dtype=torch.int32, device=DEVICE)
    spec_metadata.prepare()


def forward(step, worker, attn_metadata, spec_metadata, draft_model):
    """The target agrees with as many drafts of each generation as the step says."""
    targets = [TARGET_TOKEN] * step.num_contexts
    for accepted in step.accepted[step.num_contexts :]:
        targets += [DRAFT_TOKEN] * (accepted - 1) + [TARGET_TOKEN] * (step.width - accepted + 1)
    rows = zip(step.cached, step.seq_lens)
    positions = [position for past, query in rows for position in range(past, past + query)]
    inputs = {
        "input_ids": torch.full((len(positions),), TARGET_TOKEN, dtype=torch.int32, device=DEVICE),
        "position_ids": torch.tensor([positions], dtype=torch.int32, device=DEVICE),
        "hidden_states": torch.zeros(len(positions), 1, device=DEVICE),
        "logits": one_hot(targets),
        "attn_metadata": attn_metadata,
        "spec_metadata": spec_metadata,
        "draft_model": draft_model,
    }
    draft_model.seen.clear()
    return worker(**inputs)


def test_kv_lens_balanced():
    """Every forward moves ``kv_lens_cuda`` along its drafter's course, by the counts that it
    accepted itself."""
    where = "steps[0] draft[1]"
    spec_config = SimpleNamespace(
        max_draft_len=MAX_DRAFT_LEN,
        spec_dec_mode=SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL,
    )
    worker = DraftTargetOneModelWorker(spec_config, Mapping(), use_separate_draft_kv_cache=True)
    manager = SimpleNamespace()
    attn_metadata = Metadata(max_num_requests=8, max_num_tokens=256, kv_cache_manager=manager)
    spec_metadata = DraftTargetOneModelSpecMetadata(
        max_num_requests=8,
        max_draft_len=MAX_DRAFT_LEN,
        max_total_draft_tokens=MAX_TOTAL_DRAFT_TOKENS,
        spec_dec_mode=spec_config.spec_dec_mode,
    )
    draft_model = DraftModel()
    for step in STEPS:
        prepare(step, attn_metadata, spec_metadata)
        forward(step, worker, attn_metadata, spec_metadata, draft_model)

    actual = draft_model.seen[1]
    expected = [3]
    assert actual == expected, f"{where}: kv_lens_cuda is {actual} and should be {expected}"
    saved = list(attn_metadata._saved_tensors)
    assert not saved, f"{where}: {saved} are still saved"
