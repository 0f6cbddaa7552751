"""Verdicts on laws, decided by CrossHair through its API.

The verdicts guard against every way to a wrong pass that we know: CrossHair's command line skips
what it cannot analyse and exits with 0; here that is BROKEN. It takes all leading asserts as
assumptions, so a law without a later one is BROKEN. It confirms a law whose assumptions nothing
satisfies, so the witness of each law is run; if it fails, the law is VACUOUS. Its counterexamples
are run again in plain Python, and one that breaks nothing is SPURIOUS. Asserts that pytest rewrites
would make it fail, so a law in a rewritten module is BROKEN.
"""

from __future__ import annotations

import ast
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from blockstep.conformance.prove.counterexamples import (
    Arguments,
    Outcome,
    find_first_line,
    find_smallest,
    try_law,
)
from blockstep.conformance.prove.law import Claim, Law
from blockstep.conformance.prove.mutants import EndlessError, Mutant, limit_seconds, try_mutants
from blockstep.conformance.search.call import open_processes

SECONDS_MAX = 300.0
"""CPU seconds for one law or mutant; beyond that the verdict is UNKNOWN."""
NUM_ASKED = 4
"""The most mutants about which the solver is asked until it refutes one."""
ASKED_SECONDS = 10.0
"""CPU seconds for one of them."""
NEEDED = ("crosshair", "z3")
CALL = re.compile(r"when calling (?P<call>.*?)(?: \(which returns .*\))?$", re.DOTALL)


class Verdict(StrEnum):
    """The result for a law."""

    CONFIRMED = "CONFIRMED"
    """The law holds for all integers: every path was followed to its end."""
    REFUTED = "REFUTED"
    """The law does not hold: the counterexample breaks it in plain Python, too."""
    SPURIOUS = "SPURIOUS"
    """CrossHair's counterexample breaks nothing in Python. Rewrite the law; a real one may exist.
    """
    UNKNOWN = "UNKNOWN"
    """Time was up, or a path could not be decided."""
    VACUOUS = "VACUOUS"
    """The witness does not satisfy the assumptions; perhaps no argument does."""
    BROKEN = "BROKEN"
    """The function does not have the shape of a law, or CrossHair could not run it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one CrossHair run."""

    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    """CPU time."""
    num_paths: int = 0
    arguments: Arguments = ()
    """The smallest arguments of a counterexample."""


@dataclass(frozen=True, slots=True)
class WrongRuleProof:
    """A mistake written by hand, or a mutant, and its result."""

    name: str
    theirs: str
    """Upstream number, if the mistake is a rule of vLLM 0.19.1."""
    answer: Answer


@dataclass(frozen=True, slots=True)
class MutantProof:
    """The results of one-point changes of the functions that a law is about."""

    num_tried: int = 0
    num_refuted: int = 0
    first: WrongRuleProof | None = None
    """The first mutant that breaks the law."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A law and its result."""

    name: str
    sentence: str
    property_ids: tuple[str, ...]
    witness: str
    answer: Answer
    twins: tuple[WrongRuleProof, ...]
    """The mistakes written by hand."""
    mutants: MutantProof = MutantProof()

    @property
    def wrong(self) -> tuple[WrongRuleProof, ...]:
        """The mistakes, and the first mutant that breaks the law."""
        first = self.mutants.first
        return self.twins if first is None else (*self.twins, first)

    @property
    def seconds(self) -> float:
        """CPU time for the law, its mistakes and its mutants."""
        return self.answer.seconds + sum(one.answer.seconds for one in self.wrong)

    @property
    def problem(self) -> str:
        """Why the result is not as it should be; "" if it is."""
        if self.answer.verdict is not Verdict.CONFIRMED:
            return f"{self.answer.verdict}: {self.answer.detail}"
        if not self.wrong:
            if not self.mutants.num_tried:
                return "no mutant was tried: its witness runs nothing of spec or impl to change"
            return "no mutant breaks it: nothing shows that the law can fail"
        for one in self.wrong:
            if one.answer.verdict is not Verdict.REFUTED:
                return f"mutant '{one.name}' is {one.answer.verdict}: {one.answer.detail}"
        return ""


class NotInstalledError(Exception):
    """CrossHair or z3 cannot be imported."""


class UnansweredError(Exception):
    """Some laws got no result, or more than one."""


