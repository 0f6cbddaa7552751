"""Steps: the loop of the engine. It plans, runs and delivers, for all kinds of requests.

step:  Schedule -> plan -> runner -> tokens -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Protocol, runtime_checkable

import numpy as np

from blockstep.impl.array_plans import ArrayOutputs, ArrayPlan
from blockstep.impl.device.dims import count_gpu_lanes
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.device_loop import Resident
from blockstep.impl.engine.errors import EngineError, RequestError
from blockstep.impl.engine.journal import CommitRan, PlanRan, StepRan
from blockstep.impl.engine.loading import Loaded
from blockstep.impl.engine.observer import FenceObserver, MakeObserver, Observer
from blockstep.impl.engine.outputs import (
    Chunk,
    Completion,
    Live,
    Output,
    StepChunks,
    begin_output,
    pick_drafts,
)
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.rows import Wanted
from blockstep.impl.engine.runner import Answer, Logprobs
from blockstep.impl.engine.schedulers import Scheduler
from blockstep.impl.engine.settings import Settings
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    FinishReason,
    FrameId,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Rejected,
    Request,
    RequestId,
    Schedule,
    Stats,
)

log = logging.getLogger(__name__)


@runtime_checkable
class ArrayScheduler(Protocol):
    """A scheduler that can also plan and commit in arrays, as the host engine can."""

    def schedule_arrays(self) -> ArrayPlan | Rejected:
        """Make a plan, as the event `Schedule` does."""
        ...

    def commit_arrays(
        self, frame_id: FrameId, token_ids: np.ndarray, counts: np.ndarray | None = None
    ) -> ArrayOutputs | Rejected:
        """Commit a frame, as the event `Commit` does."""
        ...


class Steps:
    """Serves requests step by step. Threads may share it: calls wait for each other."""

    def __init__(self, settings: Settings, loaded: Loaded, check: MakeObserver | None) -> None:
        self.settings = settings
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.model_config
        self._runner = loaded.runner
        self._connector = loaded.runner.connector
        self._check = check
        self._live: dict[RequestId, Live] = {}
        self._attended: set[RequestId] = set()
        """Unfinished requests whose tokens are each read when they are delivered."""
        self._frames: deque[Plan | ArrayPlan] = deque()
        """Plans that were dispatched and not committed, oldest first."""
        self._completions: dict[RequestId, Completion] = {}
        self._num_requests = 0
        self._has_logged_host = False
        """Whether it was logged that requests are served step by step."""
        self._lock = RLock()
        self._start()
        if self._resident is not None:
            self._resident.capture_all()

    def _start(self) -> None:
        """Make a scheduler without any requests."""
        self.observer: Observer | None = None
        """The observer, if there is one."""
        self._resident: Resident | None = None
        """Runs bursts, if the scheduler is the device engine."""
        self._is_batch_old = False
        """Whether bursts have run since the runner saw a plan."""
        self._scheduler: Scheduler | Observer
        if self._check is None:
            self._scheduler = self._make_scheduler(self.config)
        else:
            self._scheduler = self.observer = self._check(self.config, self._make_scheduler)
            if not isinstance(self.observer, FenceObserver):
                self._resident = None  # it must see every step
        self._runner.is_observed = self.observer is not None
        self._arrays: ArrayScheduler | None = None
        """The scheduler, if it works with arrays. Objects say which blocks of branches are copied,
        and which rows come after the stop of a session."""
        needs_objects = self.config.enable_forks or self.settings.enable_sessions
        if (
            self.observer is None
            and not needs_objects
            and isinstance(self._scheduler, ArrayScheduler)
        ):
            self._arrays = self._scheduler

    def _make_scheduler(self, config: Config) -> Scheduler:
        settings, runner = self.settings, self._runner
        if settings.scheduler != "device":
            return HostEngine(config)
        if runner.batch.device == "cpu":
            engine = DeviceEngine(config)
        else:
            # Room for as many waiting requests, before tensors must grow and graphs be captured
            # again.
            slots = 2 * config.max_num_seqs
            engine = DeviceEngine(config, lanes=count_gpu_lanes(config), slots=slots)
        if runner.connector is None:
            self._resident = Resident(
                engine,
                runner.model,
                settings.steps_per_fence,
                runner.batch.adapters,
                # An observer compares states at each fence.
                runs_ahead=self._check is None and runner.batch.device != "cpu",
            )
        return engine

    def step(self) -> Sequence[Chunk]:
        """Plan and run until the oldest frame can be committed; commit it and return the chunks."""
        with self._whole():
            return self._step()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Run one call at a time.

        If it raises, its progress is unknown: abort all requests and restart.
        """
        with self._lock:
            try:
                yield
            except RequestError:
                raise
            except BaseException:
                for name in tuple(self._live):
                    self._end(name, FinishReason.ABORT)
                self._frames.clear()
                self._start()
                self._runner = self._runner.start_anew()
                raise

    def _step(self) -> Sequence[Chunk]:
        resident = self._resident
        if resident is not None and self._live:
            if self._can_burst(resident):
                if self._frames:  # a burst begins with no frame in flight
                    return self._take_answer(self._frames.popleft())
                return self._run_burst(resident)
            unread = resident.take_unread()
            if unread:
                return self._take_burst(unread)
            self._update_runner(resident.engine)
        chunks = [] if self._connector is None else self._take_store_events(self._connector)
        while len(self._frames) < self.config.max_frames_in_flight:
            plan = self._dispatch()
            has_rows = len(plan) if isinstance(plan, ArrayPlan) else len(plan.rows)
            if not has_rows:
                if plan.preempted_req_ids and not self._frames:
                    continue  # a waiting request was preempted: now others may have room
                break
            self._frames.append(plan)
            if self.observer is not None:
                self.observer.ran(self._runner.peek(plan.frame_id).ran)
        if self._frames:
            answer = self._take_answer(self._frames.popleft())
            return [*chunks, *answer] if chunks else answer
        is_waiting = not chunks and self._connector is not None and self._connector.wait()
        if self.has_unfinished_requests and not (chunks or is_waiting):
            raise EngineError(f"no progress: {len(self._live)} requests cannot run")
        return chunks

    def _dispatch(self) -> Plan | ArrayPlan:
        """Make a plan and start it, in arrays if the scheduler can and no request needs objects."""
        if self._arrays is not None and not self._runner.needs_objects:
            arrays = self._arrays.schedule_arrays()
            if isinstance(arrays, Rejected):
                raise EngineError(f"Schedule was rejected: {arrays.code}: {arrays.detail}")
            self._runner.dispatch_arrays(arrays)
            self._attend(arrays.new_rows.values())
            return arrays
        plan = self._apply(Schedule())
        assert isinstance(plan, Plan), "Schedule is answered with a Plan"
        self._runner.dispatch(plan)
        self._attend(new.request for new in plan.new)
        return plan

    def _attend(self, requests: Iterable[Request]) -> None:
        """Note which of the requests that start are attended (see `Live.is_attended`)."""
        for request in requests:
            if self._live[request.request_id].is_attended:
                self._attended.add(request.request_id)

    def _can_burst(self, resident: Resident) -> bool:
        """Whether the next steps may stay on the device; if not, the reason is logged once."""
        if not resident.is_free:
            return False
        needs = next((needs for one in self._live.values() if (needs := one.needs_host)), "")
        if needs and not self._has_logged_host:
            self._has_logged_host = True
            log.warning(
                "scheduler = 'device': a request asks for %s, so all requests are served step by "
                "step by the host until it ends",
                needs,
            )
        return not needs

    def _run_burst(self, resident: Resident) -> list[Chunk]:
        """Run some steps on the device; return what each request gained."""
        self._is_batch_old = True
        steps = resident.run(self._runner.chosen)
        if isinstance(self.observer, FenceObserver):
            self.observer.fence(steps)
        is_idle = not any(isinstance(step, PlanRan) and step.rows for step in steps)
        if is_idle and not resident.num_preempted and not resident.was_ahead:
            raise EngineError(f"no progress: {len(self._live)} requests cannot run")
        return self._take_burst(steps)

    def _take_burst(self, steps: Sequence[StepRan]) -> list[Chunk]:
        """Deliver the tokens of a burst's commits, one chunk per request."""
        tokens: dict[RequestId, list[int]] = {}
        last: dict[RequestId, OutputRow] = {}
        for step in steps:
            if isinstance(step, CommitRan):
                for row in step.outputs.rows:
                    tokens.setdefault(row.request_id, []).extend(row.new_token_ids)
                    last[row.request_id] = row
        rows = tuple(
            OutputRow(
                name, tuple(made), row.finish_reason, row.stop_token_id, row.num_cached_tokens
            )
            for (name, made), row in zip(tokens.items(), last.values(), strict=True)
        )
        return self._deliver_all(Outputs(rows), {})

    def _update_runner(self, engine: DeviceEngine) -> None:
        """Bring the runner's batch up to date: it has not seen the plans of bursts."""
        if not self._is_batch_old:
            return
        self._is_batch_old = False
        self._runner.batch.restore(
            (live.output.request, now, live.output.wanted)
            for now in engine.snapshot().requests
            if now.num_cached_tokens >= 0
            for live in [self._live[now.request_id]]
        )

    def _take_store_events(self, connector: Connector) -> list[Chunk]:
        """Pass the store's offers and reports to the scheduler; return chunks of finished
        requests."""
        answers = [self._apply(event) for event in connector.list_events()]
        ended = [self._deliver_all(one, {}) for one in answers if isinstance(one, Outputs)]
        return [chunk for chunks in ended for chunk in chunks]

    def _is_saving(self, *request_ids: RequestId) -> bool:
        return self._connector is not None and self._connector.is_saving(*request_ids)

    def _deliver_all(
        self, outputs: Observation, logprobs: Mapping[RequestId, Logprobs]
    ) -> list[Chunk]:
        assert isinstance(outputs, Outputs), "a model output is answered with Outputs"
        return [
            self._deliver(row, logprobs) for row in outputs.rows if row.request_id in self._live
        ]

    def _take_answer(self, plan: Plan | ArrayPlan) -> Sequence[Chunk]:
        if isinstance(plan, ArrayPlan):
            return self._take_arrays(plan.frame_id)
        answer = self._runner.collect(plan.frame_id)
        outputs = self._apply(Commit(plan.frame_id, answer.ran.sampled, answer.transfers))
        chunks = self._deliver_all(outputs, answer.logprobs)
        self._propose(answer, {one.request_id for one in chunks if one.finish_reason is not None})
        return chunks

    def _take_arrays(self, frame_id: FrameId) -> Sequence[Chunk]:
        """Commit a frame of arrays.

        A row gets an object only if its request ends or is attended; the tokens of other rows stay
        in the batch until their output is read.
        """
        assert self._arrays is not None, "it has made the plan"
        tokens, logprobs = self._runner.collect_arrays(frame_id)
        outputs = self._arrays.commit_arrays(frame_id, tokens)
        if isinstance(outputs, Rejected):
            raise EngineError(f"Commit was rejected: {outputs.code}: {outputs.detail}")
        rows = set(outputs.ended)
        if self._attended:
            names = outputs.names.tolist()
            rows.update(row for row, name in enumerate(names) if name in self._attended)
        batch = self._runner.batch
        index = batch.note_delivered(outputs.names.slots, outputs.num_cached_tokens)
        in_order = sorted(rows)
        batch.arrays.columns.num_late[index[in_order]] -= 1  # their outputs take the token below
        made = {row: self._deliver(outputs.build_row(row), logprobs) for row in in_order}
        return StepChunks(outputs, made)

    def _catch_up(self, name: RequestId, output: Output) -> None:
        """Append the tokens that the batch keeps for an output."""
        tokens, num_cached = self._runner.batch.take_late(name, len(output.token_ids))
        if tokens:
            output.catch_up(tokens, num_cached)

    def _propose(self, answer: Answer, stopped: set[RequestId]) -> None:
        """Send drafts to the scheduler as far as grammars accept them, unless they stay in the
        runner."""
        if self.config.async_scheduling:
            return
        going_on = {name: one for name, one in self._live.items() if name not in stopped}
        drafts = pick_drafts(answer.ran.proposals, going_on)
        if drafts:
            self._apply(Drafts(drafts))

    def _deliver(self, row: OutputRow, logprobs: Mapping[RequestId, Logprobs]) -> Chunk:
        """Append a step's tokens to a request's output, and end the request if it is complete."""
        name = row.request_id
        live = self._live[name]
        self._catch_up(name, live.output)
        chunk = live.output.take(row, logprobs.get(name))
        if live.chunks is not None:
            live.chunks.append(chunk)
        if chunk.finish_reason is None:
            return chunk
        if row.finish_reason is None:
            self._apply(Abort((name,)))
            self._end(name, chunk.finish_reason)
        elif live.completions is None:
            self._end(name, chunk.finish_reason)
        else:
            live.completions.append(live.output.complete(chunk.finish_reason))
            if not live.go_on():
                self._forget(name)
        return chunk

    def _end(self, name: RequestId, reason: FinishReason) -> None:
        live = self._live[name]
        self._catch_up(name, live.output)
        self._forget(name)
        if live.is_resting:
            return
        completion = live.complete(reason)
        if live.completions is None:
            self._completions[name] = completion
        else:
            live.completions.append(completion)

    def _forget(self, name: RequestId) -> None:
        del self._live[name]
        self._attended.discard(name)
        self._runner.end(name)

    def _apply(self, event: Event) -> Observation:
        """Apply an event that the scheduler must accept."""
        answer = self._scheduler.apply(event)
        if isinstance(answer, Rejected):
            raise EngineError(
                f"{type(event).__name__} was rejected: {answer.code}: {answer.detail}"
            )
        return answer

    def is_live(self, request_id: RequestId) -> bool:
        """Whether a request is unfinished."""
        return request_id in self._live

    def _submit(self, event: Event, what: str) -> None:
        """Apply an event of a client, which the scheduler may reject."""
        answer = self._scheduler.apply(event)
        if isinstance(answer, Rejected):
            raise RequestError(f"{what}: {answer.detail}")

    def _take_seed(self, params: SamplingParams) -> int:
        """Return the seed of the next request, or of a session's next input."""
        seed = self.settings.seed * 1_000_003 + self._num_requests
        self._num_requests += 1
        return seed if params.seed is None else params.seed

    def _begin(self, request: Request, wanted: Wanted) -> Output:
        self._runner.begin(request.request_id, wanted)
        return begin_output(self.tokenizer, request, wanted)

    def abort(self, *request_ids: RequestId) -> None:
        """Abort requests; their completions have what was generated so far.

        Ids of finished requests are ignored.

        Raises:
            RequestError: an id is not a text.
        """
        wrong = next((name for name in request_ids if not isinstance(name, str)), None)
        if wrong is not None:
            raise RequestError(f"abort: {wrong!r} is not a request's id; give one or more texts")
        with self._whole():
            names = tuple(name for name in dict.fromkeys(request_ids) if name in self._live)
            if names:
                self._apply(Abort(names))
                for name in names:
                    self._end(name, FinishReason.ABORT)

    def get_stats(self) -> Stats:
        """Return counters since the start: prefix hits, preemptions, drafts."""
        with self._lock:
            return self._scheduler.snapshot().stats

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do: an idle session waits for its client."""
        with self._lock:
            return any(not live.is_resting for live in self._live.values())

    def pop_completion(self, request_id: RequestId) -> Completion:
        """Return the completion of a finished request, once.

        Raises `RequestError` if there is none.
        """
        if request_id not in self._completions:
            raise RequestError(f"{request_id!r}: has not ended, or was taken already")
        return self._completions.pop(request_id)
