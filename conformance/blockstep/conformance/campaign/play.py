"""Play: the episodes of one unit, with an engine that may crash or hang.

`play_unit` runs in the worker, and the functions that it calls with an engine run in the engine's
process (see `search.call`). The result depends only on the plan, on the unit and on the totals of
its base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from blockstep.conformance.campaign.lines import LineWatch
from blockstep.conformance.campaign.plan import Plan
from blockstep.conformance.campaign.records import (
    Found,
    Look,
    TargetTotals,
    Totals,
    Unit,
    UnitResult,
    digest,
)
from blockstep.conformance.engine import EngineFactory, Safety
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Drain,
    Hostile,
    Program,
    Propose,
)
from blockstep.conformance.protocol.program_file import parse_program, write_program
from blockstep.conformance.search import hunt_jobs
from blockstep.conformance.search.call import Call
from blockstep.conformance.search.dedup import describe_crash, describe_failure
from blockstep.conformance.search.defects import Defect, name_of
from blockstep.conformance.search.episodes import (
    EpisodeResult,
    fit_config,
    play_episode,
    summarize_episode,
)
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.isolation.executor import lose_episode
from blockstep.conformance.search.isolation.jobs import plain, recover
from blockstep.conformance.search.known import describe, play_known
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.conformance.search.shrink import Shrinker
from blockstep.conformance.search.suppressions import find_causes
from blockstep.conformance.search.verdict_requirements import CANARIES, EngineFacts, run_canary
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import STRICT, Profile, Quirk

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
PATIENCE = 6
"""Failures of one message, in one target, after which no more are shrunk."""
RARE = 3
"""A goal or line is rare, and its program is kept, if at most this number of episodes reached
it."""
COMMON = 100
"""Lines that more episodes have run are not counted any more."""
WARM_EPISODES = 400
"""Episodes of a target before programs are kept for goals: at first all goals are rare."""
WARM_LINES = 40
"""Episodes of a target before programs are kept for lines, most of which are soon common."""
KEEP_RUNS = 60
"""Runs that make one kept program short."""
MUTATIONS_MAX = 4
_FIXED = (v.Submit, v.Fork, v.StreamingUpdate, Hostile)
"""Actions that bring a request, and actions about one moment: they are not moved or repeated."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of episodes that reached goals and lines; None: it is too early to keep programs."""

    goals: Mapping[str, int] | None = None
    lines: Mapping[str, int] | None = None

    def find_rare(self, goals: Iterable[str], lines: Iterable[str]) -> list[str]:
        """Return those that at most `RARE` episodes had reached, the rarest first."""
        counted = [(self.goals, goals), (self.lines, lines)]
        rare = [
            (counts.get(name, 0), name)
            for counts, names in counted
            if counts is not None
            for name in names
            if counts.get(name, 0) <= RARE
        ]
        return [name for _, name in sorted(rare)]


@dataclass(frozen=True, slots=True)
class Played:
    """One episode, and a program that reaches a rare goal, if one is kept."""

    episode: EpisodeResult
    kept: tuple[str, Program] | None = None
    lines: frozenset[str] = frozenset()
    """Lines of the engine that it ran."""


@dataclass(slots=True)
class Outcome:
    """The result of a unit, with what must be stored before it."""

    result: UnitResult
    found: list[Found] = field(default_factory=list)
    programs: dict[str, str] = field(default_factory=dict)
    """Contents of the program files that are kept, by digest."""


