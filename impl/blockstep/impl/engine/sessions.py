"""Sessions: requests that go on with further input, and keep their KV between one and the next.

    input --> outputs x        x: the last token of an answer, which nobody has read
    | kept -------->| input --> outputs x
    | kept ----------------------->| input --> ...

What a session keeps of an answer is all but its last token, whatever drafts or frames in flight
there were: that one was sampled and never computed, and further input stands in its place. So each
answer is what a request of its own would get whose prompt is all that was kept, and the input.
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
    """Who serves sessions."""

    def step(self) -> Sequence[Chunk]:
        """Serve all requests for a step."""
        ...

    def abort(self, *request_ids: RequestId) -> None:
        """Give requests up."""
        ...

    def is_live(self, request_id: RequestId) -> bool:
        """Whether a request has not ended."""
        ...

    def send_input(self, request_id: RequestId, prompt: Prompt, params: SamplingParams) -> None:
        """Hand in further input."""
        ...

    def end_input(self, request_id: RequestId) -> None:
        """Say that no more comes."""
        ...


class Session:
    """A request that goes on with further input; `LLM.open_session` makes one.

        with llm.open_session("Once upon a time", SamplingParams(max_tokens=32)) as session:
            print(session.receive().text)
            session.send(" And then?")
            for chunk in session.stream():
                print(chunk.text, end="")

    Input may be sent before the one before it is answered; answers come in the order of the inputs.
    As a context manager it is aborted at the end, if it has not ended.
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
        """Inputs without an answer that was received."""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._server.is_live(self.request_id)

    def send(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Hand in further input, a text or token ids; it begins where the last answer has stopped.

        Without `params` it is answered as the input before. A text is encoded without the tokens
        that begin a text.

        Raises:
            RequestError: the session has ended or was closed, what it would become is longer than
                the model or the cache allows, or what `LLM.add_request` has against a prompt.
        """
        self._server.send_input(self.request_id, prompt, params or self._params)
        self._params = params or self._params
        self._num_due += 1

    def receive(self) -> Completion:
        """Serve all requests until the next answer is whole, and return it.

        Raises:
            RequestError: every input has had its answer.
        """
        self._expect_due()
        while not self._completions:
            self._server.step()
        while self._chunks and self._chunks.popleft().finish_reason is None:
            pass  # of an answer that was aborted there is no last chunk, and none of another one
        return self._take()

    def stream(self) -> Generator[Chunk, None, None]:
        """Serve all requests, and yield what the next answer gains as it gains it.

        Who gives the iterator up finds the rest of the answer in the next one.

        Raises:
            RequestError: every input has had its answer.
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
            elif self._completions:  # it was aborted, of which no chunk tells
                self._take()
                is_whole = True
            else:
                self._server.step()

    def close(self) -> None:
        """Say that no more input comes: it ends when what was sent is answered, now if it rests."""
        self._server.end_input(self.request_id)

    def abort(self) -> None:
        """End it now. What it had said to the input under way is an answer still."""
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
