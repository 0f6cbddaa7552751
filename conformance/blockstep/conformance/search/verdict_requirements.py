"""Floor: what a verdict needs besides the absence of findings (architecture D9).

A canary that was caught, and the coverage goals that a run of this size must have reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from blockstep.conformance.draw.presets import MAX_DEPTH, REAL, TINY
from blockstep.conformance.engine import (
    BadEngineError,
    Deviation,
    EngineFactory,
    EngineTraits,
    Renamed,
    Safety,
    SamePlans,
    Setting,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.judge.coverage_goals.core import PREEMPTION
from blockstep.conformance.judge.legal import list_legal
from blockstep.conformance.lockstep.quirks import (
    UNMET,
    UNMET_WITH,
    get_feature,
    is_spared,
    list_goals,
    name_applied,
    name_spared,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE
from blockstep.conformance.protocol.features import (
    BY_NAME,
    FEATURES,
    LATE,
    PRIORITY,
    UsageError,
    find_lacking,
    find_policy,
    is_reachable,
    list_policies,
    list_wholes,
)
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import fit_depth, run_episode
from blockstep.conformance.search.feature_probe import (
    find_declined_features,
    find_unreachable_goals,
    list_required_goals,
)
from blockstep.conformance.search.options import CheckOptions, find_profile, get_wish
from blockstep.spec.profiles import STRICT, Quirk, get_profile
from blockstep.spec.vocabulary import Policy

CANARY = "blockstep.conformance.lockstep.canary:CanaryEngine"
SAFETY_CANARY = "blockstep.conformance.lockstep.canary:SafetyCanary"
"""Canary of a run that is not compared with the spec."""
CANARIES: Mapping[str, str] = {
    "exact": CANARY,
    Renamed.name: "blockstep.conformance.lockstep.canary:RenamedCanary",
    SamePlans.name: "blockstep.conformance.lockstep.canary:PlanCanary",
    Safety.name: SAFETY_CANARY,
}
"""Canaries, by the equivalence of the run that must catch them."""
CANARY_EPISODES = 50


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine that a check needs. Small: it crosses process boundaries."""

    max_depth: int
    lacking: tuple[str, ...]
    """Names of features that the engine lacks, or that its adapter removes."""
    equivalence: str
    """Equivalence between engine and spec."""
    not_asked: tuple[str, ...]
    """Aspects that this equivalence does not compare, in words."""
    situations: tuple[str, ...] | None
    """Goals that a check must reach; None: those that the engine's features make possible."""
    out_of_reach: frozenset[str]
    """Goals that this engine cannot reach."""
    owed: frozenset[str] | None = None
    """Goals among which the features choose, if not all can be observed; None: all."""
    notes: tuple[str, ...] = ()
    """Notes to be printed with a run."""
    settings: tuple[Setting, ...] = ()
    """Settings with which the engine differs from its defaults."""
    deviations: Mapping[str, str] = field(default_factory=dict)
    """Summaries of the deviations that the adapter declares, by name."""
    stale: tuple[str, ...] = ()
    """Deviations that their programs no longer show."""


def read_engine_facts(options: CheckOptions, make_engine: EngineFactory) -> EngineFacts:
    """Return the facts about the engine that a check needs. Builds one.

    Raises:
        BadEngineError: as `get_traits`, or a goal or feature that its traits name does not exist.
    """
    traits = get_traits(make_engine)
    _refuse_unknown(traits)
    weaker = traits.equivalence
    lacking = {feature.name for feature in find_lacking(get_capabilities(make_engine))}
    out_of_reach = traits.out_of_reach
    if not traits.drops_tokens_in_flight:
        out_of_reach |= {"dropped_token_runs_again"}
    if weaker is not None:
        lacking |= find_declined_features(weaker)
        out_of_reach = find_unreachable_goals(weaker, out_of_reach)
    return EngineFacts(
        max_depth=fit_depth(options, make_engine).max_depth,
        lacking=tuple(name for name in BY_NAME if name in lacking),
        equivalence="exact" if weaker is None else weaker.name,
        not_asked=() if weaker is None else weaker.not_asked,
        situations=None if weaker is None else weaker.situations,
        owed=list_required_goals(weaker),
        out_of_reach=frozenset(name for name in WITNESSES if name in out_of_reach).union(
            *(traits.out_of_reach_with.get(name, ()) for name in get_wish(options).always)
        ),
        notes=list_notes(options, traits),
        settings=traits.settings,
        deviations={one.name: one.summary for one in traits.deviations},
        stale=tuple(one.name for one in traits.deviations if not _is_shown(one, make_engine)),
    )