def play_unit(
    plan: Plan, unit: Unit, name: str, totals: Totals, parents: Sequence[str], call: Call
) -> Outcome:
    """Return the outcome of a unit.

    Args:
        name: Its name, of which its place in the round decides which failures are shrunk.
        totals: Totals of the base of its round.
        parents: Contents of the program files whose mutants are played.
        call: Calls functions with the engine of the unit's target.

    Raises:
        EngineNotFoundError, RefusedError, HarnessError: as `Isolation.call` raises them.
    """
    cell = plan.cells[unit.cell]
    target = totals.targets[cell.target]
    if unit.looks:
        return _look(plan, unit, name, make_steady(call))
    assert target.look is not None
    options = plan.make_options(cell, unit.seed, target.look.facts.max_depth)
    mutants = [
        mutate(parse_program(text, Path(parent)), Random(f"{unit.seed}/{unit.start + number}"))  # noqa: S311
        for number, (parent, text) in enumerate(zip(unit.parents, parents, strict=True))
    ]
    outcome = Outcome(UnitResult())
    last_place = int(name.rpartition("-")[2])
    counts = Counts(
        goals=target.goals if target.episodes >= WARM_EPISODES else None,
        lines=target.lines if target.episodes >= WARM_LINES else None,
    )
    modules = plan.targets[cell.target].lines
    numbers = range(unit.start, unit.start + plan.file.episodes)
    for played in _play_all(options, numbers, mutants, counts, modules, call, outcome):
        _count(played, target, outcome)
        failed = played.episode
        if failed.first is None:
            continue
        message = _get_message(failed)
        shrunk, before = outcome.result.shrunk, target.shrunk.get(message, 0)
        outcome.result.sayings[message] = outcome.result.sayings.get(message, 0) + 1
        if message not in shrunk and (not before or before + last_place < PATIENCE):
            shrunk[message] = 1
            defect = _dig(replace(options, episode=failed.index), failed, make_steady(call))
            program = mutants[failed.index - unit.start] if mutants else failed.program
            if program is None and failed.loss is not None and failed.loss.events:
                with suppress(LostError):
                    program = call(recover, options, failed.index, len(failed.loss.events))
            causes = _find_causes(options, target.look.facts, defect, make_steady(call))
            found = make_found(plan.targets[cell.target].name, name, defect, program, causes)
            _add(outcome, found)
    outcome.result.goals = dict(sorted(outcome.result.goals.items()))
    return outcome


def _look(plan: Plan, unit: Unit, name: str, call: Call) -> Outcome:
    """Ask an engine for its facts, play the known programs, and release a canary."""
    cell = plan.cells[unit.cell]
    options = plan.make_options(cell)
    try:
        if modules := plan.targets[cell.target].lines:
            call(require_lines, options, modules)
        ground = call(hunt_jobs.read_hunt_context, options)
    except LostError as lost:
        failed = describe(options, loss=lost.loss)
        look = Look(hunt_jobs.UNKNOWN.facts, "", None, {}, ())
        outcome = Outcome(UnitResult(look=look))
        _add(outcome, make_found(plan.targets[cell.target].name, name, failed, None))
        return outcome
    options = replace(options, max_depth=ground.facts.max_depth)
    canary = run_canary(options, CANARIES[ground.facts.equivalence])
    programs = {file: parse_program(text, Path(file)) for file, text in plan.known.items()}
    known, untried = dict.fromkeys(programs, ""), []
    outcome = Outcome(UnitResult())
    for played in play_known(options, call, programs):
        untried += [f"{played.name}: {played.why_untried}"] if played.why_untried else []
        if played.defect is not None:
            program = programs[played.name]
            causes = _find_causes(options, ground.facts, played.defect, call)
            target = plan.targets[cell.target].name
            found = make_found(target, name, played.defect, program, causes)
            known[played.name] = found.digest
            outcome.found.append(found)
    outcome.result.look = Look(ground.facts, ground.version, canary, known, tuple(untried))
    return outcome


def _play_all(
    options: CheckOptions,
    numbers: Sequence[int],
    mutants: Sequence[Program],
    counts: Counts,
    modules: Sequence[str],
    call: Call,
    outcome: Outcome,
) -> Iterator[Played]:
    """Yield all episodes of a unit; the engine is started again after a crash.

    A crash or hang counts if it happens twice in the same episode: it may be the machine's.
    """
    indices = list(numbers)
    again: int | None = None
    while indices:
        parts: list[Played] = []
        programs = [mutants[index - numbers[0]] for index in indices] if mutants else None
        wanted = Counts() if outcome.programs else counts
        try:
            call(play_part, options, indices, programs, wanted, modules, on_part=parts.append)
        except LostError as lost:
            index = indices[len(parts)]
            if again == index:
                parts.append(Played(lose_episode(index, lost.loss)))
                again = None
            else:
                outcome.result.num_spurious += again is not None
                again = index
        else:
            outcome.result.num_spurious += again is not None
        yield from parts
        indices = indices[len(parts) :]


