"""Arms: one workload, one engine, two configs that must not make a difference.

    requests --+--> engine(config)          --> tokens --+
               |                                          |-- equal?
               +--> engine(config with a change) --> tokens --+

Whoever asks for the same text from the same model must get the same answer with caching on or off,
with drafts or without, one plan in flight or four, in a large pool or in one that preempts. No
reference is needed, not even a snapshot; an engine need only submit, schedule and commit. Wrong KV
shows as wrong tokens, because the worker's model goes astray when it reads any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.draw.actions import SeededDraw, draw_request, request_name
from blockstep.conformance.draw.presets import PRESETS, Kind, Swarm, draw_swarm
from blockstep.conformance.engine import Capability, Engine, EngineFactory
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.tokens import token_function
from blockstep.conformance.search.check import CheckOptions, fit_depth
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Drafts,
    FinishReason,
    GrammarReady,
    Outputs,
    Plan,
    Rejected,
    Request,
    RequestId,
    RowTokens,
    Schedule,
    SpecMethod,
    Submit,
    TokenIds,
)

REQUESTS_MAX = 8
GROWTH = 8
"""The large pool has so many times the blocks."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A change of the config that must not change what is said."""

    name: str
    summary: str
    change: Callable[[Config], Config]


def _without_drafts(config: Config) -> Config:
    return replace(config, spec_method=SpecMethod.NONE, num_speculative_tokens=0)


def _with_drafts(config: Config) -> Config:
    return replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=2)


