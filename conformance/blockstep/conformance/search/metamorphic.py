"""Metamorphic pairs: one workload and one engine under two configs that must give the same tokens.

    requests --+--> engine(config)          --> tokens --+
               |                                          |-- equal?
               +--> engine(config with a change) --> tokens --+

A request must get the same tokens with caching on or off, with drafts or without, with one plan in
flight or four, in a large pool or in one that preempts. No reference is needed, not even a
snapshot; an engine need only submit, schedule and commit. Wrong KV shows as wrong tokens, because
the next token of the worker's model depends on all KV that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.requests import draw_request, request_name
from blockstep.conformance.engine import (
    BadEngineError,
    Capability,
    Engine,
    EngineFactory,
    build,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.features.masks import FEATURE as MASKS
from blockstep.conformance.judge.checks import ANSWER_TYPES
from blockstep.conformance.judge.worker import Worker, make_worker
from blockstep.conformance.lockstep.action_resolver import ask_mask
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.lockstep.plan_equivalence import fit_worker
from blockstep.conformance.protocol.feature import Feature, settle_states
from blockstep.conformance.protocol.features import (
    ASYNC,
    DRAFTS,
    GRAMMAR,
    PIPELINE,
    find_lacking,
    fit,
)
from blockstep.conformance.protocol.findings import cut_repr, describe_error, list_frames
from blockstep.conformance.protocol.program import describe_event
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.conformance.search.episodes import draw_options, fit_config, fit_depth
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

REQUESTS_MAX = 8
GROWTH = 8
"""Factor by which the large pool is larger."""
CHUNKS = 2
"""Inputs that continue a session before its client closes it."""
DEPTH = 3
"""Plans in flight after a change to several."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Change of the config that must not change the tokens."""

    name: str
    summary: str
    change: Callable[[v.Config], v.Config]
    feature: Feature | None = None
    """Feature that an engine needs for the change."""


def _switch_drafts(config: v.Config) -> v.Config:
    if DRAFTS.is_asked_by(config):
        return DRAFTS.take_from(config)
    drafting = replace(config, spec_method=v.SpecMethod.EAGLE, num_speculative_tokens=2)
    return settle_states(drafting)


def _switch_caching(config: v.Config) -> v.Config:
    switched = replace(config, enable_prefix_caching=not config.enable_prefix_caching)
    return settle_states(switched)


def _switch_async(config: v.Config) -> v.Config:
    depth = 1 if config.async_scheduling else DEPTH
    return replace(config, max_frames_in_flight=depth, async_scheduling=depth > 1)


def _switch_pipeline(config: v.Config) -> v.Config:
    depth = 1 if PIPELINE.is_asked_by(config) else DEPTH
    return replace(config, max_frames_in_flight=depth, async_scheduling=False)