def play_part(
    options: CheckOptions,
    make_engine: EngineFactory,
    indices: Sequence[int],
    programs: Sequence[Program] | None,
    counts: Counts,
    modules: Sequence[str],
) -> Iterator[Played]:
    """Yield these episodes, drawn or given as programs. Runs in the engine's process.

    The first program is kept that reaches a goal or a line which is rare by `counts`. `modules` are
    those whose lines are recorded.
    """
    profile = find_profile(options.profile)
    recorder = LineWatch(modules)
    for place, index in enumerate(indices):
        with recorder.watch() as lines:
            if programs is None:
                run, program, findings = play_episode(options, index, make_engine)
            else:
                config, _ = fit_config(programs[place].config, make_engine)
                program = replace(programs[place], config=config)
                run, findings = run_program(program, make_engine, profile)
        episode = summarize_episode(index, run, program, findings)
        episode = replace(episode, skipped=plain(episode.skipped))
        rare = () if findings else counts.find_rare(list_reached(run), lines)
        kept = None
        if rare:
            counts = Counts()
            kept = rare[0], shorten(program, rare[0], make_engine, profile, recorder)
        yield Played(episode, kept, frozenset(lines))


def require_lines(
    _options: CheckOptions, _make_engine: EngineFactory, modules: Sequence[str]
) -> None:
    """Raise EngineNotFoundError if lines of these modules cannot be recorded here."""
    LineWatch(modules)


def list_reached(run: LockStep) -> set[str]:
    """Return the goals and pairs that a run reached."""
    return {*(name for name, count in run.witnesses.items() if count), *run.pairs.reached} | {
        *run.list_quirk_goals()
    }


def make_steady(call: Call) -> Call:
    """Return a `Call` that calls again once if the engine's process is lost."""

    def twice(
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = lambda _part: None,
    ) -> T:
        try:
            return call(function, options, *args, on_part=on_part)
        except LostError:
            return call(function, options, *args, on_part=on_part)

    return twice


class _Enough(Exception):
    """The runs for one program are spent."""


def shorten(
    program: Program,
    goal: str,
    make_engine: EngineFactory,
    profile: Profile,
    recorder: LineWatch,
) -> Program:
    """Return the shortest program found in `KEEP_RUNS` runs that reaches the goal or line, and
    passes."""
    wanted = Finding(FindingKind.PROPERTY, "", goal, "")

    def play(
        tried: Program, factory: EngineFactory, followed: Profile
    ) -> tuple[LockStep, list[Finding]]:
        with recorder.watch() as lines:
            run, findings = run_program(tried, factory, followed)
        is_reached = goal in lines or goal in list_reached(run)
        return run, [wanted] if is_reached and not findings else []

    def stop(shrinker: Shrinker) -> None:
        if shrinker.num_runs > KEEP_RUNS:
            raise _Enough

    shrinker = Shrinker(program, make_engine, wanted, profile, stop, play)
    with suppress(_Enough):
        shrinker.shrink()
    return shrinker.best


def mutate(program: Program, rng: Random) -> Program:
    """Return a program with up to `MUTATIONS_MAX` changes, which ends with a drain.

    A slice is removed, repeated or moved, steps are put in, or the pool or the token budget is made
    smaller or larger.
    """
    actions: list[Action] = [it for it in program.actions if not isinstance(it, Drain)]
    config = program.config
    for _ in range(rng.randint(1, MUTATIONS_MAX)):
        start = rng.randrange(len(actions) + 1)
        end = min(start + rng.randint(1, 4), len(actions))
        piece = [it for it in actions[start:end] if not isinstance(it, _FIXED)]
        place = rng.randrange(len(actions) + 1)
        match rng.randrange(5):
            case 0:
                actions[start:end] = [it for it in actions[start:end] if it not in piece]
            case 1:
                actions[place:place] = piece
            case 2:
                steps: list[Action] = [v.Schedule(), Answer(), Propose(((1, 1),))]
                actions[place:place] = [rng.choice(steps) for _ in range(rng.randint(1, 4))]
            case 3:
                blocks = max(config.num_blocks + rng.randint(-2, 2), 2)
                config = _fit(config, replace(config, num_blocks=blocks))
            case _:
                tokens = max(config.max_num_batched_tokens + rng.randint(-3, 3), 1)
                config = _fit(config, replace(config, max_num_batched_tokens=tokens))
    return replace(program, config=config, actions=(*actions, Drain()))


