"""Findings as stand-alone files: they fail where the bug is, with the message, and pass where it is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.source import open_source
from fuzz import cli, exported
from fuzz.export import export
from fuzz.exported import WIDTH
from fuzz.store import Store
from fuzz.subject import Subject
from museum import BUGS
from scenarios import (
    Config,
    Context,
    Fault,
    FaultKind,
    Generation,
    Phase,
    Request,
    Scenario,
    Step,
    UsageError,
    check,
    scenario_to_json,
)
from tests.engines.tensorrt_llm.cases import KMAX, failing, life
from tests.fixtures.tensorrt_llm_tree import LAYOUTS, build
from tests.fuzz.samples import FINDING

SNAPSHOTS = Path(__file__).parent / "snapshots"
ROOT = Path(__file__).parents[2]
Trees = Callable[[str], Path]

EDITS = {
    # One token too many on the way of a context, and of all that is captured; a count that is not what was accepted.
    "wrong": [
        ("kv_lens_cuda[:contexts] += 1", "kv_lens_cuda[:contexts] += 2"),
        ("rows] -= length -", "rows] += int(torch.cuda.is_current_stream_capturing()) - length +"),
        ('"new_tokens_lens": counts', '"new_tokens_lens": counts + 1'),
    ],
    # A message that could end a docstring; wrong only in an engine that tells the metadata more than a file does.
    "quotes": [("        drafts = []\n", '        raise RuntimeError(\'"""\\\\\')\n')],
    "hidden": [("kv_lens_cuda[:contexts] += 1", "kv_lens_cuda[:contexts] += 1 + bool(attn_metadata.prompt_lens)")],
}
"""Errors in ``draft_target.py``, which is the linear loop of Eagle too."""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """``trees(name)`` is the miniature source tree of an era, or a settled one with the ``EDITS`` of that name."""
    built: dict[str, Path] = {}

    def tree(name: str) -> Path:
        if name not in built:
            layout = LAYOUTS[name == "pre-fix"]
            root = build(tmp_path_factory.mktemp(name), "settled" if name in EDITS else name, layout)
            [path] = root.rglob("draft_target.py")
            for old, new in EDITS.get(name, ()):
                text = path.read_text()
                assert old in text
                path.write_text(text.replace(old, new))
            built[name] = root
        return built[name]

    return tree


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_TRTLLM_UNGUARDED", "1")
    monkeypatch.delenv("SPECFUZZ_TRTLLM_SOURCE", raising=False)
    monkeypatch.delenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", raising=False)


def scenario(worker: str, *steps: Step, prompts: tuple[int, ...] = (), **config: Any) -> Scenario:
    requests = tuple(Request(id=i, prompt_len=n) for i, n in enumerate(prompts))
    config = {"max_draft_len": max(step.draft_len for step in steps), **config}
    return check(Scenario(config=Config(worker=worker, **config), requests=requests, steps=steps))


def fault(site: str, occurrence: int = 1, kind: str = "oom") -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=FaultKind(kind))


def dummy(past: int, accept: int) -> Generation:
    return Generation(request=None, past=past, accept=accept)


DUMMY = Context(request=None, chunk=5)
CONTEXT = Step(draft_len=2, contexts=(Context(request=0, chunk=2),))
LEAK = scenario(
    "PARDWorker",
    Step(draft_len=1, phase=Phase.WARMUP, contexts=(DUMMY,), fault=fault("draft_model.forward")),
    Step(draft_len=1, contexts=(Context(request=0, chunk=1),)),
    prompts=(1,),
)
MIXED_WARMUP = Step(draft_len=2, phase=Phase.WARMUP, contexts=(DUMMY,), generations=(dummy(10, 2),))
CAPTURE = Step(draft_len=2, phase=Phase.CAPTURE, generations=(dummy(10, 3), dummy(4, 1)))


