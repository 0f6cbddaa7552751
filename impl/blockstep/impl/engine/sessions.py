"""Sessions: requests that continue with further input, and keep their KV in between.

    input --> outputs x        x: the last token of an answer, sampled and never computed
    | kept -------->| input --> outputs x
    | kept ----------------------->| input --> ...

A session keeps an answer except for its last token, whatever drafts or frames in flight there were:
that token was sampled and never computed, and the next input takes its place. So each answer is
what a separate request would get whose prompt is all that was kept, followed by the input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Protocol, Self

from blockstep.impl.engine.errors import RequestError
from blockstep.impl.engine.outputs import Chunk, Completion
from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.prompts import Prompt
from blockstep.spec.vocabulary import RequestId


class Server(Protocol):
    """The part of the engine that sessions use."""

    def step(self) -> Sequence[Chunk]:
        """Serve all requests for one step; return their chunks."""
        ...

    def abort(self, *request_ids: RequestId) -> None:
        """Abort requests."""
        ...

    def is_live(self, request_id: RequestId) -> bool:
        """Whether a request is unfinished."""
        ...

    def send_input(self, request_id: RequestId, prompt: Prompt, params: SamplingParams) -> None:
        """Submit further input of a session."""
        ...

    def end_input(self, request_id: RequestId) -> None:
        """Announce that a session gets no more input."""
        ...


class Session:
    """A request that continues with further input; `LLM.open_session` makes one.

        with llm.open_session("Once upon a time", SamplingParams(max_tokens=32)) as session:
            print(session.receive().text)
            session.send(" And then?")
            for chunk in session.stream():
                print(chunk.text, end="")

    Input may be sent before the previous one is answered; answers are in the order of the inputs.
    As a context manager it is aborted at the end of the block, if it is unfinished.
    """

    def __init__(
        self,
        server: Server,
        request_id: RequestId,
        params: SamplingParams,
        chunks: deque[Chunk],
        completions: deque[Completion],
    ) -> None:
        self.request_id = request_id
        self._server = server
        self._params = params
        self._chunks = chunks
        self._completions = completions
        self._num_due = 1
        """Number of inputs whose answers were not received."""

    @property
    def is_open(self) -> bool:
        """Whether it is unfinished."""
        return self._server.is_live(self.request_id)

    def send(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Submit further input, a text or token ids; it follows the last answer.

        Without `params`, those of the previous input apply. A text is encoded without the tokens
        that start a text.

        Raises:
            RequestError: the session has ended or was closed, the whole sequence would be longer
                than the model or the cache allows, or the prompt is invalid as for
                `LLM.add_request`.
        """
        params = self._params if params is None else params
        self._server.send_input(self.request_id, prompt, params)
        self._params = params
        self._num_due += 1

    def receive(self) -> Completion:
        """Serve all requests until the next answer is complete, and return it.

        Raises:
            RequestError: all inputs are answered.
        """
        self._expect_due()
        while not self._completions:
            self._server.step()
        while self._chunks and self._chunks.popleft().finish_reason is None:
            pass
        return self._take()

    def stream(self) -> Generator[Chunk, None, None]:
        """Serve all requests, and yield the next answer as it is generated.

        If the iterator is closed early, the next one yields the rest of the answer.

        Raises:
            RequestError: all inputs are answered.
        """
        self._expect_due()
        is_whole = False
        while not is_whole:
            if self._chunks:
                chunk = self._chunks.popleft()
                is_whole = chunk.finish_reason is not None
                if is_whole:
                    self._take()
                yield chunk
            else:
                self._server.step()

    def close(self) -> None:
        """Announce that no more input follows: the session ends once all input is answered."""
        self._server.end_input(self.request_id)

    def abort(self) -> None:
        """End the session now; the part of an answer under way can still be received."""
        self._server.abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _expect_due(self) -> None:
        if not self._completions and not (self._num_due and self.is_open):
            state = "every input has its answer; send more" if self.is_open else "has ended"
            raise RequestError(f"{self.request_id}: {state}")

    def _take(self) -> Completion:
        self._num_due -= 1
        return self._completions.popleft()
