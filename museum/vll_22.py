"""VLL-22: the sibling of TRT-70, found independently in another engine; here the drafter is a model of its own."""

from __future__ import annotations

from museum.bug import DRAFT_TARGET, bug
from museum.trt_70 import ingestion_skipped

bug(
    "VLL-22",
    kind="K8",
    workers=(DRAFT_TARGET,),
    title="The draft model is not given the tokens of a step with draft length 0",
    reference="vllm-metal #716, #734",
    caught_by=("substeps-in-order", "kv-content-equals-reference"),
)(ingestion_skipped)
