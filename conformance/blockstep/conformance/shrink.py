"""Shrink: from a failing program to one in which every line matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from blockstep.conformance.driver import LockStep, run_program
from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.findings import Finding
from blockstep.conformance.program import Action, Answer, Drain, Program, Propose
from blockstep.conformance.rules import request_name
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    ConfigError,
    GrammarReady,
    PauseState,
    Policy,
    Request,
    RequestId,
    Schedule,
    SetPause,
    SpecMethod,
    Submit,
)

MAX_RUNS = 3000


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest failing program found, and its last run."""

    program: Program
    run: LockStep
    findings: list[Finding]
    num_runs: int


class _Budget(Exception):
    """Enough has been tried."""


class Shrinker:
    """Keeps the smallest program that fails like the first one.

    "Like" means: some finding names the same property, or both name none. A program may turn one
    symptom into another on the way; it may not turn one defect into another kind of defect.
    """

    def __init__(
        self,
        program: Program,
        make_engine: EngineFactory,
        first: Finding,
        profile: Profile = STRICT,
        on_run: Callable[[int, int], None] = lambda _runs, _actions: None,
    ) -> None:
        self._make_engine = make_engine
        self._profile = profile
        self._wanted = (first.kind, first.property_id)
        self._on_run = on_run
        self._num_runs = 0
        self.best = program
        self.run, self.findings = run_program(program, make_engine, profile)

    def shrink(self) -> Shrunk:
        """Try ever smaller programs until none of them fails or `MAX_RUNS` are spent."""
        try:
            self._unroll_drain()
            self._cut_tail()
            while True:
                before = self.best
                self._remove_actions()
                self._simplify_actions()
                self._simplify_config()
                if self.best == before:
                    break
            self._rename()
        except _Budget:
            pass
        return Shrunk(self.best, self.run, self.findings, self._num_runs)

    def _try(self, program: Program) -> bool:
        """Adopt `program` if it fails in the same way."""
        if self._num_runs >= MAX_RUNS:
            raise _Budget
        self._num_runs += 1
        self._on_run(self._num_runs, len(self.best.actions))
        try:
            run, findings = run_program(program, self._make_engine, self._profile)
        except ConfigError:
            return False
        if not any((found.kind, found.property_id) == self._wanted for found in findings):
            return False
        self.best, self.run, self.findings = program, run, findings
        return True

    def _with(self, actions: tuple[Action, ...]) -> Program:
        return replace(self.best, actions=actions)

    def _unroll_drain(self) -> None:
        """Write a drain out as the actions it consists of, so that they can be removed."""
        actions = self.best.actions
        if not actions or not isinstance(actions[-1], Drain):
            return
        waiting = [
            GrammarReady(action.request.request_id)
            for action in actions
            if isinstance(action, Submit) and action.request.structured_output
        ]
        head = (*actions[:-1], Answer(), SetPause(PauseState.UNPAUSED), *waiting)
        for steps in (4, 16, 64, 256):
            if self._try(self._with((*head, *((Schedule(), Answer()) * steps)))):
                return

    def _cut_tail(self) -> None:
        """Drop what comes after the failing action: the shortest failing head, by bisection."""
        low, high = 0, len(self.best.actions)
        actions = self.best.actions
        while low < high:
            middle = (low + high) // 2
            if self._try(self._with(actions[:middle])):
                high = middle
            else:
                low = middle + 1

    def _remove_actions(self) -> None:
        """Remove runs of actions, long ones first, from the end to the start."""
        size = max(len(self.best.actions) // 2, 1)
        while size >= 1:
            start = len(self.best.actions) - size
            while start >= 0:
                actions = self.best.actions
                self._try(self._with(actions[:start] + actions[start + size :]))
                start -= size
            size //= 2

    def _simplify_actions(self) -> None:
        for index in range(len(self.best.actions)):
            progress = True
            while progress:
                actions = self.best.actions
                progress = any(
                    self._try(self._with((*actions[:index], simpler, *actions[index + 1 :])))
                    for simpler in simpler_actions(actions[index])
                )

    def _simplify_config(self) -> None:
        for config in simpler_configs(self.best.config):
            self._try(replace(self.best, config=config))

    def _rename(self) -> None:
        """Call the requests A, B, C in order of submission."""
        names: dict[RequestId, RequestId] = {}
        for action in self.best.actions:
            if isinstance(action, Submit):
                names.setdefault(action.request.request_id, request_name(len(names)))
        self._try(self._with(tuple(_renamed(action, names) for action in self.best.actions)))


def _renamed(action: Action, names: dict[RequestId, RequestId]) -> Action:
    match action:
        case Submit(request=request):
            return Submit(replace(request, request_id=names[request.request_id]))
        case Abort(request_ids=request_ids):
            return Abort(tuple(names.get(name, name) for name in request_ids))
        case GrammarReady(request_id=request_id):
            return GrammarReady(names.get(request_id, request_id))
        case _:
            return action


def simpler_actions(action: Action) -> Iterator[Action]:
    """Variants of an action with less in it, the simplest first."""
    match action:
        case Submit(request=request):
            yield from map(Submit, simpler_requests(request))
        case Abort(request_ids=request_ids) if len(request_ids) > 1:
            yield from (Abort((name,)) for name in request_ids)
        case Propose(counts=counts):
            if len(counts) > 1:
                yield from (Propose((count,)) for count in counts)
            elif counts and counts[0] > (1, 0):
                number, right = counts[0]
                yield Propose(((1, min(right, 1)),))
                yield Propose(((number, 0),)) if right else Propose(((number - 1, right),))
        case _:
            return


def simpler_requests(request: Request) -> Iterator[Request]:
    """The request with a field at its default, fewer tokens, or plainer ones."""
    plain = Request(request.request_id, request.prompt_token_ids)
    for field in fields(Request):
        value = getattr(request, field.name)
        default = getattr(plain, field.name)
        if field.name != "max_tokens" and value != default:
            yield replace(request, **{field.name: default})
    prompt = request.prompt_token_ids
    for length in sorted({1, len(prompt) // 2, len(prompt) - 1}):
        if 0 < length < len(prompt):
            yield replace(request, prompt_token_ids=prompt[:length])
    for count in sorted({1, request.max_tokens // 2, request.max_tokens - 1}):
        if 0 < count < request.max_tokens:
            yield replace(request, max_tokens=count)
    if any(prompt):
        yield replace(request, prompt_token_ids=(0,) * len(prompt))
        counted = tuple(range(len(prompt)))
        if prompt > counted:
            yield replace(request, prompt_token_ids=counted)


def simpler_configs(config: Config) -> Iterator[Config]:
    """The config with one feature switched off, or one bound out of the way."""
    plain = {
        "policy": Policy.FCFS,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            yield replace(config, **{name: value})  # type: ignore[arg-type]
    if config.spec_method is not SpecMethod.NONE:
        yield replace(config, spec_method=SpecMethod.NONE, num_speculative_tokens=0)
        yield replace(config, num_speculative_tokens=1)
    for num_blocks in range(2, min(config.num_blocks, 12)):
        yield replace(config, num_blocks=num_blocks)


def shrink(
    program: Program,
    make_engine: EngineFactory,
    first: Finding,
    profile: Profile = STRICT,
    on_run: Callable[[int, int], None] = lambda _runs, _actions: None,
) -> Shrunk:
    """The smallest program found that fails as `program` does with `first`."""
    return Shrinker(program, make_engine, first, profile, on_run).shrink()
