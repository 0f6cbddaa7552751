"""LLM: the engine as a user meets it. It loads a model, takes requests, and steps until they end.

add_request -> Submit --+
                        v
step:  Schedule -> plan -> runner -> answer -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock

from blockstep.impl.engine.batch import Wanted
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.errors import EngineError, RequestError, SettingsError
from blockstep.impl.engine.grammars import Grammars
from blockstep.impl.engine.loading import Settings, load_engine
from blockstep.impl.engine.observer import MakeObserver, Observer
from blockstep.impl.engine.outputs import Chunk, Completion, Live, Output, begin_output, pick_drafts
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.prompts import (
    Prompt,
    encode_for,
    expect_adapter,
    give_each,
    make_request,
    split_prompts,
)
from blockstep.impl.engine.runner import Answer, Logprobs
from blockstep.impl.engine.sessions import Session
from blockstep.impl.engine.store import KVStore
from blockstep.impl.fastest import Scheduler, get_named
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
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
    StreamingUpdate,
    Submit,
    TokenIds,
)


class LLM:
    """A model that serves requests.

        llm = LLM("path/to/model")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Threads may share it: a step, a new request and an abort wait for each other. What raises in the
    middle of one (an interrupt, too) ends all requests as aborted, and the next ones are served.

    Raises:
        CheckpointError: the folder holds no model that can be run.
        SettingsError: settings that contradict each other, the model or the machine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        settings: Settings | None = None,
        check: MakeObserver | None = None,
        kv_store: KVStore | None = None,
        **options: object,
    ) -> None:
        """Load `model`. Settings are given as a whole or one by one (see `Settings`).

        `kv_store`: where KV of requests that end is kept, and that of others is found.
        """
        if settings is not None and options:
            raise SettingsError(f"settings were given; put {sorted(options)} into them")
        if settings is None:
            try:
                settings = Settings(**options)  # type: ignore[arg-type]
            except TypeError as error:
                raise SettingsError(f"{error}; see blockstep.impl.engine.Settings") from error
        self.settings = settings
        loaded = load_engine(Path(model), settings, kv_store)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.model_config
        self._runner = loaded.runner
        self._connector = loaded.runner.connector
        vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        config = self.config
        reasoning_end = None if config.enable_in_reasoning else config.reasoning_end_token_id
        self._grammars = Grammars(self.tokenizer, vocab_size, eos, reasoning_end)
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
        asked = frozenset(("sessions",) if self.settings.enable_sessions else ())
        make_scheduler = get_named(self.settings.scheduler, self.config, asked)
        self._scheduler: Scheduler | Observer
        if self._check is None:
            self._scheduler = make_scheduler(self.config)
        else:
            self._scheduler = self.observer = self._check(self.config, make_scheduler)

    # Requests.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Serve `prompts` (texts or token ids) together; completions in their order.

        Raises:
            RequestError: a prompt that cannot be served; then none of them is.
        """
        several = split_prompts(prompts)
        wanted = give_each("params", SamplingParams, params, len(several), SamplingParams())
        adapters = give_each("adapter", str, adapter, len(several), None)
        names: list[RequestId] = []
        try:
            for prompt, one, name in zip(several, wanted, adapters, strict=True):
                names.append(self.add_request(prompt, one, adapter=name))
            while any(name in self._live for name in names) or self._is_saving(*names):
                self.step()
        except BaseException:
            self.abort(*names)
            for name in names:
                self._completions.pop(name, None)
            raise
        return [self._completions.pop(name) for name in names]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Generator[Chunk, None, None]:
        """Serve one prompt, and yield what it gains as it gains it.

        Giving the iterator up aborts the request. Other requests go on meanwhile, each stream keeps
        what is its own.
        """
        chunks: deque[Chunk] = deque()
        with self._lock:
            name = self.add_request(prompt, params, adapter=adapter)
            self._live[name].chunks = chunks
        try:
            while chunks or name in self._live:
                if chunks:
                    yield chunks.popleft()
                else:
                    self.step()
        finally:
            self.abort(name)
            self._completions.pop(name, None)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestId:
        """Hand in one prompt, to be served by `step`; returns its name.

        A lower `priority` is served first, where the policy is priority. `adapter` is one of
        `Settings.lora_modules`; None: the model as it is. KV is shared under one `cache_salt` only.

        Raises:
            RequestError: it is empty, holds a token that the model does not have, is longer than
                the model or the cache allows, or needs a tokenizer that is missing; or its grammar
                is none; or there is no such adapter.
        """
        return self._add(prompt, params, priority, adapter, cache_salt=cache_salt)

    def open_session(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> Session:
        """Hand in the first input of a session, which goes on with further ones.

        Raises:
            RequestError: as `add_request`; or the engine was not loaded with `enable_sessions`, or
                `params` have stop strings.
        """
        if not self.settings.enable_sessions:
            raise RequestError("sessions: load the model with enable_sessions=True")
        with self._lock:
            name = self._add(prompt, params, priority, adapter, resumable=True)
            live = self._live[name]
            live.chunks, live.completions = deque(), deque()
            wanted = live.output.wanted.params
            return Session(self, name, wanted, live.chunks, live.completions)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        adapter: str | None,
        resumable: bool = False,
        cache_salt: str | None = None,
    ) -> RequestId:
        params = SamplingParams() if params is None else params
        expect_adapter(adapter, self.settings.lora_modules)
        token_ids = self._encode(prompt, params, is_session=resumable)
        matcher = self._grammars.begin(params)
        with self._whole():
            name = f"request-{self._num_requests}"
            request = replace(
                self._ask(name, token_ids, params), priority=priority, adapter=adapter,
                resumable=resumable, cache_salt=cache_salt,
            )  # fmt: skip
            self._submit(Submit(request), f"prompt of {len(token_ids)} tokens")
            wanted = Wanted(params, self._take_seed(params), matcher)
            self._live[name] = Live(self._begin(request, wanted))
            if self._connector is not None:
                self._apply(self._connector.begin(request))
        return name

    def send_input(self, request_id: RequestId, prompt: Prompt, params: SamplingParams) -> None:
        """Further input of a session; see `Session.send`."""
        token_ids = self._encode(prompt, params, is_session=True, begins=False)
        matcher = self._grammars.begin(params)
        with self._whole():
            chunk = replace(self._ask(request_id, token_ids, params), resumable=True)
            self._submit(StreamingUpdate(chunk), f"input of {len(token_ids)} tokens")
            wanted = Wanted(params, self._take_seed(params), matcher)
            live = self._live[request_id]

            def begin(kept: TokenIds) -> Output:
                request = replace(live.output.request, prompt_token_ids=(*kept, *token_ids))
                return self._begin(request, wanted)

            live.inputs.append(begin)
            if live.is_resting:
                live.go_on()

    def end_input(self, request_id: RequestId) -> None:
        """No more input of a session comes; see `Session.close`."""
        with self._whole():
            live = self._live.get(request_id)
            if live is None or None in live.inputs:
                return
            self._submit(StreamingUpdate(Request(request_id, (0,))), "the end of input")
            live.inputs.append(None)
            if live.is_resting:
                self._end(request_id, FinishReason.STOP)

    def is_live(self, request_id: RequestId) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def _encode(self, prompt: Prompt, params: SamplingParams, **kind: bool) -> TokenIds:
        size = self.model_config.vocab_size
        return encode_for(self.tokenizer, size, prompt, params, **kind)

    def _ask(self, name: RequestId, token_ids: TokenIds, params: SamplingParams) -> Request:
        return make_request(
            name, token_ids, params, self.model_config.eos_token_ids, self._num_requests
        )

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

    # Steps.

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
