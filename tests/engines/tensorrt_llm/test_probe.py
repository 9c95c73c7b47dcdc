"""What can be driven, found by features."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engines.tensorrt_llm import TensorrtLlmEngine
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.probe import arguments_for, capabilities, doctor, fields_for
from engines.tensorrt_llm.source import open_source
from scenarios import Config, UsageError
from tests.fixtures.tensorrt_llm_tree import LAYOUTS, build

WITHOUT_DRIVER = ("DeepseekV4TrtllmAttentionMetadata", "FlashInferAttentionMetadata", "VanillaAttentionMetadata")


def features(root, worker):
    upstream = Upstream(open_source(root), emulated=True)
    return capabilities(upstream.load(worker), upstream.interface.SpecWorkerBase, upstream.attention.AttentionMetadata)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_tell_the_eras_apart(tree, layout):
    pre, post, settled = (features(tree(era, layout), "PARDWorker") for era in ("pre-fix", "post-fix", "settled"))
    assert (pre.template_method, pre.saved_state, pre.paired_save) == (False, False, False)
    assert (post.template_method, post.saved_state, post.paired_save) == (True, True, False)
    assert (settled.template_method, settled.saved_state, settled.paired_save) == (True, True, True)
    assert pre.forward_defined_in == ("PARDWorker",)
    assert post.forward_defined_in == ("SpecWorkerBase",)
    assert not pre.dynamic_draft_len
    assert post.dynamic_draft_len


def test_argument_orders_are_read_from_the_signature(tree):
    eagle = features(tree(), "Eagle3OneModelWorker")
    pard = features(tree(), "PARDWorker")
    name = "sample_and_accept_draft_tokens"
    assert eagle.acceptance == (name, "input_ids", "logits", "attn_metadata", "spec_metadata")
    assert pard.acceptance == (name, "logits", "attn_metadata", "spec_metadata")


def test_the_doctor_lists_bases_and_workers_with_their_files(tree):
    verdicts = {v.name: v for v in doctor(tree("post-fix"))}
    assert [name for name, v in verdicts.items() if not v.drivable] == [
        "TrtllmAttentionMetadata",
        "DSAtrtllmAttentionMetadata",
        *WITHOUT_DRIVER,
    ]
    assert verdicts["DSAtrtllmAttentionMetadata"].reason == "no file defines it"
    assert verdicts["SpecWorkerBase"].reason.startswith("post-fix")
    assert verdicts["PARDWorker"].where.endswith("tensorrt_llm/_torch/speculative/pard.py")
    assert "max_draft_len only" in {v.name: v for v in doctor(tree("pre-fix"))}["PARDWorker"].reason


def test_the_doctor_gives_the_reason_why_not(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECFUZZ_TRTLLM_UNGUARDED", "1")
    unguarded = {v.name: v for v in doctor(tree("post-fix", pard="pre-fix"))}["PARDWorker"]
    assert unguarded.drivable
    assert "without the guard" in unguarded.reason
    monkeypatch.delenv("SPECFUZZ_TRTLLM_UNGUARDED")
    mixed = {v.name: v for v in doctor(tree("post-fix", pard="pre-fix"))}
    assert not mixed["PARDWorker"].drivable
    assert "the base's guard rejects it: PARDWorker overrides forward" in mixed["PARDWorker"].reason

    root = build(tmp_path)
    folder = root / "tensorrt_llm/_torch/speculative"
    (folder / "sa_worker.py").write_text("class SAWorker:\n    pass\n")
    (folder / "pard.py").write_text("import no_such_module\nclass PARDWorker:\n    pass\n")
    (folder / "eagle3.py").unlink()
    (root / "tensorrt_llm/_torch/attention/backends/trtllm.py").write_text("")
    reasons = {v.name: v.reason for v in doctor(root) if not v.drivable}
    assert {reasons.pop(name) for name in WITHOUT_DRIVER} == {"the suite has no driver for it"}
    assert reasons == {
        "Eagle3OneModelWorker": "no file defines it",
        "MTPEagleWorker": "no file defines it",
        "PARDWorker": "its module does not load: ModuleNotFoundError: No module named 'no_such_module'",
        "MTPEagleDynamicTreeWorker": "its module does not load: ImportError: no file defines a base of it",
        "SAWorker": "the suite has no driver for it",
        "TrtllmAttentionMetadata": "AttributeError: module 'tensorrt_llm._torch.attention.backends.trtllm' has no "
        "attribute 'TrtllmAttentionMetadata'; the suite's own, below the real AttentionMetadata, is driven instead",
        "DSAtrtllmAttentionMetadata": "no file defines it",
    }


def test_a_worker_that_verifies_in_a_way_of_its_own_is_refused(tmp_path):
    root = build(tmp_path)
    file = root / "tensorrt_llm/_torch/speculative/pard.py"
    file.write_text(file.read_text().replace("sample_and_accept_draft_tokens", "verify"))
    verdict = {v.name: v for v in doctor(root)}["PARDWorker"]
    assert not verdict.drivable
    assert "sample_and_accept_draft_tokens" in verdict.reason
    with pytest.raises(UsageError, match=r"config\.worker: PARDWorker cannot be driven, it verifies drafts by"):
        TensorrtLlmEngine(root, "cpu").open(Config(worker="PARDWorker", max_draft_len=2))


def test_a_worker_without_its_metadata_is_refused(tmp_path):
    root = build(tmp_path)
    file = root / "tensorrt_llm/_torch/speculative/pard.py"
    file.write_text(file.read_text().replace("PARDSpecMetadata", "OtherSpecMetadata"))
    with pytest.raises(UsageError, match=r"config\.worker: PARDWorker needs PARDSpecMetadata, which none of .*\.pard"):
        TensorrtLlmEngine(root, "cpu").open(Config(worker="PARDWorker", max_draft_len=2))


def test_members_added_to_an_older_base_are_part_of_the_verdict(tree):
    verdicts = {v.name: v for v in doctor(tree("post-fix", draft_target="settled"))}
    assert "allocate_context_prompt_lookahead" in verdicts["DraftTargetOneModelWorker"].reason


def test_values_are_passed_to_the_parameters_that_ask_for_them():
    def make(mapping, *, spec_config, extra=None, **rest):
        return mapping, spec_config, extra, rest

    assert arguments_for(make, {"mapping": 1, "spec_config": 2, "other": 3}) == {"mapping": 1, "spec_config": 2}
    with pytest.raises(UsageError, match="asks for 'mapping'"):
        arguments_for(make, {"spec_config": 2})

    @dataclass
    class Record:
        a: int
        b: int = 0

    assert fields_for(Record, {"a": 1, "c": 2}) == {"a": 1}
