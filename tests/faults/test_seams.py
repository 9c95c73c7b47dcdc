"""Seams: calls wrapped on instances."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from faults import SEAMS, Bracket, HarnessError, InjectedFault, Seam, SiteClass, Sites
from scenarios import Fault, FaultKind, ScenarioError, UsageError


class Metadata:
    """Stands for any object of an engine."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def prepare(self, value: int = 0, *, scale: int = 1) -> int:
        self.log.append(f"prepare {value}")
        return value * scale

    def on_update(self) -> None:
        self.log.append("on_update")

    def restore(self) -> None:
        self.log.append("restore")
        self.on_update()


def plan(site: str, occurrence: int = 1) -> Fault:
    return Fault(site=site, occurrence=occurrence, kind=FaultKind.OOM)


@pytest.fixture
def metadata() -> Metadata:
    return Metadata()


@pytest.fixture
def sites(metadata: Metadata) -> Iterator[Sites]:
    with Sites(seams(metadata)) as sites:
        yield sites


def seams(owner: Metadata) -> list[Seam]:
    return [
        Seam("metadata.prepare", owner, "prepare", SiteClass.LAUNCH),
        Seam("metadata.on_update", owner, "on_update", SiteClass.HOOK),
        Seam("metadata.restore", owner, "restore", SiteClass.RESTORE),
    ]


class TestWrappers:
    def test_arguments_and_result_go_through(self, metadata: Metadata) -> None:
        with Sites(seams(metadata)):
            assert metadata.prepare(3, scale=4) == 12
        assert metadata.log == ["prepare 3"]

    def test_the_signature_stays_visible(self, metadata: Metadata) -> None:
        before = inspect.signature(metadata.prepare)
        with Sites(seams(metadata)):
            assert inspect.signature(metadata.prepare) == before
            assert metadata.prepare.__name__ == "prepare"

    def test_other_instances_are_untouched(self, metadata: Metadata) -> None:
        other = Metadata()
        with Sites(seams(metadata)) as sites, sites.bracket(record=[SEAMS]) as bracket:
            other.prepare()
        assert bracket.counts == {}
        assert "prepare" not in vars(other)

    def test_closing_leaves_nothing_behind(self, metadata: Metadata) -> None:
        before = dict(vars(metadata))
        sites = Sites(seams(metadata))
        assert "prepare" in vars(metadata)
        sites.close()
        assert vars(metadata) == before
        sites.close()
        assert vars(metadata) == before

    def test_an_attribute_of_the_instance_is_put_back(self, metadata: Metadata) -> None:
        mine = metadata.__dict__["prepare"] = lambda value=0, scale=1: 77
        order = list(vars(metadata))
        with Sites(seams(metadata)):
            assert metadata.prepare() == 77
        assert vars(metadata)["prepare"] is mine
        assert list(vars(metadata)) == order

    def test_what_the_engine_put_in_place_meanwhile_stays(self, metadata: Metadata) -> None:
        with Sites(seams(metadata)):
            mine = metadata.__dict__["prepare"] = lambda: 5
        assert vars(metadata) == {"log": [], "prepare": mine}

    def test_closing_after_an_exception(self, metadata: Metadata) -> None:
        before = dict(vars(metadata))
        sites = Sites(seams(metadata))
        with pytest.raises(InjectedFault), sites, sites.bracket(plan("metadata.prepare")):
            metadata.prepare()
        assert vars(metadata) == before

    def test_a_wrapper_that_somebody_kept_is_inert_after_closing(self, metadata: Metadata) -> None:
        heard: list[str] = []
        seam = Seam("metadata.prepare", metadata, "prepare", None, before=lambda args, kwargs: heard.append("before"))
        with Sites([seam]):
            kept = metadata.prepare
        assert kept(2) == 2
        assert heard == []

    def test_two_seams_on_one_attribute_are_taken_off_in_reverse(self, metadata: Metadata) -> None:
        with Sites([*seams(metadata), Seam("again", metadata, "prepare", SiteClass.LAUNCH)]) as sites:
            with sites.bracket(record=[SEAMS]) as bracket:
                metadata.prepare()
            assert bracket.counts == {"metadata.prepare": 1, "again": 1}
        assert list(vars(metadata)) == ["log"]

    def test_a_frozen_dataclass_can_be_an_owner(self) -> None:
        @dataclass(frozen=True)
        class Frozen:
            def call(self) -> int:
                return 4

        frozen = Frozen()
        sites = Sites([Seam("frozen.call", frozen, "call", SiteClass.LAUNCH)])
        with pytest.raises(InjectedFault), sites, sites.bracket(plan("frozen.call")):
            frozen.call()
        assert vars(frozen) == {}

    def test_a_module_can_be_an_owner(self) -> None:
        module = ModuleType("ops")
        function = vars(module)["allreduce"] = lambda: "sum"
        sites = Sites([Seam("ops.allreduce", module, "allreduce", SiteClass.COLLECTIVE)])
        with pytest.raises(InjectedFault), sites, sites.bracket(plan("ops.allreduce")):
            module.allreduce()
        assert module.allreduce is function

    def test_a_missing_attribute_is_refused_and_nothing_stays_wrapped(self, metadata: Metadata) -> None:
        wrong = Seam("metadata.prepair", metadata, "prepair", SiteClass.LAUNCH)
        message = r"^seam metadata.prepair: Metadata has no attribute 'prepair'; did you mean 'prepare'\?$"
        with pytest.raises(UsageError, match=message):
            Sites([*seams(metadata), wrong])
        assert list(vars(metadata)) == ["log"]

    def test_an_owner_without_a_dict_is_refused(self) -> None:
        with pytest.raises(UsageError, match="seam x: list has no __dict__"):
            Sites([Seam("x", [], "append", SiteClass.LAUNCH)])


