"""KV: what each slot holds, and whether whoever reads it may.

Each slot remembers the exact prefix that it was written for, and each attended slot is checked when
it is read. So "wrong tokens" is seen in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from blockstep.conformance.judge.worker.names import BEFORE_RESET, NEVER_WRITTEN, Name, PrefixNames
from blockstep.conformance.judge.worker.view import FrameRow
from blockstep.conformance.protocol.findings import Difference, Finding, violated
from blockstep.spec.vocabulary import BlockId, Config, FrameId, RequestId, Snapshot

Write: TypeAlias = tuple[int, int, RequestId, FrameId]
"""First slot and one past the last, who wrote them, and in which plan."""


class TaggedKV:
    """The slots of a pool, each with the name of what it holds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.names = PrefixNames(config.block_size)
        self.kv: list[list[Name]] = [
            [NEVER_WRITTEN] * config.block_size for _ in range(config.num_blocks)
        ]
        """The name of what each slot holds, by block id and slot."""
        self._checked: list[object] = [None] * config.num_blocks
        """The key for which a block was found right, until the block is written again."""
        self._findings: list[Finding] = []
        self.frame_id: FrameId = -1
        """The plan that runs."""
        self._writes: list[list[Write]] = [[] for _ in range(config.num_blocks)]
        """By block, since its first slot was written."""
        self._returns: dict[BlockId, tuple[RequestId, str, FrameId]] = {}
        """Who gave a block back last, why, and which plan told of it."""

    def give_back(self, request_id: RequestId, table: Iterable[BlockId], why: str) -> None:
        """A plan told that a request holds these blocks no more."""
        for block in table:
            self._returns[block] = (request_id, why, self.frame_id)

    def forget(self) -> None:
        """Nothing written so far may be read again."""
        for block, slots in enumerate(self.kv):
            self._checked[block] = None
            slots[:] = [name if name == NEVER_WRITTEN else BEFORE_RESET for name in slots]

    def check_published(self, snapshot: Snapshot) -> list[Finding]:
        """Every block that can be hit must hold, completely, what its key names (P3, P4, P6)."""
        self._findings = []
        checked = self._checked
        for block, key in enumerate(snapshot.block_keys):
            if key is None or checked[block] is key:
                continue
            expected = self.names.of_key(key)
            if self.kv[block] == expected:
                checked[block] = key
                continue
            pairs = enumerate(zip(expected, self.kv[block], strict=True))
            slot, (name, seen) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            self._complain_slot("published_block", (block, slot), name, seen, repr(key))
        return self._findings

    def _write(self, rows: list[FrameRow]) -> None:
        """Every row writes its slots, in plan order."""
        size, kv, checked = self.config.block_size, self.kv, self._checked
        writers: dict[BlockId, tuple[FrameRow, int]] = {}
        writes, frame_id = self._writes, self.frame_id
        for row in rows:
            view, position, end = row.view, row.first, row.end
            name = view.request.request_id
            view.name_positions(end, row.drafts)
            chain, table = view.chain, view.table
            while position < end:
                index = position // size
                slot = position - index * size
                stop = min(end, (index + 1) * size)
                block = table[index]
                kv[block][slot : slot + stop - position] = chain[position:stop]
                checked[block] = None
                if slot == 0:
                    writes[block] = []
                writes[block].append((slot, slot + stop - position, name, frame_id))
                if block in writers:
                    self._complain_shared(writers[block], (row, index), block)
                writers[block] = (row, index)
                position = stop
        for row in rows:
            self._check_exclusive(row, writers)

    def _check_exclusive(self, row: FrameRow, writers: dict[BlockId, tuple[FrameRow, int]]) -> None:
        """A written block is in no other table, except as a hit at the same position."""
        size, table = self.config.block_size, row.view.table
        others = table[: row.first // size] + table[-(-row.end // size) :]
        if writers.keys().isdisjoint(others):
            return
        for index, block in enumerate(table):
            if block in writers and writers[block][1] != index:
                self._complain_shared(writers[block], (row, index), block)

    def _read(self, row: FrameRow) -> None:
        """Every position up to the last scheduled one must hold what this request expects."""
        view, size, kv = row.view, self.config.block_size, self.kv
        full, rest = divmod(row.end, size)
        table = view.table
        is_right = [kv[block] for block in table[:full]] == view.pages[:full]
        if is_right and rest:
            is_right = kv[table[full]][:rest] == view.chain[full * size : row.end]
        if not is_right:
            row.is_astray = True
            self._complain_read(row)

    def _complain_read(self, row: FrameRow) -> None:
        """Name the first attended slot that holds something else."""
        view, size = row.view, self.config.block_size
        for position, expected in enumerate(view.chain[: row.end]):
            block, slot = view.table[position // size], position % size
            seen = self.kv[block][slot]
            if seen != expected:
                reader = view.request.request_id
                note = f"read by {reader!r} at position {position} in plan {self.frame_id}"
                self._complain_slot("attended_slot", (block, slot), expected, seen, note)
                return

    def _complain_slot(
        self, what: str, place: tuple[BlockId, int], expected: Name, seen: Name, note: str
    ) -> None:
        """A slot holds something else than it should."""
        show = self.names.show
        blame = "P3", "holds_the_right_prefix", "the KV is of another prefix"
        if seen == NEVER_WRITTEN:
            blame = "P4", "was_written", "the slot was never written"
        elif seen == BEFORE_RESET:
            blame = "P25", "was_written_since_the_reset", "the KV is from before the reset"
        elif self.names.same_tokens(expected, seen):
            message = "the tokens are the same, adapter, salt, items or embeddings are not"
            blame = "P6", "is_of_the_same_adapter_salt_and_items", message
        note = "; ".join([note, *self._tell_history(*place)])
        difference = Difference(f"kv[{place[0]}][{place[1]}]", show(expected), show(seen), note)
        self._complain(blame[0], f"{what}_{blame[1]}", blame[2], difference)

    def _complain_shared(
        self, writer: tuple[FrameRow, int], other: tuple[FrameRow, int], block: BlockId
    ) -> None:
        places = " and ".join(
            f"{row.view.request.request_id!r} at index {index}" for row, index in (writer, other)
        )
        what = f"block {block} is of {places}"
        told = "; ".join([what, *self._tell_return(block)])
        self._complain("P2", "written_block_is_in_one_place", told)

    def _tell_history(self, block: BlockId, slot: int) -> Iterator[str]:
        """Who wrote a slot last, and who gave its block back since, each with the plan."""
        since = -1
        for first, stop, name, frame_id in reversed(self._writes[block]):
            if first <= slot < stop:
                since = frame_id
                yield f"written by {name!r} in plan {frame_id}"
                break
        yield from self._tell_return(block, since)

    def _tell_return(self, block: BlockId, since: FrameId = -1) -> Iterator[str]:
        name, why, frame_id = self._returns.get(block, ("", "", -1))
        if frame_id > since:
            yield f"given back by {name!r}, which {why}, says plan {frame_id}"

    def _complain(
        self, property_id: str, sentence: str, message: str, *differences: Difference
    ) -> None:
        self._findings.append(violated(property_id, sentence, message, *differences))