def require_crosshair() -> None:
    """Raise NotInstalledError, with the command that installs it, if CrossHair is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotInstalledError(
            f"{' and '.join(missing)} cannot be imported; install the solver with: "
            "python -m pip install 'blockstep[symbolic]' "
            "(in a checkout: python -m pip install -e '.[symbolic]')"
        )


def prove_laws(
    laws: Sequence[Law],
    jobs: int = 1,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
    is_apart: bool = False,
) -> list[Proof]:
    """Return a proof for each law, in the order of `laws`; with one job this process proves them.

    With several jobs, or if `is_apart`, the laws must be in `laws.LAWS`: each process looks them up
    by name.

    Raises:
        NotInstalledError: CrossHair is missing.
        UnansweredError: an answer is missing, or there is one too many.
    """
    require_crosshair()
    proofs: dict[str, Proof] = {}
    for proof in _proofs(laws, jobs, is_apart):
        proofs[proof.name] = proof
        bad = sum(1 for one in proofs.values() if one.problem)
        line = f"{len(proofs)} of {len(laws)} laws, {bad or 'none'} with a problem, {proof.name}"
        on_progress(len(proofs) / len(laws), line)
    asked = [law.name for law in laws]
    if sorted(proofs) != sorted(asked):
        raise UnansweredError(f"asked for {sorted(asked)}, answered {sorted(proofs)}")
    return [proofs[name] for name in asked]


def _proofs(laws: Sequence[Law], jobs: int, is_apart: bool) -> Iterator[Proof]:
    if not is_apart and (jobs <= 1 or len(laws) <= 1):
        yield from map(prove_law, laws)
        return
    slow_first = sorted(laws, key=lambda law: not law.is_slow)
    with open_processes(min(jobs, len(laws))) as pool:
        futures = {pool.submit(prove_by_name, law.name): law for law in slow_first}
        for future in as_completed(futures):
            yield _read(futures[future], future)


def _read(law: Law, future: Future[Proof]) -> Proof:
    try:
        return future.result()
    except Exception as error:
        answer = Answer(Verdict.BROKEN, f"its process failed: {type(error).__name__}: {error}")
        return Proof(law.name, law.sentence, law.property_ids, "", answer, ())


def prove_by_name(name: str) -> Proof:
    """Prove a law of `laws.LAWS`. Raises KeyError for an unknown name."""
    from blockstep.conformance.prove.laws import LAWS  # noqa: PLC0415

    return prove_law(LAWS[name])


def prove_law(law: Law, seconds_max: float = SECONDS_MAX) -> Proof:
    """Return the verdicts on a law and on its mutants."""
    witness = show_call(law.check, law.witness)
    answer = _ask_after_witness(law, witness, seconds_max)
    common = (law.name, law.sentence, law.property_ids, witness, answer)
    if answer.verdict is Verdict.BROKEN:
        return Proof(*common, ())
    twins = tuple(
        WrongRuleProof(twin.name, twin.theirs, _ask(law.check, seconds_max, twin.planted()))
        for twin in law.twins
    )
    return Proof(*common, twins, _prove_mutants(law))


def _prove_mutants(law: Law) -> MutantProof:
    """Return the results of the mutants. If no mistake of the law shows that the solver can refute
    it, the solver must refute one of them, too.
    """
    start = time.process_time()
    tried = try_mutants(law)
    if not tried.refuted:
        return MutantProof(tried.num_tried)
    mutant, arguments = tried.refuted[0]
    seconds = time.process_time() - start
    detail = f"broken by {show_call(law.check, arguments)}"
    answer = Answer(Verdict.REFUTED, detail, seconds, arguments=arguments)
    for asked, _ in () if law.twins else tried.refuted[:NUM_ASKED]:
        mutant, answer = asked, _ask_about_mutant(law, asked)
        if answer.verdict is Verdict.REFUTED:
            break
    first = WrongRuleProof(mutant.name, "", answer)
    return MutantProof(tried.num_tried, len(tried.refuted), first)


def _ask_about_mutant(law: Law, mutant: Mutant) -> Answer:
    """Return CrossHair's result for a law with a mutant, which may have no end."""
    try:
        with limit_seconds(2 * ASKED_SECONDS):
            return _ask(law.check, ASKED_SECONDS, mutant.planted())
    except EndlessError:
        return Answer(Verdict.UNKNOWN, "it does not end", 2 * ASKED_SECONDS)