def _refuse_unknown(traits: EngineTraits) -> None:
    """Raise BadEngineError for a coverage goal or a feature that traits name and that does not
    exist: a goal would be required, or missing from the requirements, without a word."""
    named = [("out_of_reach", name) for name in traits.out_of_reach]
    named += [
        ("out_of_reach_with", name) for names in traits.out_of_reach_with.values() for name in names
    ]
    situations = None if traits.equivalence is None else traits.equivalence.situations
    named += [("situations", name) for name in situations or ()]
    of_quirks = {name_of(quirk) for quirk in Quirk for name_of in (name_applied, name_spared)}
    for part, name in sorted(named):
        is_of_a_quirk = part == "out_of_reach_with" and name in of_quirks
        if name not in WITNESSES and not is_of_a_quirk:
            close = get_close_matches(name, WITNESSES)
            fix = f"close: {', '.join(close)}; " if close else ""
            raise BadEngineError(
                f"{part} of its traits: {name!r} is no coverage goal; {fix}"
                "`blockstep explain situations` lists them"
            )
    for name in traits.out_of_reach_with:
        if name not in BY_NAME:
            raise BadEngineError(
                f"out_of_reach_with of its traits: {name!r} is no feature; "
                "`blockstep explain features` lists them"
            )


def list_notes(options: CheckOptions, traits: EngineTraits) -> tuple[str, ...]:
    """Return the notes of a run: those of the adapter, and one if the profile has other quirks than
    the engine's release, unless it was put together quirk by quirk."""
    notes = tuple(map(str, traits.notes))
    own, asked = get_profile(traits.profile), find_profile(options.profile)
    is_judged_alone = isinstance(traits.equivalence, Safety)
    if own is None or own.quirks == asked.quirks or "+" in asked.name or is_judged_alone:
        return notes
    note = (
        f"the engine is release {traits.version}, and the profile is {asked.name}: "
        f"decisions that differ between them fail here; use --profile {own.name}"
    )
    return (*notes, note)


def _is_shown(deviation: Deviation, make_engine: EngineFactory) -> bool:
    """Return whether a deviation's program shows it. Raises BadEngineError: it has none."""
    if not isinstance(deviation.program, Program):
        what = f"deviation {deviation.name!r}: its program must be a Program"
        raise BadEngineError(f"{what}, not {deviation.program!r:.80}")
    run, _ = run_program(deviation.program, make_engine)
    return run.excuses.counts[deviation.name] > 0


def require_wish(options: CheckOptions, facts: EngineFacts) -> None:
    """Raise UsageError unless the engine has the features that the options require."""
    for name in options.with_features:
        if {name, *list_wholes(name)} & {*facts.lacking}:
            raise UsageError(f"feature {name!r}: the engine {options.engine} lacks it")


def run_canary(options: CheckOptions, engine: str = CANARY) -> int | None:
    """Return the events until the canary is caught; None if it is not.

    The canary has features of `LATE` only if they are wished for, so that older seeds stay valid.
    """
    num_events = 0
    canary = replace(options, engine=engine, preset=TINY.name, profile=STRICT.name)
    late = [name for name in LATE if name in BY_NAME and name not in get_wish(options).always]
    canary = replace(canary, without_features=(*options.without_features, *late))
    make_engine = load_engine(engine)
    for index in range(CANARY_EPISODES):
        episode = run_episode(canary, index, make_engine)
        num_events += episode.num_events
        if episode.first is not None:
            return num_events
    return None


