"""Each scenario of docs/upstream-findings.md shows on the miniature tree what the page says it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engines import run
from engines.tensorrt_llm import TensorrtLlmEngine
from invariants import verify
from scenarios import loads

PAGE = Path(__file__).parents[3] / "docs" / "upstream-findings.md"
FINDING = re.compile(r"^## \d+\. (.*?)\n\n(Worker .*?)\n\n```json\n(.*?)```", re.DOTALL | re.MULTILINE)
METADATA = {"sparse metadata before PR #16925": "stale", "sparse metadata after PR #16925": "fixed"}


def findings():
    for title, facts, scenario in FINDING.findall(PAGE.read_text(encoding="utf-8")):
        facts = " ".join(facts.split())
        yield pytest.param(facts, scenario, id=title)


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("facts", "scenario"), [*findings()])
def test_the_scenario_violates_what_the_page_says(tree, facts, scenario):
    era = "pre-fix" if "before the fix" in facts else "post-fix"
    metadata = next((name for phrase, name in METADATA.items() if phrase in facts), None)
    engine = TensorrtLlmEngine(
        tree(era, metadata=metadata),
        device="cpu",
        separate_draft_kv_cache="without a separate draft cache" not in facts,
    )
    scenario = loads(scenario)
    assert f"Worker `{scenario.config.worker}`" in facts
    verdict = verify(scenario, lambda s: run(engine, s))
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", facts))
    assert named
    assert named <= {v.invariant for v in verdict.violations}


def test_there_are_eighteen_of_them():
    assert len(list(findings())) == 18
