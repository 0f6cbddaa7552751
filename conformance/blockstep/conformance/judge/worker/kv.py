"""KV: what each slot holds, and whether whoever reads it may.

Each slot remembers the exact prefix that it was written for, and each attended slot is checked when
it is read. So "wrong tokens" is seen in the step in which it happens.
"""

from __future__ import annotations

from blockstep.conformance.judge.worker.names import BEFORE_RESET, NEVER_WRITTEN, Name, PrefixNames
from blockstep.conformance.judge.worker.view import FrameRow
from blockstep.conformance.protocol.findings import Difference, Finding, violated
from blockstep.spec.vocabulary import BlockId, Config, Snapshot


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
            slot, name, seen = next(
                (slot, name, seen)
                for slot, (name, seen) in enumerate(zip(expected, self.kv[block], strict=True))
                if name != seen
            )
            self._complain(
                *self._blame("published_block", name, seen),
                Difference(
                    f"kv[{block}][{slot}]", self.names.show(name), self.names.show(seen), repr(key)
                ),
                property_id=self._property(name, seen),
            )
        return self._findings

    def _write(self, rows: list[FrameRow]) -> None:
        """Every row writes its slots, in plan order."""
        size, kv, checked = self.config.block_size, self.kv, self._checked
        writers: dict[BlockId, tuple[FrameRow, int]] = {}
        for row in rows:
            view, position, end = row.view, row.first, row.end
            view.name_positions(end, row.drafts)
            chain, table = view.chain, view.table
            while position < end:
                index = position // size
                slot = position - index * size
                stop = min(end, (index + 1) * size)
                block = table[index]
                kv[block][slot : slot + stop - position] = chain[position:stop]
                checked[block] = None
                if block in writers:
                    self._complain_shared(writers[block], (row, index), block)
                writers[block] = (row, index)
                position = stop
        for row in rows:
            self._check_exclusive(row, writers)

    def _check_exclusive(self, row: FrameRow, writers: dict[BlockId, tuple[FrameRow, int]]) -> None:
        """A written block is in no other table, except as a hit at the same position."""
        size, table = self.config.block_size, row.view.table
        written = range(row.first // size, -(-row.end // size))
        others = table[: written.start] + table[written.stop :]
        if writers.keys().isdisjoint(others):
            return
        for index, block in enumerate(table):
            if block in writers and index not in written:
                writer, position = writers[block]
                if writer is row or position != index:
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
            block = view.table[position // size]
            seen = self.kv[block][position % size]
            if seen != expected:
                self._complain(
                    *self._blame("attended_slot", expected, seen),
                    Difference(
                        f"kv[{block}][{position % size}]",
                        self.names.show(expected),
                        self.names.show(seen),
                        f"read by {view.request.request_id!r} at position {position}",
                    ),
                    property_id=self._property(expected, seen),
                )
                return

    def _property(self, expected: Name, seen: Name) -> str:
        if seen == NEVER_WRITTEN:
            return "P4"
        if seen == BEFORE_RESET:
            return "P25"
        return "P6" if self.names.same_tokens(expected, seen) else "P3"

    def _blame(self, what: str, expected: Name, seen: Name) -> tuple[str, str]:
        """Sentence and message for a slot that holds something else than it should."""
        messages = {
            "P4": (f"{what}_was_written", "the slot was never written"),
            "P25": (f"{what}_was_written_since_the_reset", "the KV is from before the reset"),
            "P6": (
                f"{what}_is_of_the_same_adapter_salt_and_items",
                "the tokens are the same, adapter, salt, items or embeddings are not",
            ),
            "P3": (f"{what}_holds_the_right_prefix", "the KV is of another prefix"),
        }
        return messages[self._property(expected, seen)]

    def _complain_shared(
        self, writer: tuple[FrameRow, int], other: tuple[FrameRow, int], block: BlockId
    ) -> None:
        places = " and ".join(
            f"{row.view.request.request_id!r} at index {index}" for row, index in (writer, other)
        )
        self._complain(
            "written_block_is_in_one_place", f"block {block} is of {places}", property_id="P2"
        )

    def _complain(
        self, sentence: str, message: str, *differences: Difference, property_id: str = "P26"
    ) -> None:
        self._findings.append(violated(property_id, sentence, message, *differences))