def _fit(config: v.Config, wanted: v.Config) -> v.Config:
    """Return the wanted config, or the other one if it has problems."""
    return config if v.config_problems(wanted) else wanted


def _count(played: Played, target: TargetTotals, outcome: Outcome) -> None:
    result, episode = outcome.result, played.episode
    result.episodes += 1
    result.events += episode.num_events
    reached = {name for name, count in episode.witnesses.items() if count}
    for name in sorted(reached.union(episode.pairs, episode.quirks)):
        result.goals[name] = result.goals.get(name, 0) + 1
    for name in sorted(played.lines):
        if target.lines.get(name, 0) < COMMON:
            result.lines[name] = result.lines.get(name, 0) + 1
    result.deviations = dict(Counter(result.deviations) + Counter(episode.deviations))
    if played.kept is not None:
        goal, program = played.kept
        text = write_program(program, f"reaches {goal}")
        result.kept[goal] = name = digest([text])
        outcome.programs[name] = text


def _get_message(episode: EpisodeResult) -> str:
    assert episode.first is not None
    if episode.loss is not None:
        return describe_crash(episode.loss.message)
    return describe_failure(episode.first)


def _dig(options: CheckOptions, episode: EpisodeResult, call: Call) -> Defect:
    """Return a failure, shrunk if its engine survives that."""
    if episode.loss is None:
        try:
            dug = call(hunt_jobs.analyse_failure, options, None, (), episode)
        except LostError as lost:
            return describe(options, loss=lost.loss)
        return describe(options, dug)
    return describe(options, loss=episode.loss)


def _find_causes(
    options: CheckOptions, facts: EngineFacts, defect: Defect, call: Call
) -> tuple[str, ...]:
    """Return the known causes that account for a failure, in a target without a release."""
    shrunk = defect.shrunk
    is_compared = options.profile == STRICT.name and facts.equivalence != Safety.name
    if shrunk is None or not shrunk.findings or not is_compared:
        return ()
    try:
        return call(name_causes, options, shrunk.program)
    except LostError:
        return ()


def name_causes(
    _options: CheckOptions, make_engine: EngineFactory, program: Program
) -> tuple[str, ...]:
    """Return the names of the known causes of a failure. Runs in the engine's process."""
    causes = find_causes(program, make_engine, frozenset(), tuple(sorted(Quirk)))
    return tuple(sorted(map(str, causes)))


def _add(outcome: Outcome, found: Found) -> None:
    outcome.found.append(found)
    counts = outcome.result.findings
    counts[found.digest] = counts.get(found.digest, 0) + 1


def make_found(
    target: str,
    unit: str,
    defect: Defect,
    program: Program | None,
    causes: tuple[str, ...] = (),
) -> Found:
    """Return the record of a failure; `program` is that of a crash, if it is known."""
    program = program if defect.shrunk is None else defect.shrunk.program
    text = "" if program is None else write_program(program)
    events = () if defect.loss is None else defect.loss.events
    name = name_of(defect.first)
    lost = () if defect.loss is None else (defect.symptoms.own.message,)
    return Found(
        digest=digest([name, *lost, text or "\n".join(events)]),
        name=name,
        target=target,
        unit=unit,
        episode=defect.options.episode or 0,
        length=defect.length,
        first=defect.first,
        symptoms=defect.symptoms,
        program=text,
        causes=causes,
        raised_at=defect.raised_at,
        loss=defect.loss,
    )


def find_known(target: TargetTotals) -> set[str]:
    """Return the digests of the findings of known programs."""
    return set() if target.look is None else {it for it in target.look.known.values() if it}
