"""LLM: the engine as a user meets it. It loads a model, takes requests, and steps until they end.

add_request -> Submit --+
                        v
step:  Schedule -> plan -> runner -> answer -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from blockstep.impl.engine.batch import Wanted
from blockstep.impl.engine.errors import RequestError, SettingsError
from blockstep.impl.engine.grammars import Grammars
from blockstep.impl.engine.loading import Settings, load_engine
from blockstep.impl.engine.observer import MakeObserver
from blockstep.impl.engine.outputs import Chunk, Completion, Live, Output
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.prompts import (
    Prompt,
    encode_for,
    expect_adapter,
    give_each,
    make_request,
    split_prompts,
)
from blockstep.impl.engine.sessions import Session
from blockstep.impl.engine.steps import Steps
from blockstep.impl.engine.store import KVStore
from blockstep.spec.vocabulary import (
    FinishReason,
    Request,
    RequestId,
    StreamingUpdate,
    Submit,
    TokenIds,
)


class LLM(Steps):
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
        loaded = load_engine(Path(model), settings, kv_store)
        super().__init__(settings, loaded, check)
        vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        config = self.config
        reasoning_end = None if config.enable_in_reasoning else config.reasoning_end_token_id
        self._grammars = Grammars(self.tokenizer, vocab_size, eos, reasoning_end)

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

    def _encode(self, prompt: Prompt, params: SamplingParams, **kind: bool) -> TokenIds:
        size = self.model_config.vocab_size
        return encode_for(self.tokenizer, size, prompt, params, **kind)

    def _ask(self, name: RequestId, token_ids: TokenIds, params: SamplingParams) -> Request:
        return make_request(
            name, token_ids, params, self.model_config.eos_token_ids, self._num_requests
        )