def show_call(check: Claim, arguments: Arguments) -> str:
    """Return the arguments by name: `num_tokens=33, block_size=16`."""
    names = check.__code__.co_varnames
    return ", ".join(f"{name}={value}" for name, value in zip(names, arguments, strict=False))


def _ask_after_witness(law: Law, witness: str, seconds_max: float) -> Answer:
    problem = get_shape_problem(law.check)
    if problem:
        return Answer(Verdict.BROKEN, problem)
    match try_law(law.check, law.witness):
        case Outcome.NOT_ASSUMED:
            detail = f"the witness {witness} does not satisfy its assumptions"
            return Answer(Verdict.VACUOUS, detail)
        case Outcome.FAILS:
            return Answer(Verdict.REFUTED, f"broken by {witness}", arguments=law.witness)
        case Outcome.HOLDS:
            return _ask(law.check, seconds_max, nullcontext())


def get_shape_problem(check: Claim) -> str:
    """Return why CrossHair would misread this law, or "" if it would not."""
    module: Mapping[str, object] = vars(sys.modules[check.__module__])
    if "@pytest_ar" in module:
        return "pytest has rewritten the asserts of its module: keep laws out of test modules"
    try:
        find_first_line(check)
    except ValueError as error:
        return str(error)
    return ""


def _ask(check: Claim, seconds_max: float, wrong: AbstractContextManager[None]) -> Answer:
    """Return CrossHair's result for a law while a mistake or a mutant is in place, or nothing."""
    with wrong:
        return _analyze(check, seconds_max)


def _analyze(check: Claim, seconds_max: float) -> Answer:
    # Importing CrossHair takes a second and changes how icontract behaves: only here, and late.
    from crosshair.core_and_libs import (  # noqa: PLC0415
        AnalysisKind,
        MessageType,
        analyze_function,
    )
    from crosshair.options import AnalysisOptionSet  # noqa: PLC0415
    from crosshair.util import CrossHairInternal  # noqa: PLC0415

    stats: Counter[str] = Counter()
    options = AnalysisOptionSet(
        analysis_kind=[AnalysisKind.asserts],
        per_condition_timeout=seconds_max,
        report_all=True,
        stats=stats,
    )
    start = time.process_time()
    try:
        checkables = analyze_function(check, options)
        messages = [message for part in checkables for message in part.analyze()]
    except (Exception, CrossHairInternal) as error:
        return Answer(Verdict.BROKEN, f"CrossHair failed: {type(error).__name__}: {error}")
    seconds, num_paths = time.process_time() - start, stats["num_paths"]
    text = "; ".join(message.message for message in messages)
    states = {message.state for message in messages}
    if states & {MessageType.POST_FAIL, MessageType.POST_ERR, MessageType.EXEC_ERR}:
        return _replay(check, messages[-1].message, seconds, num_paths)
    if states == {MessageType.CONFIRMED}:
        verdict = Verdict.CONFIRMED
    elif states == {MessageType.CANNOT_CONFIRM}:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.BROKEN
    return Answer(verdict, text or "CrossHair skipped it", seconds, num_paths)


def _replay(check: Claim, message: str, seconds: float, num_paths: int) -> Answer:
    """Run a counterexample in plain Python, make it small, and return the result."""
    arguments = parse_arguments(check, message)
    if arguments is None or try_law(check, arguments) is not Outcome.FAILS:
        return Answer(Verdict.SPURIOUS, f"does not fail in Python: {message}", seconds, num_paths)
    smallest = find_smallest(check, arguments)
    detail = f"broken by {show_call(check, smallest)}"
    return Answer(Verdict.REFUTED, detail, seconds, num_paths, smallest)


def parse_arguments(check: Claim, message: str) -> Arguments | None:
    """Return the arguments that CrossHair's message names, or None if they are not plain values."""
    found = CALL.search(message)
    if found is None:
        return None
    try:
        call = ast.parse(found["call"], mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        names = check.__code__.co_varnames[: check.__code__.co_argcount]
        values = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
        values |= {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return tuple(values[name] for name in names)
    except (KeyError, SyntaxError, ValueError):
        return None
