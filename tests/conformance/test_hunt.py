"""A hunt finds each defect once, by itself, and names it afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.conformance.engine import ALL_CAPABILITIES, EngineTraits
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.search.forgiving import Cause, Forgiving, Means, find_causes
from blockstep.conformance.search.hunt import HuntResult, call_here, hunt
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.profiles import Profile, Quirk, get_profile
from blockstep.spec.vocabulary import (
    Config,
    Event,
    Observation,
    RejectCode,
    Rejected,
    Request,
    Reset,
    Schedule,
    Submit,
)

RELEASE = "vllm-0.19.1"


def follow_release(config: Config) -> SpecEngine:
    """An engine with the known defects of a release, and no others."""
    return SpecEngine(config, find(RELEASE))


def find(name: str) -> Profile:
    profile = get_profile(name)
    assert profile is not None
    return profile


@pytest.fixture(scope="module")
def found() -> HuntResult:
    return hunt(
        CheckOptions(engine="toy", max_events=60_000, profile=RELEASE), call_here(follow_release)
    )


def test_every_quirk_of_an_engine_is_found_and_named(found: HuntResult) -> None:
    assert {defect.causes for defect in found.defects} == {
        (Cause(Means.QUIRK, quirk),) for quirk in find(RELEASE).quirks
    }
    assert all(len(defect.shrunk.program.actions) <= 15 for defect in found.defects)


def test_a_policy_that_both_sides_follow_is_shown_though_nothing_is_wrong(
    found: HuntResult,
) -> None:
    ((lookout, seen),) = found.policies
    assert lookout.name == "urgent_waits_for_a_seat"
    priorities = {
        action.request.priority
        for action in seen.shrunk.program.actions
        if isinstance(action, Submit)
    }
    assert len(priorities) > 1


def test_a_hunt_is_told_in_three_ways(found: HuntResult) -> None:
    text = render_hunt(found)
    page = render_hunt_page(found, "blockstep hunt --engine toy")
    told = hunt_to_json(found)
    assert "#43569" in text
    assert "#43569" in page
    assert len(told["defects"]) == len(found.defects)  # type: ignore[arg-type]


def test_a_clean_engine_has_no_defect() -> None:
    result = hunt(CheckOptions(max_events=5_000), call_here(load_engine("host")))
    assert result.defects == []
    assert result.num_events >= 10_000


def test_what_nothing_known_accounts_for_is_found_once_and_counted() -> None:
    result = hunt(CheckOptions(max_events=5_000), call_here(load_engine("museum:leak-on-abort")))
    assert result.defects
    assert all(defect.causes == () for defect in result.defects)
    assert result.num_again.total() > 0


class Spared(SpecEngine):
    """Takes what never fits, and breaks at a forced reset; its adapter knows of both."""

    spare_unservable: bool = True
    traits = EngineTraits(workarounds={"spare_unservable": "what never fits is taken (#1)"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.taken = 0

    @property
    def judges(self) -> frozenset[RejectCode]:
        return frozenset() if self.spare_unservable else frozenset({RejectCode.NEVER_FITS})

    def capabilities(self) -> frozenset[str]:
        return ALL_CAPABILITIES - {"rejection"}

    def apply(self, event: Event) -> Observation:
        if event == Reset(True):
            raise KeyError("block")
        answer = super().apply(event)
        if isinstance(answer, Rejected) and isinstance(event, Submit):
            return super().apply(
                Submit(replace(event.request, prompt_token_ids=(0,), max_tokens=1))
            )
        return answer

    def declines(self, event: Event) -> str | None:
        return "forced reset (#2)" if event == Reset(True) else None


def test_workarounds_and_declined_events_are_off_until_they_account_for_something() -> None:
    result = hunt(CheckOptions(max_events=5_000), call_here(Spared))
    assert {defect.causes for defect in result.defects} == {
        (Cause(Means.WORKAROUND, "spare_unservable"),),
        (Cause(Means.DECLINED, "forced reset (#2)"),),
    }
    first = {defect.causes[0].means: defect.shrunk.findings[0] for defect in result.defects}
    assert first[Means.WORKAROUND].property_id == "P11"
    assert first[Means.DECLINED].kind is FindingKind.FAULT
    text = render_hunt(result)
    assert "what never fits is taken (#1)" in text
    assert "forced reset (#2)" in text


def test_forgiving_hands_flags_and_depth_on() -> None:
    forgiving = Forgiving(Spared, frozenset({Cause(Means.WORKAROUND, "spare_unservable")}))
    assert forgiving(Config(num_blocks=3)).judges == frozenset()
    assert Forgiving(Spared, frozenset())(Config(num_blocks=3)).judges


def test_what_passes_with_one_quirk_is_explained_by_it() -> None:
    config = Config(num_blocks=8, block_size=1, max_model_len=4)
    alive = Request("A", (0, 0), max_tokens=4, min_tokens=4)
    program = Program(config, (Submit(alive), *(Schedule(), Answer()) * 2))
    follows = find(RELEASE).quirks
    cause = Cause(Means.QUIRK, Quirk.MIN_TOKENS_MASK_LENGTH)
    assert find_causes(program, follow_release, frozenset(), follows) == (cause,)
    assert find_causes(program, follow_release, frozenset(), follows - {cause.name}) == ()