NOT_REQUIRED = {"abort_stale", "rejected_request_in_flight"}
"""Counted, but not required: each is reached a few times in 40,000 events."""
SMALL_ONLY = {
    *PREEMPTION,
    *("abort_preempted", "drafts_lost_by_preemption", "ended_while_preempted", "ended_while_stale"),
    *("preempted_in_flight", "all_preempted_in_flight", "stale_tokens_delivered"),
    *("passed_over_for_its_tokens", "admitted_past_a_stale_one", "resumed_after_stale_tokens"),
    *("pipeline_preempted_in_flight", "pipeline_token_after_preemption", "pool_exactly_full"),
    *("abort_with_two_frames_in_flight", "reset_forced_with_two_frames_in_flight", "reset_done"),
    *("rejected_never_fits", "rejected_not_structured", "rejected_prompt_too_long"),
    "dropped_token_runs_again",
    *("rejected_pipeline_full_async", "published_by_the_last_commit", "stop_model_length"),
    *("admission_blocked_by_max_num_seqs", "same_tokens_other_items"),
}
"""Rare in large pools: required with small presets only."""
RARE_AT_TINY = {
    *("abort_preempted", "drafts_lost_by_preemption"),
    *("drafts_some_accepted", "running_left_out_by_budget"),
}
"""Rare if requests have two or three tokens: a few times in 60,000 events."""


def list_absent(options: CheckOptions, lacking: tuple[str, ...]) -> set[str]:
    """Return the names of the features that no run of the options has, with an engine that lacks
    some."""
    wish = get_wish(options)
    absent = {*lacking, *wish.never} & BY_NAME.keys()
    if options.policy is Policy.FCFS:
        absent.add(PRIORITY.name)
    if options.policy is not None:
        absent |= {it.name for it in list_policies() if it is not find_policy(options.policy)}
    if options.max_depth == 1:
        absent |= SEVERAL_AT_ONCE
    elif SEVERAL_AT_ONCE & wish.always:
        absent |= SEVERAL_AT_ONCE - wish.always
    left_out = [it.name for it in FEATURES if not wish.always.isdisjoint(it.yields_to)]
    absent |= {*left_out} - wish.always
    return absent | {name for name in BY_NAME if absent.intersection(list_wholes(name))}


def list_required_pairs(options: CheckOptions, facts: EngineFacts) -> list[str]:
    """Return the cells of `judge.pairs` that runs of the options can reach with this engine."""
    return list_legal(list_absent(options, facts.lacking), get_wish(options).always)


def required_goals(options: CheckOptions, lacking: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the goals that a run must reach, with an engine that lacks these features."""
    wish = get_wish(options)
    absent = list_absent(options, lacking)
    deepest = {"four_frames_in_flight"} if options.max_depth < MAX_DEPTH else set()
    rare = {TINY.name: RARE_AT_TINY, REAL.name: SMALL_ONLY}.get(options.preset, set())
    rare_of_features = {
        name for feature in FEATURES for name in feature.rare_with.get(options.preset, ())
    }
    left_out = NOT_REQUIRED | deepest | rare | rare_of_features
    for name in wish.always:
        left_out |= {*BY_NAME[name].rare_if_wished_for.get(options.preset, ())}
    wanted = tuple(text for name in wish.always & {*LATE} for text in BY_NAME[name].situations)
    rare_unless_wanted = tuple([name for feature in FEATURES for name in feature.rare])
    return tuple(
        name
        for name in WITNESSES
        if name not in left_out
        and (name.startswith(wanted) or not name.startswith(rare_unless_wanted))
        and is_reachable(name, absent, wish.always)
    )


def list_quirk_goals(
    options: CheckOptions, facts: EngineFacts, only_wished: bool = False
) -> list[str]:
    """Return the goals about quirks that runs of the options can reach, if compared.

    `only_wished`: only goals that a quirk does not apply, for features that every run has. How
    often a quirk applies depends on the release.
    """
    if facts.owed is not None:
        return []
    absent, wished = list_absent(options, facts.lacking), get_wish(options).always
    features = wished if only_wished else None
    goals = list_goals(find_profile(options.profile), features)
    unmet = {*UNMET}.union(*(UNMET_WITH.get(name, ()) for name in wished))
    found = [goal for goal in goals if goal not in unmet and get_feature(goal) not in absent]
    return [goal for goal in found if is_spared(goal) or not only_wished]


def missing_goals(
    counts: Mapping[str, int], options: CheckOptions, facts: EngineFacts
) -> tuple[str, ...]:
    """Return the required goals that `counts` lacks, goals about quirks included."""
    if facts.situations is not None:
        required = facts.situations
    else:
        required = required_goals(options, facts.lacking)
        if facts.owed is not None:
            required = tuple(name for name in required if name in facts.owed)
    required += tuple(list_quirk_goals(options, facts, only_wished=True))
    return tuple(
        name for name in required if not counts.get(name) and name not in facts.out_of_reach
    )