ARMS: tuple[Arm, ...] = (
    Arm(
        "caching",
        "prefix caching switched over",
        lambda config: replace(config, enable_prefix_caching=not config.enable_prefix_caching),
    ),
    Arm(
        "drafts",
        "speculation switched over",
        lambda config: (
            _without_drafts(config) if config.num_speculative_tokens else _with_drafts(config)
        ),
    ),
    Arm(
        "async",
        "one plan in flight at a time, or three",
        lambda config: replace(
            config,
            max_frames_in_flight=1 if config.async_scheduling else 3,
            async_scheduling=not config.async_scheduling,
        ),
    ),
    Arm(
        "pool",
        "a pool so large that nobody is preempted",
        lambda config: replace(config, num_blocks=GROWTH * config.num_blocks),
    ),
    Arm(
        "chunks",
        "prompts cut into other chunks",
        lambda config: replace(
            config, long_prefill_token_threshold=0 if config.long_prefill_token_threshold else 2
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to."""

    token_ids: TokenIds
    reason: FinishReason | None
    """None: it never ended."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """One request that two arms answer differently."""

    arm: str
    episode: int
    config: Config
    changed: Config
    requests: tuple[Request, ...]
    request_id: RequestId
    plain: Answer
    other: Answer


@dataclass(slots=True)
class ArmsResult:
    """How many answers were compared, per arm, and the first that differ."""

    num_compared: dict[str, int] = field(default_factory=dict)
    num_episodes: int = 0
    not_tried: tuple[str, ...] = ()
    contrast: Contrast | None = None


def compare_arms(
    options: CheckOptions,
    make_engine: EngineFactory,
    num_episodes: int,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> ArmsResult:
    """Play workloads drawn from the seed under each arm, until answers differ or all are played."""
    options = fit_depth(options, make_engine)
    arms, not_tried = usable_arms(make_engine)
    result = ArmsResult({arm.name: 0 for arm in arms}, not_tried=not_tried)
    for episode in range(num_episodes):
        swarm, requests = draw_workload(options, episode)
        plain = run_workload(make_engine, swarm, swarm.config, requests)
        result.num_episodes += 1
        on_progress(result.num_episodes)
        for arm in arms:
            changed = arm.change(swarm.config)
            other = run_workload(make_engine, swarm, changed, requests)
            result.num_compared[arm.name] += len(plain.keys() & other.keys())
            wrong = first_difference(plain, other)
            if wrong is not None:
                result.contrast = _shrink(make_engine, swarm, arm, episode, requests)
                return result
    return result


def usable_arms(make_engine: EngineFactory) -> tuple[list[Arm], tuple[str, ...]]:
    """The arms that the engine's capabilities allow, and the names of the others."""
    probe = make_engine(Config(num_blocks=8, max_model_len=64)).capabilities()
    needs = {"drafts": Capability.DRAFTS, "async": Capability.ASYNC}
    missing = tuple(name for name, needed in needs.items() if needed not in probe)
    return [arm for arm in ARMS if arm.name not in missing], missing


def draw_workload(options: CheckOptions, episode: int) -> tuple[Swarm, tuple[Request, ...]]:
    """A config and requests; everything follows from preset, seed and episode."""
    draw = SeededDraw(f"arms/{options.preset}/{options.seed}/{episode}")
    swarm = draw_swarm(PRESETS[options.preset], draw, options.policy, options.max_depth)
    # Every drawn config must still be one when an arm has changed it.
    config = replace(swarm.config, enable_chunked_prefill=True)
    swarm = replace(swarm, config=config, kinds=swarm.kinds - {Kind.GRAMMAR})
    count = draw.integer(2, REQUESTS_MAX)
    return swarm, tuple(
        draw_request(swarm, draw, request_name(index), index) for index in range(count)
    )


def run_workload(
    make_engine: EngineFactory, swarm: Swarm, config: Config, requests: Sequence[Request]
) -> dict[RequestId, Answer]:
    """What the accepted requests came to when all are submitted one step after another."""
    engine = make_engine(config)
    worker = Worker(config, token_function(swarm.token_seed, swarm.vocabulary_size))
    worker.acceptance = (0, 1, 2)
    said: dict[RequestId, list[int]] = {}
    reasons: dict[RequestId, FinishReason] = {}
    plans: list[Plan] = []
    work = sum(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    for step in range(20 + work * (1 + len(requests))):
        if step < len(requests) and not _is_refused(engine, requests[step]):
            said[requests[step].request_id] = []
        if step >= len(requests) and reasons.keys() == said.keys():
            break
        plan = engine.apply(Schedule())
        if isinstance(plan, Plan):
            worker.observe(Schedule(), plan)
            plans += [plan] if plan.rows else []
        if len(plans) == config.max_frames_in_flight or (plans and not _has_rows(plan)):
            _commit(engine, worker, plans.pop(0), said, reasons)
    return {name: Answer(tuple(tokens), reasons.get(name)) for name, tokens in said.items()}


def _has_rows(plan: object) -> bool:
    return isinstance(plan, Plan) and bool(plan.rows)


def _is_refused(engine: Engine, request: Request) -> bool:
    if isinstance(engine.apply(Submit(request)), Rejected):
        return True
    if request.structured_output:
        engine.apply(GrammarReady(request.request_id))
    return False


def _commit(
    engine: Engine,
    worker: Worker,
    plan: Plan,
    said: dict[RequestId, list[int]],
    reasons: dict[RequestId, FinishReason],
) -> None:
    event = Commit(plan.frame_id, worker.answer(plan.frame_id))
    outputs = engine.apply(event)
    worker.observe(event, outputs)
    if not isinstance(outputs, Outputs):
        return
    for row in outputs.rows:
        said[row.request_id].extend(row.new_token_ids)
        if row.finish_reason is not None:
            reasons[row.request_id] = row.finish_reason
    config = worker.config
    if config.num_speculative_tokens and not config.async_scheduling:
        count = config.num_speculative_tokens
        names = [row.request_id for row in event.sampled if row.token_ids]
        rows = [
            RowTokens(name, worker.propose(name, count, index % (count + 1)))
            for index, name in enumerate(names)
            if name not in reasons
        ]
        engine.apply(Drafts(tuple(rows)))


def first_difference(
    plain: Mapping[RequestId, Answer], other: Mapping[RequestId, Answer]
) -> RequestId | None:
    """The first request that both took in and answered differently."""
    return next((name for name in plain if name in other and plain[name] != other[name]), None)


def _shrink(
    make_engine: EngineFactory, swarm: Swarm, arm: Arm, episode: int, requests: tuple[Request, ...]
) -> Contrast:
    """The contrast with as few requests as show it."""
    changed = arm.change(swarm.config)

    def differ(some: Sequence[Request]) -> tuple[RequestId, Answer, Answer] | None:
        plain = run_workload(make_engine, swarm, swarm.config, some)
        other = run_workload(make_engine, swarm, changed, some)
        name = first_difference(plain, other)
        return None if name is None else (name, plain[name], other[name])

    found = differ(requests)
    for request in requests:
        fewer = tuple(other for other in requests if other is not request)
        smaller = differ(fewer)
        if smaller is not None:
            requests, found = fewer, smaller
    assert found is not None, "a run is a function of its options"
    return Contrast(arm.name, episode, swarm.config, changed, requests, *found)
