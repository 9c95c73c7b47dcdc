"""``assert_restored``, the helper for other people's tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from invariants.testing import assert_restored


class Tensor:
    """What the helper needs of a tensor."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def tolist(self) -> list[int]:
        return list(self.values)


def _metadata() -> SimpleNamespace:
    return SimpleNamespace(
        _saved_tensors={},
        _seq_lens=Tensor([5, 4]),
        _seq_lens_cuda=Tensor([5, 4]),
        kv_lens_cuda=Tensor([5, 14]),
        num_contexts=1,
        num_tokens=9,
        all_rank_num_tokens=None,
    )


def test_a_block_that_gives_everything_back_passes() -> None:
    metadata = _metadata()
    with assert_restored(metadata):
        original, metadata._seq_lens = metadata._seq_lens, Tensor([1, 1])
        metadata.num_contexts = 0
        metadata.kv_lens_cuda.values[0] += 3
        metadata._seq_lens, metadata.num_contexts = original, 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_contexts": 0}, "num_contexts is 0, was 1"),
        ({"_seq_lens": Tensor([5, 4])}, "_seq_lens is another tensor"),
        ({"_saved_tensors": {"_seq_lens": None}}, r"_saved_tensors still holds \['_seq_lens'\]"),
        ({"all_rank_num_tokens": [2]}, r"all_rank_num_tokens is \[2\], was None"),
    ],
)
def test_a_departure_is_named(change: dict[str, object], message: str) -> None:
    metadata = _metadata()
    with pytest.raises(AssertionError, match=message), assert_restored(metadata):
        vars(metadata).update(change)


def test_contents_edited_in_place_are_seen() -> None:
    metadata = _metadata()
    with pytest.raises(AssertionError, match=r"_seq_lens_cuda is \[1, 4\], was \[5, 4\]"), assert_restored(metadata):
        metadata._seq_lens_cuda.values[0] = 1


def test_every_departure_is_listed() -> None:
    metadata = _metadata()
    with pytest.raises(AssertionError, match="num_contexts is 0, was 1; num_tokens is 2, was 9"):
        with assert_restored(metadata):
            metadata.num_contexts, metadata.num_tokens = 0, 2


def test_fields_can_be_added_and_exempted() -> None:
    metadata = _metadata()
    with assert_restored(metadata, exempt=["num_tokens"]):
        metadata.num_tokens = 2
    with pytest.raises(AssertionError, match="kv_lens_cuda is"), assert_restored(metadata, also=["kv_lens_cuda"]):
        metadata.kv_lens_cuda.values[1] += 1


def test_an_exception_goes_on_unchanged_when_all_is_restored() -> None:
    error = MemoryError("out of memory")
    with pytest.raises(MemoryError) as caught, assert_restored(_metadata()):
        raise error
    assert caught.value is error


def test_an_exception_that_leaves_a_mess_is_the_context_of_the_assertion() -> None:
    metadata = _metadata()
    with pytest.raises(AssertionError, match="num_contexts") as caught, assert_restored(metadata):
        metadata.num_contexts = 0
        raise MemoryError("out of memory")
    assert isinstance(caught.value.__context__, MemoryError)


def test_the_block_must_start_clean() -> None:
    metadata = _metadata()
    metadata._saved_tensors["_seq_lens"] = metadata._seq_lens
    with pytest.raises(AssertionError, match="before the block"), assert_restored(metadata):
        pass


def test_the_helper_hides_itself_from_tracebacks() -> None:
    metadata = _metadata()
    with pytest.raises(AssertionError) as caught, assert_restored(metadata):
        metadata.num_contexts = 0
    shown = caught.traceback.filter(caught)
    assert len(caught.traceback) > len(shown)
    assert {entry.path.name for entry in shown} == {"test_testing.py"}
