"""LLM: the engine as a user meets it. It loads a model, takes requests, and steps until they end.

add_request -> Submit --+
                        v
step:  Schedule -> plan -> runner -> answer -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from blockstep.impl.engine.errors import EngineError, RequestError, SettingsError
from blockstep.impl.engine.grammars import Grammars
from blockstep.impl.engine.loading import Settings, load_engine
from blockstep.impl.engine.observer import MakeObserver, Observer
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.prompts import Prompt, encode_prompt, give_each, split_prompts
from blockstep.impl.engine.runner import Answer, Logprobs
from blockstep.impl.engine.text import Detokenizer
from blockstep.impl.fastest import Scheduler, get_fastest
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
    RowTokens,
    Schedule,
    Stats,
    Submit,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request gained in one step."""

    request_id: RequestId
    token_ids: TokenIds
    text: str = ""
    """"" without a tokenizer; may lag behind the tokens while a stop string is possible."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a request."""
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    """Outputs. With a stop string they may reach past `text`, to the end of its last token."""
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    logprobs: Logprobs | None = None
    """Per output token, if asked for: log probabilities by token id, the sampled one among them."""


@dataclass(slots=True)
class Live:
    """A request that has not ended."""

    request: Request
    params: SamplingParams
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    streamed: deque[Chunk] | None = None
    """Chunks that its stream has not yielded yet, if it has one."""


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
        **options: object,
    ) -> None:
        """Load `model`. Settings are given as a whole or one by one (see `Settings`)."""
        if settings is not None and options:
            raise SettingsError(f"settings were given; put {sorted(options)} into them")
        if settings is None:
            try:
                settings = Settings(**options)  # type: ignore[arg-type]
            except TypeError as error:
                raise SettingsError(f"{error}; see blockstep.impl.engine.Settings") from error
        self.settings = settings
        loaded = load_engine(Path(model), settings)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.model_config
        self._runner = loaded.runner
        vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        self._grammars = Grammars(self.tokenizer, vocab_size, eos)
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
        make_scheduler = get_fastest(self.config)
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
            while any(name in self._live for name in names):
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
        streamed: deque[Chunk] = deque()
        with self._lock:
            name = self.add_request(prompt, params, adapter=adapter)
            self._live[name].streamed = streamed
        try:
            while streamed or name in self._live:
                if streamed:
                    yield streamed.popleft()
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
    ) -> RequestId:
        """Hand in one prompt, to be served by `step`; returns its name.

        A lower `priority` is served first, where the policy is priority. `adapter` is one of
        `Settings.lora_modules`; None: the model as it is.

        Raises:
            RequestError: it is empty, holds a token that the model does not have, is longer than
                the model or the cache allows, or needs a tokenizer that is missing; or its grammar
                is none; or there is no such adapter.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params = {params!r}: must be SamplingParams")
        self._expect_adapter(adapter)
        token_ids = encode_prompt(self.tokenizer, self.model_config.vocab_size, prompt)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: the model has no tokenizer.json; use stop_token_ids")
        matcher = self._grammars.begin(params)
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        with self._whole():
            name = f"request-{self._num_requests}"
            request = Request(
                request_id=name,
                prompt_token_ids=token_ids,
                max_tokens=params.max_tokens,
                eos_token_id=eos[0] if eos else None,
                stop_token_ids=(*eos[1:], *params.stop_token_ids),
                priority=priority,
                arrival_time=self._num_requests,
                adapter=adapter,
            )
            answer = self._scheduler.apply(Submit(request))
            if isinstance(answer, Rejected):
                raise RequestError(f"prompt of {len(token_ids)} tokens: {answer.detail}")
            seed = params.seed
            if seed is None:
                seed = self.settings.seed * 1_000_003 + self._num_requests
            self._num_requests += 1
            self._runner.chosen[name] = (params, seed)
            if matcher is not None:
                self._runner.matchers[name] = matcher
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer(self.tokenizer, params.stop, token_ids)
            self._live[name] = Live(
                request, params, detokenizer, logprobs=None if params.logprobs is None else []
            )
        return name

    def _expect_adapter(self, name: object) -> None:
        known = self.settings.lora_modules
        if name is not None and (not isinstance(name, str) or name not in known):
            told = ", ".join(map(repr, known)) or "none"
            raise RequestError(f"adapter = {name!r}: must be one of lora_modules: {told}")

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
        """Whether `step` has something to do."""
        return bool(self._live)

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
        while len(self._frames) < self.config.max_frames_in_flight:
            plan = self._apply(Schedule())
            assert isinstance(plan, Plan), "Schedule is answered with a Plan"
            self._runner.dispatch(plan)
            if not plan.rows:
                break
            self._frames.append(plan)
            if self.observer is not None:
                self.observer.ran(self._runner.peek(plan.frame_id).ran)
        if not self._frames:
            if self._live:
                raise EngineError(f"no progress: {len(self._live)} requests wait for nothing")
            return []
        return self._take_answer(self._frames.popleft())

    def _take_answer(self, plan: Plan) -> list[Chunk]:
        answer = self._runner.collect(plan.frame_id)
        outputs = self._apply(Commit(plan.frame_id, answer.ran.sampled))
        assert isinstance(outputs, Outputs), "Commit is answered with Outputs"
        chunks = [
            self._deliver(row, answer) for row in outputs.rows if row.request_id in self._live
        ]
        self._propose(answer)
        return chunks

    def _propose(self, answer: Answer) -> None:
        """Hand the drafts in that a grammar accepts, unless they stay with the runner."""
        if self.config.async_scheduling:
            return
        drafts = tuple(
            RowTokens(name, tokens)
            for name, proposed in answer.ran.proposals.items()
            if name in self._live and (tokens := self._runner.cut_drafts(name, proposed))
        )
        if drafts:
            self._apply(Drafts(drafts))

    def _deliver(self, row: OutputRow, answer: Answer) -> Chunk:
        """Take what a step brought to one request, and end it if it has enough."""
        live = self._live[row.request_id]
        text, num_tokens, reason = self._read_tokens(live, row)
        tokens = row.new_token_ids[:num_tokens]
        live.num_cached_tokens = row.num_cached_tokens
        live.token_ids += tokens
        logprobs = None
        if live.logprobs is not None:
            logprobs = answer.logprobs[row.request_id][:num_tokens]
            live.logprobs += logprobs
        live.text += text
        matcher = self._runner.matchers.get(row.request_id)
        if reason is None and matcher is not None and matcher.error:
            reason = FinishReason.ERROR
        if reason is not None:
            if row.finish_reason is None:
                self._apply(Abort((row.request_id,)))
            self._end(row.request_id, reason)
        chunk = Chunk(row.request_id, tokens, text, reason, logprobs)
        if live.streamed is not None:
            live.streamed.append(chunk)
        return chunk

    def _read_tokens(self, live: Live, row: OutputRow) -> tuple[str, int, FinishReason | None]:
        """The text of a row, how many of its tokens count, and whether it ends the request.

        No token counts behind a stop string, and a stop token is no text, as in vLLM.
        """
        tokens, reason, detokenizer = row.new_token_ids, row.finish_reason, live.detokenizer
        if detokenizer is None:
            return "", len(tokens), reason
        text, num_tokens = "", len(tokens)
        for number, token in enumerate(tokens[:-1] if reason is FinishReason.STOP else tokens, 1):
            text += detokenizer.append(token)
            if detokenizer.stopped:
                num_tokens = number
                break
        if reason is not None:
            text += detokenizer.finish()
        return text, num_tokens, FinishReason.STOP if detokenizer.stopped else reason

    def _end(self, name: RequestId, reason: FinishReason) -> None:
        live = self._live.pop(name)
        if reason is FinishReason.ABORT and live.detokenizer is not None:
            live.text += live.detokenizer.finish()
        self._runner.chosen.pop(name, None)
        self._runner.matchers.pop(name, None)
        self._completions[name] = Completion(
            request_id=name,
            prompt_token_ids=live.request.prompt_token_ids,
            token_ids=tuple(live.token_ids),
            text=live.text,
            finish_reason=reason,
            num_cached_tokens=live.num_cached_tokens,
            logprobs=live.logprobs,
        )

    def _apply(self, event: Event) -> Observation:
        """Give the scheduler an event that it cannot refuse."""
        answer = self._scheduler.apply(event)
        if isinstance(answer, Rejected):
            raise EngineError(f"{type(event).__name__} was refused: {answer.code}: {answer.detail}")
        return answer
