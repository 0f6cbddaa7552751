"""Link: a process that answers each line that it is given with a line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.protocol.trace_lines import LINE_BYTES_MAX, shown

ANSWER_SECONDS = 60.0
"""The process has this long to answer a line. `check` and `hunt` stop waiting earlier."""
END_SECONDS = 1.0
"""The process has this long to end once its standard input has ended; then it is killed."""
LOOK_SECONDS = 0.5
"""A process that is silent is looked at this often: it may have ended."""
CHUNK_BYTES = 1 << 16
CHUNKS_MAX = 64
"""Most chunks of standard error that are read at the end."""
LAST_BYTES = 1 << 12
"""Bytes of standard error that are kept, to say why a process ended."""
LAST_WORDS_MAX = 5
"""Most lines of them that a fault has."""
LAST_CHARS_MAX = 300
"""Most characters of such a line."""
LISTEN_SECONDS = 0.02
"""While the process ends, its standard error is looked at this often."""
BEFORE_CHARS = 40
"""Characters shown before the place where an answer is malformed."""
_BYTE = re.compile(r"\(byte (\d+)\)")
_is_in_a_group = False
"""Whether the whole group of this process is killed at its end, as that of an isolated engine is.
"""


def share_group() -> None:
    """Start processes in the group of this process, which is killed as a whole."""
    global _is_in_a_group  # noqa: PLW0603 - a fact about this process
    _is_in_a_group = True


class Link:
    """A running process: sends a line and waits for the line that answers it."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        self.num_sent = 0
        self.is_lost = False
        self._unread = bytearray()
        # Its group is killed at its end, so that what it has started ends as well.
        self._has_group = not _is_in_a_group
        self._process = subprocess.Popen(  # noqa: S603 - the command is the user's own
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=self._has_group,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._errors = self._process.stderr
        self._open = [self._output, self._errors]  # what may have something to read
        self._last = b""
        os.set_blocking(self._input.fileno(), False)

    def ask(self, line: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """Send a line and return the answer, both without the line feed.

        Raises:
            EngineFault: the process gives no answer, or gave one that nothing had asked for. It is
                ended then, and the fault has its last words on standard error.
        """
        if self.is_lost:
            raise EngineFault("the process of this engine has ended")
        try:
            return self._ask(line, time.monotonic() + seconds, seconds)
        except EngineFault as fault:
            self.end()
            fault.last_words = _list_lines(self._last)
            raise

    def ask_row(self, row: object, kind: Any) -> Any:
        """Send a row as JSON and return the answer as a value of `kind`.

        Raises:
            EngineFault: as `ask`; or the answer is no JSON of that kind.
        """
        answer = self.ask(msgspec.json.encode(row))
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            text = show_answer(answer, error)
            raise EngineFault(f"answer {self.num_sent}: {error}: {text}") from None

    def _ask(self, line: bytes, end: float, seconds: float) -> bytes:
        self.num_sent += 1
        unread, _, _ = select.select([self._output], [], [], 0)
        if unread and not self._unread:
            self._read_more()
        if self._unread:
            text = shown(bytes(self._unread).decode(errors="replace"))
            raise EngineFault(f"{text}: nothing was asked; write one line for each line read")
        rest = memoryview(line + b"\n")
        checked = 0  # bytes of the answer that hold no line feed
        while True:
            waited = min(max(end - time.monotonic(), 0), LOOK_SECONDS)
            can_write = [self._input] if rest else []
            ready, writable, _ = select.select(self._open, can_write, [], waited)
            if self._errors in ready:
                self._pass_on()
            if writable:
                try:
                    rest = rest[self._input.write(rest) or 0 :]
                except OSError:  # it reads no more: what it says at last is still read
                    rest = rest[:0]
            if self._output in ready:
                self._read_more()
                found = self._unread.find(b"\n", checked)
                if found >= 0:
                    answer = bytes(self._unread[:found])
                    del self._unread[: found + 1]
                    return answer
                checked = len(self._unread)
                if checked > LINE_BYTES_MAX:
                    raise EngineFault(f"an answer of more than {LINE_BYTES_MAX} bytes in one line")
            elif not writable and self._has_ended():
                raise EngineFault(self._describe_end())
            if time.monotonic() >= end:
                raise EngineFault(self._describe_silence(seconds))

    def _has_ended(self) -> bool:
        """Whether the process has ended and has left nothing to read.

        Its standard output may be open still: what it has started may hold it.
        """
        is_over = self._process.poll() is not None
        return is_over and not select.select([self._output], [], [], 0)[0]

    def _read_more(self) -> None:
        """Read what the process has written. Raises EngineFault at the end of its output."""
        data = os.read(self._output.fileno(), CHUNK_BYTES)
        if not data:
            raise EngineFault(self._describe_end())
        self._unread += data

    def _pass_on(self) -> None:
        """Write what the process says on standard error to ours, and keep its last bytes."""
        data = os.read(self._errors.fileno(), CHUNK_BYTES)
        if not data:
            self._open.remove(self._errors)
        with contextlib.suppress(OSError):  # ours is closed
            os.write(2, data)
        self._last = (self._last + data)[-LAST_BYTES:]

    def _listen(self, seconds: float) -> bool:
        """Wait this long for words on standard error. Return whether there were any."""
        if self._errors not in self._open:
            time.sleep(seconds)
        elif select.select([self._errors], [], [], seconds)[0]:
            self._pass_on()
            return True
        return False

    def _wait_for_end(self) -> int | None:
        """Return the exit code of the process, or None if it does not end."""
        end = time.monotonic() + END_SECONDS
        while (code := self._process.poll()) is None and time.monotonic() < end:
            self._listen(LISTEN_SECONDS)
        self._drain()
        return code

    def _drain(self) -> None:
        """Pass on what is left on standard error, but no endless flood."""
        for _ in range(CHUNKS_MAX):
            if self._errors not in self._open or not self._listen(0):
                return

    def _describe_silence(self, seconds: float) -> str:
        why = "write a line feed after each answer, and flush standard output"
        if self._unread:
            why = f"{shown(self._unread.decode(errors='replace'))} has no line feed"
        return f"line {self.num_sent} was not answered within {seconds:g} s; {why}"

    def _describe_end(self) -> str:
        cut = f" after {shown(self._unread.decode(errors='replace'))}" if self._unread else ""
        code = self._wait_for_end()
        if code is None:
            return f"the engine closed its standard output{cut}"
        if code >= 0:
            return f"the engine's process ended with exit code {code}{cut}"
        with contextlib.suppress(ValueError):
            return f"the engine's process was ended by {signal.Signals(-code).name}{cut}"
        return f"the engine's process was ended by signal {-code}{cut}"

    def end(self) -> None:
        """End the process: by the end of its standard input, or else kill it."""
        self.is_lost = True
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        self._wait_for_end()
        if self._has_group:
            with contextlib.suppress(OSError):  # the group is empty
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.returncode is None:
            self._process.kill()
        self._process.wait()
        self._drain()
        self._open.clear()
        self._errors.close()


def show_answer(answer: bytes, error: Exception) -> str:
    """Return an answer for a message: the part where the error is, on one line."""
    found = _BYTE.search(str(error))
    at = int(found[1]) if found else len(answer) if "truncated" in str(error) else 0
    begin = max(at - BEFORE_CHARS, 0)
    text = shown(answer[begin:].decode(errors="replace"))
    return f"...{text}" if begin else text


def _list_lines(data: bytes) -> tuple[str, ...]:
    """Return the last lines of what a process has said, printable and not too long."""
    lines = [line.rstrip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    printable = (line if line.isprintable() else repr(line)[1:-1] for line in lines)
    return tuple([line[:LAST_CHARS_MAX] for line in printable][-LAST_WORDS_MAX:])