ARMS: tuple[Arm, ...] = (
    Arm("caching", "prefix caching switched over", _switch_caching),
    Arm("drafts", "speculation switched over", _switch_drafts, DRAFTS),
    Arm("async", "one plan in flight at a time, or three", _switch_async, ASYNC),
    Arm("pipeline", "the same, each request waiting for its token", _switch_pipeline, PIPELINE),
    Arm(
        "pool",
        "a pool so large that no request is preempted",
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
    """Tokens and finish reason of one request."""

    token_ids: v.TokenIds
    reason: v.FinishReason | None
    """None: it never finished."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Request that gets different tokens under the two configs."""

    arm: str
    episode: int
    config: v.Config
    changed: v.Config
    requests: tuple[v.Request, ...]
    request_id: v.RequestId
    plain: Answer
    other: Answer


@dataclass(frozen=True, slots=True)
class Fault:
    """Workload on which the engine failed."""

    arm: str
    """Change under which it failed; "" for the first config."""
    episode: int
    config: v.Config
    requests: tuple[v.Request, ...]
    message: str
    frames: tuple[str, ...] = ()
    """Frames of the exception, the innermost call last (`findings.list_frames`)."""


@dataclass(slots=True)
class MetamorphicResult:
    """Number of compared answers by change, and the first difference."""

    num_compared: dict[str, int] = field(default_factory=dict)
    """Answers that finished under at least one of both configs."""
    num_endless: int = 0
    """Answers that finished under neither."""
    num_episodes: int = 0
    not_tried: tuple[str, ...] = ()
    """Changes that need a capability that the engine lacks."""
    alike: tuple[str, ...] = ()
    """Changes without effect on any config of the engine."""
    contrast: Contrast | None = None
    fault: Fault | None = None


class BrokenError(Exception):
    """The engine raised, or its answer has a wrong type."""


def compare_pair(
    options: CheckOptions,
    make_engine: EngineFactory,
    num_episodes: int,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> MetamorphicResult:
    """Play workloads drawn from the seed under each change, until tokens differ or all are
    played."""
    options = fit_depth(options, make_engine)
    arms, not_tried = usable_pairs(make_engine)
    result = MetamorphicResult({arm.name: 0 for arm in arms}, not_tried=not_tried)
    changing: set[str] = set()
    for episode in range(num_episodes):
        swarm, requests = draw_workload(options, episode, make_engine)
        swarm, requests = _fit_workload(make_engine, swarm, requests)
        name, config = "", swarm.config
        try:
            plain = run_workload(make_engine, swarm, config, requests)
            result.num_episodes += 1
            on_progress(result.num_episodes)
            for arm in arms:
                name, config = arm.name, _change(arm, swarm.config, make_engine, options)
                if config == swarm.config:
                    continue
                changing.add(name)
                other = run_workload(make_engine, swarm, config, requests)
                _count(result, name, plain, other)
                if first_difference(plain, other) is not None:
                    found = _shrink(make_engine, swarm, config, requests)
                    result.contrast = Contrast(name, episode, swarm.config, config, *found)
                    return result
        except BrokenError as error:
            frames = list_frames(error.__cause__ or error)
            result.fault = Fault(name, episode, config, requests, str(error), frames)
            return result
    result.alike = tuple(arm.name for arm in arms if arm.name not in changing)
    return result


def _change(
    arm: Arm, config: v.Config, make_engine: EngineFactory, options: CheckOptions
) -> v.Config:
    """Return the changed config as the engine can be given it, or `config` if the change is
    invalid."""
    if v.config_problems(arm.change(config)):
        return config
    changed, _ = fit_config(arm.change(config), make_engine)
    depth = min(changed.max_frames_in_flight, options.max_depth)
    is_async = changed.async_scheduling and depth > 1
    return replace(changed, max_frames_in_flight=depth, async_scheduling=is_async)


def _count(
    result: MetamorphicResult,
    arm: str,
    plain: Mapping[v.RequestId, Answer],
    other: Mapping[v.RequestId, Answer],
) -> None:
    """Count the answers that can be compared."""
    both = plain.keys() & other.keys()
    ended = [name for name in both if plain[name].reason or other[name].reason]
    result.num_compared[arm] += len(ended)
    result.num_endless += len(both) - len(ended)


def usable_pairs(make_engine: EngineFactory) -> tuple[list[Arm], tuple[str, ...]]:
    """Return the changes that the engine's capabilities allow, and the names of the others."""
    lacking = find_lacking(get_capabilities(make_engine))
    missing = tuple(arm.name for arm in ARMS if arm.feature in lacking)
    return [arm for arm in ARMS if arm.name not in missing], missing


def draw_workload(
    options: CheckOptions, episode: int, make_engine: EngineFactory
) -> tuple[Swarm, tuple[v.Request, ...]]:
    """Return a config and requests; they depend on preset, seed, episode and accepted features
    only."""
    draw = SeededDraw(f"arms/{options.preset}/{options.seed}/{episode}")
    swarm = draw_options(options, draw, make_engine)
    # Every drawn config must stay valid under as many changes as possible.
    config = replace(swarm.config, enable_chunked_prefill=not swarm.config.is_encoder_decoder)
    features = swarm.features if swarm.has(MASKS) else swarm.features - {GRAMMAR.name}
    swarm = replace(swarm, config=config, features=features)
    count = draw.integer(2, REQUESTS_MAX)
    return swarm, tuple(
        draw_request(swarm, draw, request_name(index), index) for index in range(count)
    )


def _fit_workload(
    make_engine: EngineFactory, swarm: Swarm, requests: tuple[v.Request, ...]
) -> tuple[Swarm, tuple[v.Request, ...]]:
    """Return the workload as the engine can be given it."""
    config, _ = fit_config(swarm.config, make_engine)
    weaker = get_traits(make_engine).equivalence
    if weaker is not None:
        fitting = (weaker.fit_request(request, config) for request in requests)
        requests = tuple(request for request in fitting if request is not None)
    lacking = find_lacking(get_capabilities(make_engine))
    return replace(swarm, config=config), tuple(fit(request, lacking)[0] for request in requests)


def run_workload(
    make_engine: EngineFactory, swarm: Swarm, config: v.Config, requests: Sequence[v.Request]
) -> dict[v.RequestId, Answer]:
    """Return the answers of the accepted requests, one of which is submitted per step.

    Raises:
        BrokenError: the engine raised, or its answer has a wrong type.
    """
    engine, client = _build(make_engine, config), Client()
    worker = build_worker(make_engine, config, swarm)
    worker.acceptance = (0, 1, 2)
    answers: dict[v.RequestId, Answer] = {}
    chunks: Counter[v.RequestId] = Counter()
    if Capability.REJECTION not in engine.capabilities():
        spec = SpecEngine(config)
        accepted = (not isinstance(spec.apply(v.Submit(one)), v.Rejected) for one in requests)
        requests = list(compress(requests, accepted))
    work = sum(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    work *= 1 + CHUNKS * any(request.resumable for request in requests)
    for step in range(20 + work * (1 + len(requests))):
        if step < len(requests):
            _submit(engine, client, requests[step])
            answers |= {name: Answer((), None) for name in client.live if name not in answers}
        elif not client.live:
            break
        plan = _ask(engine, v.Schedule())
        worker.observe(v.Schedule(), plan)
        client.follow(v.Schedule(), plan)
        has_rows = isinstance(plan, v.Plan) and bool(plan.rows)
        if len(client.plans) == config.max_frames_in_flight or (client.plans and not has_rows):
            _commit(engine, worker, client, answers, chunks)
    return answers


def build_worker(make_engine: EngineFactory, config: v.Config, swarm: Swarm) -> Worker:
    """Return the worker for the plans of these engines."""
    next_token = token_function(swarm.token_seed, swarm.vocabulary_size)
    return fit_worker(make_worker(get_traits(make_engine), config, next_token), make_engine)


def _build(make_engine: EngineFactory, config: v.Config) -> Engine:
    """Return an engine. Raises BrokenError, or the engine's own ConfigError."""
    try:
        return build(make_engine, config)
    except (v.ConfigError, BadEngineError):
        raise
    except Exception as error:
        raise BrokenError(
            f"the engine raised {describe_error(error)} while it was built"
        ) from error


def _ask(engine: Engine, event: v.Event) -> v.Observation:
    """Return the answer of an engine. Raises BrokenError."""
    try:
        answer = engine.apply(event)
    except Exception as error:
        what = f"the engine raised {describe_error(error)}"
        raise BrokenError(f"{what}, given {describe_event(event)}") from error
    if not isinstance(answer, (*ANSWER_TYPES[type(event)], v.Rejected)):
        raise BrokenError(f"{describe_event(event)} was answered with {cut_repr(answer)}")
    if (fault := fault_of_types(event, answer, None)) is not None:
        raise BrokenError(fault.message)
    return answer


def _submit(engine: Engine, client: Client, request: v.Request) -> None:
    event = v.Submit(request)
    client.follow(event, _ask(engine, event))
    if request.structured_output and request.request_id in client.live:
        _ask(engine, v.GrammarReady(request.request_id))


def _commit(
    engine: Engine,
    worker: Worker,
    client: Client,
    answers: dict[v.RequestId, Answer],
    chunks: Counter[v.RequestId],
) -> None:
    """Commit the oldest plan, continue sessions that have become idle, and propose drafts."""
    frame_id = client.plans[0].frame_id
    if client.plans[0].has_structured_output_requests:
        asked = ask_mask(worker, client.plans[0])
        worker.observe(asked, _ask(engine, asked))
    event = v.Commit(frame_id, worker.answer(frame_id))
    outputs = _ask(engine, event)
    worker.observe(event, outputs)
    client.follow(event, outputs)
    if not isinstance(outputs, v.Outputs):
        client.plans.pop(0)
        return
    for row in outputs.rows:
        if row.request_id not in answers:
            raise BrokenError(
                f"outputs are delivered to {row.request_id!r}, which was never submitted"
            )
        before = answers[row.request_id].token_ids
        answers[row.request_id] = Answer(before + row.new_token_ids, row.finish_reason)
    for row in outputs.rows:
        rests = row.finish_reason is not None and row.request_id in client.sessions
        if rests and not _go_on(engine, client, row.request_id, chunks):
            del answers[row.request_id]  # the other config may have accepted the input
    config = worker.config
    if config.num_speculative_tokens and not config.async_scheduling:
        count = config.num_speculative_tokens
        rows = [
            v.RowTokens(name, worker.propose(name, count, index % (count + 1)))
            for index, name in enumerate(_list_last_sampled(engine, client))
        ]
        if rows:
            _ask(engine, v.Drafts(tuple(rows)))


def _go_on(engine: Engine, client: Client, name: v.RequestId, chunks: Counter[v.RequestId]) -> bool:
    """Continue an idle session with another input, `CHUNKS` times, and then close it. Return False
    if the engine rejects an input, which may be too long for one pool only; the session is then
    closed, too."""
    whole, length = client.live[name], min(client.live[name].max_tokens, 2)
    chunk = replace(
        whole,
        prompt_token_ids=whole.prompt_token_ids[:2],
        items=(),
        max_tokens=length,
        min_tokens=min(whole.min_tokens, length),
    )
    has_more = chunks[name] < CHUNKS and Capability.REJECTION in engine.capabilities()
    chunks[name] += 1
    for update in [chunk] * has_more + [v.Request(name, (0,))]:
        event = v.StreamingUpdate(update)
        answer = _ask(engine, event)
        client.follow(event, answer)
        if not isinstance(answer, v.Rejected):
            return update is chunk or not has_more
    return False


def _list_last_sampled(engine: Engine, client: Client) -> list[v.RequestId]:
    """Return the unfinished requests that sampled last.

    An engine that neither rejects nor drops late drafts gets none for requests that are in another
    plan by now, or were preempted by one.
    """
    names = [name for name in client.sampled if name in client.live]
    if {Capability.REJECTION, Capability.LATE_DRAFTS} & engine.capabilities():
        return names
    plans = [*client.plans, *([client.last_plan] if client.last_plan else [])]
    gone = {name for plan in plans for name in plan.preempted_req_ids}
    gone |= {row.request_id for plan in client.plans for row in plan.rows}
    return [name for name in names if name not in gone]


def first_difference(
    plain: Mapping[v.RequestId, Answer], other: Mapping[v.RequestId, Answer]
) -> v.RequestId | None:
    """Return the first request that both runs accepted and answered differently, or None."""
    return next((name for name in plain if name in other and plain[name] != other[name]), None)


def _shrink(
    make_engine: EngineFactory, swarm: Swarm, changed: v.Config, requests: tuple[v.Request, ...]
) -> tuple[tuple[v.Request, ...], v.RequestId, Answer, Answer]:
    """Return a smaller workload that still differs, the differing request, and its two answers."""

    def differ(some: Sequence[v.Request]) -> tuple[v.RequestId, Answer, Answer] | None:
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
    return requests, *found