@dataclass
class Case:
    """A scenario that violates ``invariant`` in ``tree``, and what the file says of it."""

    name: str
    tree: str
    scenario: Scenario
    invariant: str
    says: str

    def export(self, trees: Trees, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(trees(self.tree)))
        return export(Subject(name="it", scenario=self.scenario, engine="tensorrt_llm"), self.invariant)


CASES = [
    Case(
        "saved_state",
        "pre-fix",
        LEAK,
        "saved-state-empty",
        "steps[0] failed: _saved_tensors is ['_seq_lens', '_seq_lens_cuda'] and should be []",
    ),
    Case(
        "identity",
        "pre-fix",
        LEAK,
        "restored-identity",
        "steps[0] failed: ['_seq_lens', '_seq_lens_cuda'] are not the tensors that they were before the forward",
    ),
    Case("exception", "pre-fix", LEAK, "steps-complete", "steps[1] failed: AssertionError: "),
    Case(
        "layout",
        "post-fix",
        scenario("MTPEagleWorker", CONTEXT, prompts=(2,)),
        "restored-layout",
        "steps[0] restored: num_contexts is 0 and should be 1",
    ),
    Case(
        "torch_call",
        "post-fix",
        scenario(
            "PARDWorker",
            Step(draft_len=1, phase=Phase.WARMUP, generations=(dummy(3, 2),), fault=fault("torch.sub_")),
        ),
        "kv-lens-balanced",
        "steps[0] failed: kv_lens_cuda is [6] and should be one of [[5], [7]]",
    ),
    Case(
        "draft_calls",
        "post-fix",
        scenario(
            "MTPEagleWorker",
            replace(CONTEXT, contexts=(Context(request=0, chunk=2, agree=2),)),
            Step(draft_len=0, generations=(Generation(request=0),)),
            prompts=(2,),
        ),
        "substeps-in-order",
        "steps[1] restored: draft calls is 0 and should be 1",
    ),
    Case(
        "graph",
        "pre-fix",
        scenario("Eagle3OneModelWorker", replace(CAPTURE, fault=fault("draft_model.logits", 5))),
        "saved-state-empty",
        "steps[0] failed: _saved_tensors is ['_seq_lens', '_seq_lens_cuda'] and should be []",
    ),
    Case(
        "in_capture",
        "wrong",
        scenario("MTPEagleWorker", CAPTURE),
        "kv-lens-balanced",
        "steps[0] draft[1] run 2: kv_lens_cuda is [15, 7] and should be [14, 6]",
    ),
    Case(
        "hook",
        "pre-fix",
        scenario("Eagle3OneModelWorker", replace(MIXED_WARMUP, fault=fault("attn_metadata.on_update", 3))),
        "saved-state-empty",
        "steps[0] failed: _saved_tensors is ['_seq_lens', '_seq_lens_cuda'] and should be []",
    ),
    Case(
        "in_draft",
        "wrong",
        scenario("DraftTargetOneModelWorker", CONTEXT, prompts=(2,)),
        "kv-lens-balanced",
        "steps[0] draft[1]: kv_lens_cuda is [4] and should be [3]",
    ),
    Case(
        "output",
        "wrong",
        scenario("DraftTargetOneModelWorker", replace(CONTEXT, draft_len=1), prompts=(2,)),
        "new-tokens-plumbed",
        "steps[0] restored: new_tokens_lens is [2] and should be [1]",
    ),
]


