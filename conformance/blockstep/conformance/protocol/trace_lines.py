"""Reading of trace files, gzipped or plain, with one error class for all problems.

Reading a path gives lines or raises a `TraceError`: for a directory, a truncated gzip stream,
binary data or another encoding, always with the same five parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LINE_BYTES_MAX = 1 << 26
"""Most bytes of one line; without this limit, binary data without line ends would fill the memory.
"""

CHUNK_BYTES = 1 << 16

GZIP_MAGIC = b"\x1f\x8b"

SHOWN_CHARS_MAX = 80


class TraceError(Exception):
    """A trace file cannot be used.

    `path` names it, `line` counts from 1 (0: the file as a whole), `found` says what is there,
    `rule` what should be there, `fix` what to do about it.
    """

    def __init__(self, path: Path, line: int, found: str, rule: str, fix: str) -> None:
        self.path = path
        self.line = line
        self.found = found
        self.rule = rule
        self.fix = fix
        super().__init__(path, line, found, rule, fix)

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{where}: {self.found}: {self.rule}; {self.fix}"


def shown(value: object) -> str:
    """Return `value` for a message: printable, quoted if it is a string, cut to one line."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."


def read_lines(path: Path, kind: str = "trace") -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers from 1, without line ends and a byte order
    mark; detects gzip by content.

    Reads only as far as it is consumed. Raises `TraceError` at the first problem, which calls the
    file a `kind`.
    """
    line = 0
    try:
        with path.open("rb") as file:
            for raw in _lines(_chunks(file)):
                line += 1
                if len(raw) > LINE_BYTES_MAX:
                    found = f"more than {LINE_BYTES_MAX} bytes without a line end"
                    rule = "a line holds one row"
                    raise TraceError(path, line, found, rule, f"give a {kind} file")
                text = raw.removesuffix(b"\r").decode("utf-8")
                yield line, text.removeprefix("\ufeff") if line == 1 else text
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
        rule = f"a {kind} is UTF-8 text, gzipped or plain"
        fix = f"give the {kind} file itself, or convert it to UTF-8"
        raise TraceError(path, line, found, rule, fix) from None
    except (EOFError, zlib.error) as error:
        found = f"the gzip stream breaks off here ({error})"
        rule = f"a gzipped {kind} is complete"
        raise TraceError(path, line + 1, found, rule, "fetch or write the file again") from None
    except (OSError, ValueError) as error:  # the latter of a path with a null byte
        reason = getattr(error, "strerror", None) or error
        found, rule = f"cannot be read ({reason})", f"a {kind} is a readable file"
        raise TraceError(path, 0, found, rule, "check the path") from None


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data split at line feeds; a line above the limit is yielded incomplete."""
    rest = bytearray()
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest += first
        if others:
            yield bytes(rest)
            yield from others[:-1]
            rest = bytearray(others[-1])
        if len(rest) > LINE_BYTES_MAX:
            break
    if rest:
        yield bytes(rest)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file.

    Raises `EOFError` or `zlib.error` if a gzip stream is truncated.

    `gzip.GzipFile` is not used because the data before the end must be yielded first, so that its
    line number is known.
    """
    data = file.read(CHUNK_BYTES)
    if not data.startswith(GZIP_MAGIC):
        while data:
            yield data
            data = file.read(CHUNK_BYTES)
        return
    while data:  # once per member
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not data:
                raise EOFError("it ends within a member")
            yield member.decompress(data, CHUNK_BYTES)
            data = member.unconsumed_tail or member.unused_data or file.read(CHUNK_BYTES)
        data = data or file.read(CHUNK_BYTES)
