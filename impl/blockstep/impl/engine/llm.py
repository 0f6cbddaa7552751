"""LLM: the engine's interface. It loads a model, takes requests, and steps until they finish.

add_request -> Submit --+
                        v
step:  Schedule -> plan -> runner -> tokens -> Commit -> outputs -> text, stop strings -> Chunk
         ^                                                                   |
         +----- up to max_frames_in_flight plans ahead ---- Drafts <---------+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from blockstep.impl.engine.beams import BeamSearch, BeamSequence
from blockstep.impl.engine.detokenizer import Detokenizer
from blockstep.impl.engine.errors import RequestError, SettingsError
from blockstep.impl.engine.forks import Branches, Sampling, Searching
from blockstep.impl.engine.grammars import Grammars
from blockstep.impl.engine.loading import load_engine
from blockstep.impl.engine.observer import MakeObserver
from blockstep.impl.engine.outputs import Chunk, Completion, Live, Output
from blockstep.impl.engine.params import BeamSearchParams, SamplingParams
from blockstep.impl.engine.prompts import (
    Prompt,
    encode_for,
    expect_adapter,
    give_each,
    make_request,
    split_prompts,
)
from blockstep.impl.engine.rows import Wanted
from blockstep.impl.engine.sessions import Session
from blockstep.impl.engine.settings import Settings
from blockstep.impl.engine.store import KVStore
from blockstep.spec.vocabulary import (
    FinishReason,
    Request,
    RequestId,
    StreamingUpdate,
    Submit,
    TokenIds,
)


class LLM(Branches):
    """A model that serves requests.

        llm = LLM("path/to/model")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Threads may share it: a step, a new request and an abort wait for each other. An exception in
    the middle of one (an interrupt, too) aborts all requests; later requests are served.

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

        `kv_store`: saves the KV of finished requests, and is searched for that of new ones.
        """
        if settings is not None and options:
            raise SettingsError(f"settings were given; put {sorted(options)} into them")
        if settings is None:
            try:
                settings = Settings(**options)  # type: ignore[arg-type]
            except TypeError as error:
                raise SettingsError(f"{error}; see blockstep.impl.engine.Settings") from error
        if kv_store is not None and not isinstance(kv_store, KVStore):
            raise SettingsError(
                f"kv_store = {kv_store!r}: must have the methods count, expect, save and load; "
                "give a HostStore, a TieredStore or a RemoteStore"
            )
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
        """Serve `prompts` (texts or token ids) together; return completions in their order.

        If `params` ask for `n` outputs, the `n` completions of a prompt follow each other.

        Raises:
            RequestError: a prompt cannot be served; then none is. Or several outputs to a prompt
                are asked for, and the engine was not loaded with `enable_forks`.
        """
        several = split_prompts(prompts)
        wanted = give_each("params", SamplingParams, params, len(several), SamplingParams())
        adapters = give_each("adapter", str, adapter, len(several), None)
        runs: list[Sampling] = []
        try:
            for prompt, one, name in zip(several, wanted, adapters, strict=True):
                runs.append(self._begin_sampling(prompt, one, name))
            branching = [run for run in runs if run.others]
            waiting = list(runs)
            while waiting:
                if waiting[-1].others or self._is_busy(*waiting[-1].names):
                    self.step()
                    for run in branching:
                        run.begin_others()
                else:
                    waiting.pop()
        except BaseException:
            self.drop([name for run in runs for name in run.names])
            raise
        return [self._completions.pop(name) for run in runs for name in run.names]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[list[BeamSequence]]:
        """Return the `beam_width` likeliest continuations of each prompt, the best first.

        A beam is a request that forks from another one, and shares its KV.

        Raises:
            RequestError: as `generate`.
        """
        self.expect_forks("beam_search")
        runs: list[Searching] = []
        try:
            runs += [self._begin_search(prompt, params) for prompt in split_prompts(prompts)]
            while any(not run.search.is_done for run in runs):
                self.step()
                for run in runs:
                    run.advance()
        except BaseException:
            self.drop([name for run in runs for name in run.names])
            raise
        return [
            [replace(one, text=self._spell(run.request, one)) for one in run.search.found]
            for run in runs
        ]

    def _begin_sampling(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None
    ) -> Sampling:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params = {params!r}: must be SamplingParams")
        if params.n > 1:
            self.expect_forks(f"n = {params.n}")
        seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
        first, *others = [replace(params, n=1, seed=seed) for seed in seeds]
        with self._whole():
            name = self.add_request(prompt, first, adapter=adapter)
            output = self._live[name].output
            output.reads_late = not (params.stop or params.has_grammar)
            wanted = [
                Wanted(one, self._take_seed(one), self._grammars.begin(one)) for one in others
            ]
            return Sampling(self, output.request, wanted)

    def _begin_search(self, prompt: Prompt, params: BeamSearchParams) -> Searching:
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params = {params!r}: must be BeamSearchParams")
        with self._whole():
            eos = self.model_config.eos_token_ids
            num_prompt = len(self._encode(prompt, SamplingParams(), is_session=False))
            most = max(min(params.max_tokens, self.config.max_model_len - num_prompt), 1)
            search = BeamSearch(replace(params, max_tokens=most), eos)
            num_top = min(search.num_candidates, self.model_config.vocab_size)
            wanted = SamplingParams(max_tokens=most, ignore_eos=True, logprobs=num_top)
            name = self.add_request(prompt, wanted)
            return Searching(self, search, self._live[name].output)

    def _spell(self, request: Request, found: BeamSequence) -> str:
        """Return the text of a found sequence, without the token that ended it."""
        if self.tokenizer is None:
            return ""
        detokenizer = Detokenizer(self.tokenizer, (), request.prompt_token_ids)
        is_stopped = found.finish_reason is FinishReason.STOP
        tokens = found.token_ids[:-1] if is_stopped else found.token_ids
        return "".join([detokenizer.append(token) for token in tokens]) + detokenizer.finish()

    def _is_busy(self, *names: RequestId) -> bool:
        """Whether any of these requests is unfinished, or its KV is being saved."""
        return any(name in self._live for name in names) or self._is_saving(*names)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Generator[Chunk, None, None]:
        """Serve one prompt, and yield its output as it is generated.

        Closing the iterator aborts the request. The last chunk has the finish reason, also if the
        request is aborted from elsewhere. Each step of the stream also serves the other
        requests, whose chunks go to their own streams.
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
        """Submit one prompt, to be served by `step`; return the request's id.

        A lower `priority` is served first under the priority policy. `adapter` is one of
        `Settings.lora_modules`; None: the model without an adapter. KV is shared only between
        requests with the same `cache_salt`.

        Raises:
            RequestError: the prompt is empty, holds a token that the model does not have, is longer
                than the model or the cache allows, or needs a tokenizer that is missing; or its
                grammar is invalid; or there is no such adapter.
        """
        return self._add(prompt, params, priority, adapter, cache_salt=cache_salt)

    def open_session(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> Session:
        """Submit the first input of a session, which continues with further ones.

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
        """Submit further input of a session; see `Session.send`."""
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
        """Tell the scheduler that a session gets no more input; see `Session.close`."""
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
