"""Steps: the engine at work. It plans, runs and delivers, whoever asked for it.

step:  Schedule -> plan -> runner -> answer -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock

from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.engine.batch import Wanted
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.errors import EngineError, RequestError
from blockstep.impl.engine.loading import Loaded, Settings
from blockstep.impl.engine.observer import FenceObserver, MakeObserver, Observer
from blockstep.impl.engine.outputs import Chunk, Completion, Live, Output, begin_output, pick_drafts
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.resident import LANES_ON_GPU, Resident
from blockstep.impl.engine.runner import Answer, Logprobs
from blockstep.impl.fastest import Scheduler, get_named
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    FinishReason,
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


class Steps:
    """Serves requests by steps. Threads may share it: one thing is done at a time."""

    def __init__(self, settings: Settings, loaded: Loaded, check: MakeObserver | None) -> None:
        self.settings = settings
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.model_config
        self._runner = loaded.runner
        self._connector = loaded.runner.connector
        self._check = check
        self._live: dict[RequestId, Live] = {}
        self._frames: deque[Plan] = deque()
        """Dispatched and not committed, oldest first."""
        self._completions: dict[RequestId, Completion] = {}
        self._num_requests = 0
        self._lock = RLock()
        self._start()

    def _start(self) -> None:
        """A scheduler that knows no request."""
        self.observer: Observer | None = None
        """Who watches, if anybody does."""
        self._resident: Resident | None = None
        """Who runs what can stay on the device, if the scheduler lives there."""
        self._is_batch_old = False
        """Whether the runner does not know what `_resident` has done."""
        self._scheduler: Scheduler | Observer
        if self._check is None:
            self._scheduler = self._make_scheduler(self.config)
        else:
            self._scheduler = self.observer = self._check(self.config, self._make_scheduler)
            if not isinstance(self.observer, FenceObserver):
                self._resident = None

    def _make_scheduler(self, config: Config) -> Scheduler:
        settings, runner = self.settings, self._runner
        if settings.scheduler != "device":
            asked = frozenset(("sessions",) if settings.enable_sessions else ())
            return get_named(settings.scheduler, config, asked)(config)
        if runner.batch.device == "cpu":
            engine = DeviceEngine(config)
        else:
            engine = DeviceEngine(config, lanes=LANES_ON_GPU)
        if runner.connector is None and not runner.batch.adapters:
            self._resident = Resident(engine, runner.model, settings.steps_per_fence)
        return engine

    def step(self) -> list[Chunk]:
        """Plan and run until an answer is due, and take it; what each request gained by it."""
        with self._whole():
            return self._step()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """One thing at a time. If it raises nobody knows how far it came, so start anew."""
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

    def _step(self) -> list[Chunk]:
        resident, live = self._resident, self._live.values()
        if resident is not None and resident.is_free and live:
            if all(one.wants_tokens_only for one in live):
                return self._run_burst(resident)
            self._tell_runner(resident.engine)
        chunks = [] if self._connector is None else self._hear_of_store(self._connector)
        while len(self._frames) < self.config.max_frames_in_flight:
            plan = self._apply(Schedule())
            assert isinstance(plan, Plan), "Schedule is answered with a Plan"
            self._runner.dispatch(plan)
            if not plan.rows:
                if plan.preempted_req_ids and not self._frames:
                    continue  # the first in line gave its blocks up: now there is room for another
                break
            self._frames.append(plan)
            if self.observer is not None:
                self.observer.ran(self._runner.peek(plan.frame_id).ran)
        if self._frames:
            return [*chunks, *self._take_answer(self._frames.popleft())]
        is_waiting = not chunks and self._connector is not None and self._connector.wait()
        if self.has_unfinished_requests and not (chunks or is_waiting):
            raise EngineError(f"no progress: {len(self._live)} requests wait for nothing")
        return chunks

    def _run_burst(self, resident: Resident) -> list[Chunk]:
        """Some steps on the device, and what they came to."""
        self._is_batch_old = True
        steps = resident.run()
        if isinstance(self.observer, FenceObserver):
            self.observer.fence(steps)
        if not any(step.rows for step in steps) and not resident.num_preempted:
            raise EngineError(f"no progress: {len(self._live)} requests wait for nothing")
        chunks = [self._deliver_all(step.outputs, {}) for step in steps]
        return [chunk for of_step in chunks for chunk in of_step]

    def _tell_runner(self, engine: DeviceEngine) -> None:
        """Plans tell what changes from step to step; the runner has not seen the last ones."""
        if not self._is_batch_old:
            return
        self._is_batch_old = False
        self._runner.batch.restore(
            (live.output.request, now, live.output.wanted)
            for now in engine.snapshot().requests
            if now.num_cached_tokens >= 0
            for live in [self._live[now.request_id]]
        )

    def _hear_of_store(self, connector: Connector) -> list[Chunk]:
        """Tell the scheduler what the store says, and what has come to its end."""
        answers = [self._apply(event) for event in connector.list_events()]
        ended = [self._deliver_all(one, {}) for one in answers if isinstance(one, Outputs)]
        return [chunk for chunks in ended for chunk in chunks]

    def _is_saving(self, *request_ids: RequestId) -> bool:
        return self._connector is not None and self._connector.is_saving(*request_ids)

    def _deliver_all(
        self, outputs: Observation, logprobs: Mapping[RequestId, Logprobs]
    ) -> list[Chunk]:
        assert isinstance(outputs, Outputs), "an answer of the worker is answered with Outputs"
        return [
            self._deliver(row, logprobs) for row in outputs.rows if row.request_id in self._live
        ]

    def _take_answer(self, plan: Plan) -> list[Chunk]:
        answer = self._runner.collect(plan.frame_id)
        outputs = self._apply(Commit(plan.frame_id, answer.ran.sampled, answer.transfers))
        chunks = self._deliver_all(outputs, answer.logprobs)
        self._propose(answer, {one.request_id for one in chunks if one.finish_reason is not None})
        return chunks

    def _propose(self, answer: Answer, stopped: set[RequestId]) -> None:
        """Hand the drafts in that a grammar accepts, unless they stay with the runner."""
        if self.config.async_scheduling:
            return
        going_on = {name: one for name, one in self._live.items() if name not in stopped}
        drafts = pick_drafts(answer.ran.proposals, going_on)
        if drafts:
            self._apply(Drafts(drafts))

    def _deliver(self, row: OutputRow, logprobs: Mapping[RequestId, Logprobs]) -> Chunk:
        """Take what a step brought to one request, and end it if it has enough."""
        name = row.request_id
        live = self._live[name]
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
        self._forget(name)
        if live.completions is None:
            self._completions[name] = live.output.complete(reason)
        elif not live.is_resting:
            live.completions.append(live.output.complete(reason))

    def _forget(self, name: RequestId) -> None:
        del self._live[name]
        self._runner.chosen.pop(name, None)

    def _apply(self, event: Event) -> Observation:
        """Give the scheduler an event that it cannot refuse."""
        answer = self._scheduler.apply(event)
        if isinstance(answer, Rejected):
            raise EngineError(f"{type(event).__name__} was refused: {answer.code}: {answer.detail}")
        return answer

    def is_live(self, request_id: RequestId) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def _submit(self, event: Event, what: str) -> None:
        """Give the scheduler what a client asks for, which it may refuse."""
        answer = self._scheduler.apply(event)
        if isinstance(answer, Rejected):
            raise RequestError(f"{what}: {answer.detail}")

    def _take_seed(self, params: SamplingParams) -> int:
        """The seed of the next request, or input."""
        seed = self.settings.seed * 1_000_003 + self._num_requests
        self._num_requests += 1
        return seed if params.seed is None else params.seed

    def _begin(self, request: Request, wanted: Wanted) -> Output:
        self._runner.chosen[request.request_id] = wanted
        return begin_output(self.tokenizer, request, wanted)

    def abort(self, *request_ids: RequestId) -> None:
        """Give requests up; what they have gained so far is their completion.

        Names of requests that have ended change nothing.
        """
        with self._whole():
            names = tuple(name for name in request_ids if name in self._live)
            if names:
                self._apply(Abort(names))
                for name in names:
                    self._end(name, FinishReason.ABORT)

    def get_stats(self) -> Stats:
        """Counters since the start: prefix hits, preemptions, drafts."""
        return self._scheduler.snapshot().stats

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: a session that rests waits for its client."""
        return any(not live.is_resting for live in self._live.values())

    def pop_completion(self, request_id: RequestId) -> Completion:
        """The completion of a request that has ended. Raises `RequestError` if it has not."""
        if request_id not in self._completions:
            raise RequestError(f"{request_id!r}: has not ended, or was taken already")
        return self._completions.pop(request_id)