class TestCopies:
    """``copy.copy`` takes wrappers along that call the original."""

    def test_an_adopted_copy_has_wrappers_of_its_own(self, metadata: Metadata, sites: Sites) -> None:
        twin = copy.copy(metadata)
        twin.log = []
        sites.adopt(twin, metadata)
        with sites.bracket(record=[SEAMS]) as bracket:
            twin.prepare(8)
        assert (twin.log, metadata.log) == (["prepare 8"], [])
        assert bracket.counts == {"metadata.prepare": 1}
        sites.close()
        assert list(vars(twin)) == ["log"]
        assert list(vars(metadata)) == ["log"]

    def test_a_copy_made_without_the_dict_is_adopted_as_well(self, metadata: Metadata, sites: Sites) -> None:
        twin = Metadata()
        sites.adopt(twin, metadata)
        with pytest.raises(InjectedFault), sites.bracket(plan("metadata.prepare")):
            twin.prepare()


class TestBracket:
    @pytest.mark.parametrize("calls", [0, 1, 7])
    def test_counts_are_the_number_of_calls(self, metadata: Metadata, sites: Sites, calls: int) -> None:
        with sites.bracket(record=[SEAMS]) as bracket:
            for _ in range(calls):
                metadata.prepare()
        assert bracket.counts == ({"metadata.prepare": calls} if calls else {})

    def test_the_fault_strikes_before_the_call_at_its_occurrence(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(plan("metadata.prepare", 3)) as bracket:
            metadata.prepare(1)
            metadata.prepare(2)
            with pytest.raises(InjectedFault) as caught:
                metadata.prepare(3)
            metadata.prepare(4)
        assert metadata.log == ["prepare 1", "prepare 2", "prepare 4"]
        assert (bracket.fired, bracket.raised) == (1, caught.value)

    def test_nothing_happens_outside_the_bracket(self, metadata: Metadata, sites: Sites) -> None:
        metadata.prepare()
        with sites.bracket(plan("metadata.prepare", 2), [SEAMS]) as bracket:
            metadata.prepare()
        metadata.prepare()
        assert (bracket.counts, bracket.fired) == ({"metadata.prepare": 1}, 0)

    def test_each_bracket_counts_afresh(self, metadata: Metadata, sites: Sites) -> None:
        for _ in range(3):
            with sites.bracket(plan("metadata.prepare", 2), [SEAMS]) as bracket:
                metadata.prepare()
            assert (bracket.counts, bracket.fired) == ({"metadata.prepare": 1}, 0)

    def test_a_new_bracket_opens_after_one_that_failed(self, metadata: Metadata, sites: Sites) -> None:
        with pytest.raises(InjectedFault), sites.bracket(plan("metadata.prepare")):
            metadata.prepare()
        metadata.prepare()
        with sites.bracket(record=[SEAMS]) as bracket:
            metadata.prepare()
        assert bracket.counts == {"metadata.prepare": 1}

    def test_one_bracket_at_a_time(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(record=[SEAMS]) as bracket:
            with pytest.raises(RuntimeError, match="open already"), sites.bracket():
                pass
            metadata.prepare()
        assert bracket.counts == {"metadata.prepare": 1}

    def test_sessions_on_different_objects_are_independent(self, metadata: Metadata) -> None:
        other = Metadata()
        with Sites(seams(metadata)) as first, Sites(seams(other)) as second:
            with first.bracket(plan("metadata.prepare", 2), [SEAMS]) as outer:
                metadata.prepare()
                with second.bracket(plan("metadata.prepare", 9), [SEAMS]) as inner:
                    other.prepare()
                    with pytest.raises(InjectedFault):
                        metadata.prepare()
        assert (outer.counts, outer.fired) == ({"metadata.prepare": 2}, 1)
        assert (inner.counts, inner.fired) == ({"metadata.prepare": 1}, 0)

    def test_a_seam_that_calls_itself_counts_each_call(self) -> None:
        class Model:
            def forward(self, depth: int) -> int:
                return self.forward(depth - 1) + 1 if depth else 0

        model = Model()
        with Sites([Seam("model.forward", model, "forward", SiteClass.LAUNCH)]) as sites:
            with sites.bracket(record=[SEAMS]) as bracket:
                assert model.forward(3) == 3
        assert bracket.counts == {"model.forward": 4}

    def test_a_fault_at_an_unknown_seam_gets_the_closest_name(self, metadata: Metadata, sites: Sites) -> None:
        message = r"^fault.site: no seam is called 'metadata.prepaer'; did you mean 'metadata.prepare'\?$"
        with pytest.raises(ScenarioError, match=message), sites.bracket(plan("metadata.prepaer")):
            pass
        with sites.bracket(plan("metadata.prepare")):
            pass


class TestObservation:
    def listening(self, metadata: Metadata, site_class: SiteClass | None) -> Seam:
        log = metadata.log
        return Seam(
            "metadata.prepare",
            metadata,
            "prepare",
            site_class,
            before=lambda args, kwargs: log.append(f"before {args} {kwargs}"),
            after=lambda result, args, kwargs: log.append(f"after {result} {args} {kwargs}"),
        )

    @pytest.mark.parametrize("bracketed", [False, True])
    def test_order_is_before_call_after(self, metadata: Metadata, bracketed: bool) -> None:
        with Sites([self.listening(metadata, SiteClass.LAUNCH)]) as sites:
            if bracketed:
                with sites.bracket(record=[SEAMS]):
                    metadata.prepare(2, scale=3)
            else:
                metadata.prepare(2, scale=3)
        assert metadata.log == ["before (2,) {'scale': 3}", "prepare 2", "after 6 (2,) {'scale': 3}"]

    def test_before_comes_ahead_of_the_fault_and_after_not_at_all(self, metadata: Metadata) -> None:
        with Sites([self.listening(metadata, SiteClass.LAUNCH)]) as sites:
            with pytest.raises(InjectedFault), sites.bracket(plan("metadata.prepare")):
                metadata.prepare(2)
        assert metadata.log == ["before (2,) {}"]

    def test_an_observed_seam_is_no_site(self, metadata: Metadata) -> None:
        with Sites([self.listening(metadata, None), *seams(metadata)[1:]]) as sites:
            with sites.bracket(record=[SEAMS]) as bracket:
                metadata.prepare()
            assert bracket.counts == {}
            with pytest.raises(ScenarioError, match="no seam is called"), sites.bracket(plan("metadata.prepare")):
                pass

    def test_what_a_listener_calls_is_not_counted(self, metadata: Metadata) -> None:
        seam = Seam("metadata.restore", metadata, "restore", None, before=lambda args, kwargs: metadata.on_update())
        with Sites([seam, *seams(metadata)[:2]]) as sites:
            with sites.bracket(plan("metadata.on_update", 2), [SEAMS], double=True) as bracket:
                metadata.restore()
        assert metadata.log == ["on_update", "restore", "on_update"]
        assert (bracket.counts, bracket.fired) == ({"metadata.on_update": 1}, 0)


class TestHarnessErrors:
    def broken(self, metadata: Metadata, place: str) -> Seam:
        def fail(*_: Any) -> None:
            raise KeyError("no such field")

        return Seam("metadata.prepare", metadata, "prepare", SiteClass.LAUNCH, **{place: fail})

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_a_failing_listener_is_no_failure_of_the_engine(self, metadata: Metadata, place: str) -> None:
        with Sites([self.broken(metadata, place)]) as sites:
            with pytest.raises(HarnessError, match="a listener of metadata.prepare failed: KeyError") as caught:
                with sites.bracket():
                    try:
                        metadata.prepare()
                    except Exception:
                        metadata.log.append("tolerated")
        assert "tolerated" not in metadata.log
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_lost_device_is_the_engines_failure_whoever_is_told(self, metadata: Metadata) -> None:
        def waits(*_: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        seam = Seam("metadata.prepare", metadata, "prepare", SiteClass.LAUNCH, after=waits)
        with Sites([seam]) as sites, sites.bracket():
            with pytest.raises(RuntimeError, match="^CUDA error"):
                metadata.prepare()

    def test_it_surfaces_although_the_engine_swallowed_it(self, metadata: Metadata) -> None:
        with Sites([self.broken(metadata, "before")]) as sites:
            with pytest.raises(HarnessError), sites.bracket():
                try:
                    metadata.prepare()
                except BaseException:
                    metadata.log.append("swallowed")
        assert metadata.log == ["swallowed"]

    def test_it_surfaces_although_the_engine_raised_another(self, metadata: Metadata) -> None:
        def step(bracket: Bracket) -> None:
            try:
                metadata.prepare()
            finally:
                raise RuntimeError("cleanup failed")

        with Sites([self.broken(metadata, "before")]) as sites:
            with pytest.raises(HarnessError), sites.bracket() as bracket:
                step(bracket)

    def test_it_surfaces_once(self, metadata: Metadata) -> None:
        with Sites([self.broken(metadata, "before")]) as sites:
            with pytest.raises(HarnessError), sites.bracket():
                metadata.prepare()
            with sites.bracket():
                pass

    def test_outside_a_bracket_as_well(self, metadata: Metadata) -> None:
        with Sites([self.broken(metadata, "before")]), pytest.raises(HarnessError):
            metadata.prepare()


class TestRestore:
    def test_restore_code_is_no_site(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(record=[SEAMS]) as bracket:
            metadata.restore()
            metadata.on_update()
        assert metadata.log == ["restore", "on_update", "on_update"]
        assert bracket.counts == {"metadata.on_update": 1}

    def test_a_hook_called_by_restore_code_does_not_fail(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(plan("metadata.on_update")) as bracket:
            metadata.restore()
            assert bracket.fired == 0
            with pytest.raises(InjectedFault):
                metadata.on_update()

    def test_a_fault_in_restore_code_has_to_be_asked_for(self, metadata: Metadata, sites: Sites) -> None:
        message = r"^fault.site: 'metadata.restore' restores state .*; ask for double faults$"
        with pytest.raises(ScenarioError, match=message), sites.bracket(plan("metadata.restore")):
            pass

    def test_double_faults_reach_restore_code_and_what_it_calls(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(record=[SEAMS], double=True) as bracket:
            metadata.restore()
        assert bracket.counts == {"metadata.restore": 1, "metadata.on_update": 1}
        with pytest.raises(InjectedFault), sites.bracket(plan("metadata.restore"), double=True):
            metadata.restore()
        with pytest.raises(InjectedFault), sites.bracket(plan("metadata.on_update"), double=True):
            metadata.restore()
        with sites.bracket(record=[SEAMS]) as bracket:
            metadata.restore()
        assert bracket.counts == {}

    def test_a_shelter_hides_every_site_and_nests(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(plan("metadata.prepare"), [SEAMS]) as bracket:
            with sites.shelter():
                metadata.prepare()
                with sites.shelter():
                    metadata.prepare()
                metadata.prepare()
            assert bracket.counts == {}
            with pytest.raises(InjectedFault):
                metadata.prepare()

    def test_a_shelter_ends_with_an_exception(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(record=[SEAMS]) as bracket:
            with pytest.raises(ValueError, match="inside"), sites.shelter():
                raise ValueError("inside")
            metadata.prepare()
        assert bracket.counts == {"metadata.prepare": 1}

    def test_no_shelter_from_double_faults(self, metadata: Metadata, sites: Sites) -> None:
        with sites.bracket(record=[SEAMS], double=True) as bracket:
            with sites.shelter():
                metadata.prepare()
        assert bracket.counts == {"metadata.prepare": 1}

    def test_a_shelter_outside_a_bracket_does_nothing(self, metadata: Metadata, sites: Sites) -> None:
        with sites.shelter():
            metadata.prepare()
        with sites.bracket(record=[SEAMS]) as bracket:
            metadata.prepare()
        assert bracket.counts == {"metadata.prepare": 1}