def outcome(text: str, root: Path, worker: str) -> str:
    """What the only test of a file says on a tree; empty if it passes."""
    upstream = Upstream(open_source(root), emulated=True, unguarded=True)
    with upstream.active():
        upstream.load(worker)
        namespace: dict[str, Any] = {"__name__": "exported"}
        exec(compile(text, "exported", "exec"), namespace)
        [test] = [value for name, value in namespace.items() if name.startswith("test_")]
        try:
            test()
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.exhaustive(every=3, first=2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_file_fails_with_the_bug_and_passes_without(
    case: Case, trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = case.export(trees, monkeypatch)
    worker = case.scenario.config.worker
    assert outcome(text, trees(case.tree), worker) == case.says
    assert outcome(text, trees("settled"), worker) == ""
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(text.splitlines()) <= (212 if "GRAPH" in text else 200)


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def kept(name: str, text: str) -> None:
    """Compare with the snapshot, a Python file so that the linter sees it."""
    path = SNAPSHOTS / f"export_{name}.py"
    if os.environ.get("SNAPSHOTS") == "write":
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["saved_state", "identity", "torch_call", "graph", "in_draft", "layout"])
def test_the_text(name: str, trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    text = case(name).export(trees, monkeypatch)
    assert case(name).export(trees, monkeypatch) == text
    kept(name, text)


LOADED = """
from engines.tensorrt_llm.loader import Upstream
from engines.tensorrt_llm.source import open_source

upstream = Upstream(open_source({root!r}), emulated=True, unguarded=True)
active = upstream.active()
active.__enter__()
for name in ("PARDWorker", "MTPEagleWorker"):
    assert upstream.load(name)


def pytest_unconfigure():
    active.__exit__(None, None, None)
"""
"""Stands for an installed package."""


@pytest.mark.exhaustive
def test_pytest_runs_the_files(trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import from ``tensorrt_llm`` alone, here a miniature tree's, in the package layout that it has."""
    shown = [case("saved_state"), case("layout")]
    for each in shown:
        (tmp_path / f"test_{each.name}.py").write_text(each.export(trees, monkeypatch))
    (tmp_path / "conftest.py").write_text(LOADED.format(root=str(trees("pre-fix"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    # That they pass without the bug is asserted of each case, in this process.
    assert "2 failed in " in done.stdout
    for each in shown:
        assert f"AssertionError: {each.says}" in done.stdout


def test_passages_are_counted_inside_the_forward(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    # Preparing the batch calls the hook twice, and much of torch.
    assert 'fault=partial(failing_call, Metadata, "on_update", 1),' in case("hook").export(trees, monkeypatch)
    torch_call = case("torch_call").export(trees, monkeypatch)
    assert 'fault=partial(FailingTorchCall, "sub_", 1),' in torch_call


def test_replays_are_left_out(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    leak = failing(life("PARDWorker"), 5, "draft_model.forward", kind="error")
    text = Case("", "pre-fix", leak, "saved-state-empty", "").export(trees, monkeypatch)
    shown = re.findall(r"# steps\[(\d)\]: (\w+)$", text, re.MULTILINE)
    assert shown == [("0", "warmup"), ("1", "capture"), ("2", "eager"), ("3", "eager"), ("5", "eager")]
    assert f"MAX_DRAFT_LEN, MAX_TOTAL_DRAFT_TOKENS = {KMAX}, {2 * KMAX - 1}\n" in text
    assert outcome(text, trees("settled"), "PARDWorker") == ""


def test_long_lists_take_a_line_per_entry(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = tuple(Context(request=None, chunk=200 + i) for i in range(20))
    step = Step(draft_len=1, phase=Phase.WARMUP, contexts=contexts)
    many = scenario("MTPEagleWorker", step, max_num_requests=20, max_num_tokens=8192, max_seq_len=512, num_blocks=4096)
    text = Case("", "post-fix", many, "restored-layout", "").export(trees, monkeypatch)
    assert "        seq_lens=[\n            200,\n            201,\n" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_no_text_ends_the_docstring(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    says = 'steps[0] failed: RuntimeError: """\\'
    quotes = Case("", "quotes", case("in_draft").scenario, "steps-complete", says)
    text = quotes.export(trees, monkeypatch)
    assert outcome(text, trees("quotes"), "DraftTargetOneModelWorker") == says
    assert "    steps[0] failed: RuntimeError: '''\\\\\n" in text


def test_what_comes_after_is_shown_where_the_invariant_itself_cannot_be(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which class owns ``forward`` is no field; that something stays saved is."""
    text = Case("", "pre-fix", LEAK, "forward-not-overridden", "").export(trees, monkeypatch)
    assert text.startswith('"""PARDWorker violates saved-state-empty.\n')
    assert "is about\nforward-not-overridden; of that run" in text


def test_a_defect_of_the_portable_engine(trees: Trees) -> None:
    bug = BUGS["TRT-03/MTPEagleWorker"]
    subject = Subject(name="it", scenario=case("layout").scenario, bug=bug.id, seeded=True)
    text = export(subject)
    assert f"with defect {bug.id} seeded" in " ".join(text.split())
    assert "The file has not been run on TensorRT-LLM." in " ".join(text.split())
    assert outcome(text, trees("post-fix"), "MTPEagleWorker") == case("layout").says
    assert outcome(text, trees("settled"), "MTPEagleWorker") == ""


def refused(scenario: Scenario, invariant: str | None = None, **subject: Any) -> str:
    """The line that says why there is no file."""
    with pytest.raises(UsageError) as error:
        export(Subject(name="it", scenario=scenario, **subject), invariant)
    assert "\n" not in str(error.value)
    return str(error.value)


USE = "; use `specfuzz replay it`"


@pytest.mark.parametrize(
    ("site", "why"),
    [
        (
            "kv_cache_manager.prepare_resources@1",
            "kv_cache_manager.prepare_resources, which is not in the worker's forward",
        ),
        ("attn_metadata.on_update@2", "attn_metadata.on_update@2:oom, which is not in the worker's forward"),
        ("torch.tensor@1", "torch.tensor, counted in another engine than upstream's"),
    ],
)
def test_a_fault_that_no_file_can_cause(site: str, why: str) -> None:
    name, _, occurrence = site.partition("@")
    warmup = Step(draft_len=1, phase=Phase.WARMUP, contexts=(DUMMY,), fault=fault(name, int(occurrence)))
    leaks = scenario("MTPEagleWorker", warmup, case("layout").scenario.steps[0], prompts=(2,))
    line = refused(leaks, bug="TRT-03/MTPEagleWorker", seeded=True)
    assert line == f"it: cannot be exported: steps[0] fails at {why}{USE}"


def test_a_torch_call_outside_the_forward(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(trees("post-fix")))
    warmup = Step(draft_len=1, phase=Phase.WARMUP, contexts=(DUMMY,), fault=fault("torch.tensor"))
    leaks = scenario("MTPEagleWorker", warmup, case("layout").scenario.steps[0], prompts=(2,))
    assert "fails at torch.tensor@1:oom, which is not in the worker's forward" in refused(leaks, engine="tensorrt_llm")


def test_what_needs_the_kv_cache(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        Step(draft_len=2, contexts=(Context(request=0, chunk=1),)),
        Step(draft_len=0, generations=(Generation(request=0),)),
        Step(draft_len=1, generations=(Generation(request=0, agree=1),)),
        Step(draft_len=1, generations=(Generation(request=0),)),
    )
    ingestion = scenario("MTPEagleWorker", *steps, prompts=(1,))
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(trees("post-fix")))
    for engine in ({"engine": "tensorrt_llm"}, {"bug": "TRT-70/MTPEagleWorker", "seeded": True}):
        for slug, field in (("kv-content-equals-reference", "target_kv"), ("acceptance-follows-agreement", "num_acc")):
            line = refused(ingestion, slug, **engine)
            assert line.startswith(f"it: cannot be exported: {slug} is about {field}")
            assert line.endswith(f", and from there on a file could read nothing wrong{USE}")


def test_what_shows_in_the_engine_alone(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFUZZ_TRTLLM_SOURCE", str(trees("hidden")))
    line = refused(case("in_draft").scenario, "kv-lens-balanced", engine="tensorrt_llm")
    why = "without the executor and the KV cache kv-lens-balanced does not show: the file passes"
    assert line == f"it: cannot be exported: {why}{USE}"


def test_other_reasons_why_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = case("layout").scenario
    assert refused(sound) == (
        "it: holds on engine portable, so there is nothing to export; name one that it fails on with --engine"
    )
    defect = {"bug": "TRT-03/MTPEagleWorker", "seeded": True}
    assert refused(sound, "output-lossless", **defect).startswith(
        "--invariant: output-lossless holds in it; write one of"
    )
    sparse = scenario("MTPEagleWorker", CONTEXT, prompts=(2,), attention_backend="DSA", index_topk=2)
    assert "can set the fields of TrtllmAttentionMetadata, not those of DSAtrtllmAttentionMetadata" in refused(sparse)
    forced = scenario("MTPEagleWorker", CONTEXT, prompts=(2,), force_num_accepted_tokens=1.0)
    assert refused(forced).startswith(
        "it: cannot be exported: config.force_num_accepted_tokens is set, and a file leaves out force_num_accepted_tok"
    )
    monkeypatch.delitem(exported.MODES, "PARDWorker")
    assert refused(LEAK).startswith("it: cannot be exported: a file can drive Eagle3OneModelWorker, ")
    assert "DraftTargetOneModelWorker, not PARDWorker; " in refused(LEAK)
    monkeypatch.undo()
    unfired = replace(LEAK.steps[0], fault=fault("draft_model.forward", 9))
    assert "specfuzz replay it" in refused(replace(LEAK, steps=(unfired,)))


def test_a_prompt_that_reuses_pages_has_their_tokens_cached() -> None:
    prompts = (Request(id=0, prompt_len=6), Request(id=1, prompt_len=7, prefix_of=0, prefix_len=6))
    fill, again = (Context(request=i, chunk=r.prompt_len) for i, r in enumerate(prompts))
    steps = (
        Step(draft_len=1, contexts=(fill,)),
        Step(draft_len=1, contexts=(again,), fault=fault("draft_model.forward")),
    )
    config = Config(worker="PARDWorker", max_draft_len=1, enable_block_reuse=True)
    leak = check(Scenario(config=config, requests=prompts, steps=steps))
    text = export(Subject(name="it", scenario=leak, bug="TRT-01/PARDWorker", seeded=True), "saved-state-empty")
    assert "cached=[4]" in text, text


def test_the_command(
    trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it.json").write_text(json.dumps(scenario_to_json(LEAK)))
    source = str(trees("pre-fix"))
    arguments = ["export", "it.json", "--engine", "tensorrt_llm", "--trtllm-source", source]
    arguments += ["--invariant", "saved-state-empty"]
    assert cli.invoke(arguments) == 0
    shown = capsys.readouterr()
    kept("saved_state", shown.out)
    assert cli.invoke([*arguments, "--output", "deep/test_it.py"]) == 0
    kept("saved_state", Path("deep/test_it.py").read_text())
    assert capsys.readouterr().out == (
        "deep/test_it.py: written; `pytest deep/test_it.py` fails where tensorrt_llm has the bug\n"
    )


def test_the_command_takes_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SPECFUZZ_HOME", str(tmp_path))
    bug = "TRT-03/MTPEagleWorker"
    finding = replace(FINDING, scenario=case("layout").scenario, engine="portable", bug=bug)
    Store().save(finding)
    assert cli.invoke(["export", finding.id]) == 0
    assert f"Exported by specfuzz from finding {finding.id}," in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    ["nosuch", "nosuch.json", "bad.json", "it.json --engine portible", "it.json --invariant nosuch", "it.json"],
)
def test_a_mistake_gets_one_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"version": 1, "confg": {}}')
    Path("it.json").write_text(json.dumps(scenario_to_json(case("layout").scenario)))
    assert cli.invoke(["export", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
