"""KV: what each slot holds, and whether a row may read it.

Each slot has the exact prefix that it was written for, and each attended slot is checked when it is
read. So a wrong token is found in the step in which it arises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from blockstep.conformance.judge.attention_ranges import (
    count_unattended,
    first_attended,
    is_across,
    is_recurrent,
)
from blockstep.conformance.judge.worker.prefix_names import (
    BEFORE_RESET,
    NEVER_WRITTEN,
    OF_ANOTHER_GROUP,
    SPOILED,
    Name,
    PrefixNames,
)
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.protocol.findings import (
    NO_SUBJECTS,
    About,
    Difference,
    Finding,
    Subjects,
    of_block,
    violated,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.vocabulary import KVGroup, MambaCacheMode


def list_recurrent(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """Indices of the groups that hold states."""
    return tuple(at for at, group in enumerate(groups) if is_recurrent(group))


def list_written(group: KVGroup, row: FrameRow) -> Iterator[tuple[int, int]]:
    """Yield the states that a row writes: the number of tokens they include, and their table
    index."""
    size, known = group.block_size, _end_of_known(row)
    if row.end <= row.first or known < 1:
        return
    base = (row.end - 1) // size
    if group.mamba_cache_mode is MambaCacheMode.ALL:
        for index in range(row.first // size, min(known // size, base)):
            yield (index + 1) * size, index
    for boundary in range(known, row.end + 1):
        yield boundary, base + boundary - known


def get_read_index(group: KVGroup, view: RequestView, at: int, first: int) -> int:
    """Index of the block with the state after `first` tokens, from which a row starts."""
    return view.state_indices.get(at, (first - 1) // group.block_size)


def list_touched(group: KVGroup, row: FrameRow, at: int) -> set[int]:
    """Indices of the blocks from which a row reads a state, or to which it writes one."""
    touched = {index for _, index in list_written(group, row)}
    if row.first:
        touched.add(get_read_index(group, row.view, at, row.first))
    return touched


def list_copied(group: KVGroup, row: FrameRow) -> Iterator[tuple[int, int]]:
    """Yield source and target index of each state that is copied once its row has sampled."""
    if group.mamba_cache_mode is MambaCacheMode.NONE or row.end <= row.first:
        return
    size, known, base = group.block_size, _end_of_known(row), (row.end - 1) // group.block_size
    for boundary in range(-(-known // size) * size, known + count_accepted(row) + 1, size):
        source, target = base + boundary - known, boundary // size - 1
        if source != target and boundary:
            yield source, target


def move_on(groups: Iterable[tuple[int, KVGroup]], row: FrameRow) -> None:
    """Note in which block of each of these groups the request's state now is."""
    if row.end > row.first:
        for at, group in groups:
            base = (row.end - 1) // group.block_size
            row.view.state_indices[at] = base + count_accepted(row)


def count_accepted(row: FrameRow) -> int:
    """Number of accepted drafts of a row, as far as the worker knows."""
    return max(len(row.sampled) - 1, 0)


def _end_of_known(row: FrameRow) -> int:
    """One past the last position of a row that is not a draft."""
    return row.end - len(row.drafts)


Place: TypeAlias = tuple[FrameRow, int, int]
"""A row that writes a block, the group, and the index in its table."""
Write: TypeAlias = tuple[int, int, v.RequestId, v.FrameId]
"""First slot and one past the last, the request that wrote them, and the plan."""


class TaggedKV:
    """The slots of a pool, each with the name of its content."""

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.groups = config.kv_groups
        self.block_sizes = config.block_sizes
        self.recurrent = list_recurrent(self.groups)
        self.across = tuple(at for at, group in enumerate(self.groups) if is_across(group))
        others = {*self.recurrent, *self.across}
        self.attended = tuple(at for at in range(len(self.groups)) if at not in others)
        """Groups whose blocks hold the KV of tokens."""
        self.made_for: set[v.RequestId] = set()
        """Requests whose items the current plan computes."""
        self.names = PrefixNames(config.block_size, len(self.groups))
        self.kv: list[list[Name]] = [
            [NEVER_WRITTEN] * config.block_size for _ in range(config.num_blocks)
        ]
        """The name of the content of each slot, by block id and slot."""
        self._owners = [-1 if config.groups else 0] * config.num_blocks
        """By block: the group that wrote it last, and whose slots it has."""
        self._checked: list[object] = [None] * config.num_blocks
        """By block: the key for which it was found right, until it is written again."""
        self._findings: list[Finding] = []
        self.frame_id: v.FrameId = -1
        """The plan that runs."""
        self._writes: list[list[Write]] = [[] for _ in range(config.num_blocks)]
        """By block: the writes since its first slot was written."""
        self._returns: dict[v.BlockId, tuple[v.RequestId, str, v.FrameId]] = {}
        """By block: the request that gave it back last, why, and the plan that said so."""

    def give_back(
        self, request_id: v.RequestId, tables: Iterable[Iterable[v.BlockId]], why: str
    ) -> None:
        """Note that a request no longer holds the blocks of these tables, as a plan says."""
        for table in tables:
            for block in table:
                self._returns[block] = (request_id, why, self.frame_id)

    def forget(self) -> None:
        """Mark all slots as written before a reset: none may be read again."""
        for block, slots in enumerate(self.kv):
            self._checked[block] = None
            slots[:] = [name if name == NEVER_WRITTEN else BEFORE_RESET for name in slots]

    def check_published(self, snapshot: v.Snapshot) -> list[Finding]:
        """Check that every cached block holds, completely, the content that its key names (P3, P4,
        P6)."""
        self._findings = []
        checked = self._checked
        if checked == [*snapshot.block_keys]:
            return []
        for block, key in enumerate(snapshot.block_keys):
            if key is None or checked[block] is key:
                continue
            group = key.group if key.group in range(len(self.groups)) else 0
            num_links = self.block_sizes[group] // self.config.block_size
            expected = self.names.of_block(key, num_links)
            expected = expected[-1:] if group in self.recurrent else expected
            if self._owners[block] == group and self.kv[block] == expected:
                checked[block] = key  # no-mutate statement: it saves looking again
                continue
            held = [self._seen(block, slot, group) for slot in range(len(expected))]
            pairs = enumerate(zip(expected, held, strict=True))
            slot, (name, seen) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            self._complain_slot("published_block", (block, slot), name, seen, repr(key))
        return self._findings

    def _write(self, rows: list[FrameRow]) -> None:
        """Write the slots of every row in every group, in plan order."""
        writers: dict[v.BlockId, Place] = {}
        for row in rows:
            row.view.name_positions(row.end, row.drafts)
        for row in rows if self.recurrent else ():
            self._read_states(row)
        for row in rows:
            for group in self.attended:
                self._write_table(row, group, writers)
            for group in self.recurrent:
                self._write_states(row, group, writers)
            for group in self.across:
                self._write_across(row, group, writers)
        for row in rows:
            self._check_exclusive(row, writers)

    def _write_table(self, row: FrameRow, group: int, writers: dict[v.BlockId, Place]) -> None:
        size, kv, checked = self.block_sizes[group], self.kv, self._checked
        writes, frame_id, owners = self._writes, self.frame_id, self._owners
        view, position, end = row.view, row.first, row.end
        name, chain, table = view.request.request_id, view.chain, view.tables[group]
        while position < end:
            index = position // size
            slot = position - index * size
            stop = min(end, (index + 1) * size)
            block = table[index]
            if owners[block] != group and not self._take_over(block, group):
                position = stop
                continue
            kv[block][slot : slot + stop - position] = chain[position:stop]
            checked[block] = None
            if slot == 0:
                writes[block] = []
            writes[block].append((slot, slot + stop - position, name, frame_id))
            if block in writers and not self._write_alike(writers[block], (row, group, index)):
                self._complain_shared(writers[block], (row, group, index), block)
            writers[block] = (row, group, index)
            position = stop

    def _write_alike(self, one: Place, other: Place) -> bool:
        """Whether two rows fill a block with the same content, now or in later steps.

        They do if it is at the same place of both tables, and both requests have the same tokens up
        to its end. A block that is not full of known tokens must have one holder, since the next
        tokens may differ.
        """
        (row, group, index), (other_row, *other_place) = one, other
        first = index * self.block_sizes[group]
        end = first + self.block_sizes[group]
        views = row.view, other_row.view
        if other_place != [group, index] or any(len(it.reported_token_ids) < end for it in views):
            return False
        for view in views:
            view.name_positions(end, ())
        return views[0].chain[first:end] == views[1].chain[first:end]

    def _take_over(self, block: v.BlockId, group: int) -> bool:
        """Give a block to another group, which cannot use its content; return False for the null
        block.

        The null block stays empty: a row that would write there also reads there.
        """
        if block == v.NULL_BLOCK:
            return False
        if self._owners[block] in self.recurrent and group in self.attended:
            what = f"block {block} holds a state of group {self._owners[block]}, and is not zeroed"
            self._complain(
                "P26", "block_of_a_state_is_zeroed_for_attention", what, subjects=of_block(block)
            )
        self._owners[block] = group
        size = 1 if group in self.recurrent else self.block_sizes[group]
        self.kv[block] = [NEVER_WRITTEN] * size
        self._writes[block] = []
        return True

    def copy(self, copies: Iterable[v.BlockCopy]) -> None:
        """Copy blocks one by one, with their content and its history."""
        for copy in copies:
            source, target = copy.source, copy.destination
            if not (min(source, target) > 0 and max(source, target) < len(self._owners)):
                what = f"block {source} is to be copied to block {target}"
                self._complain(
                    "P1", "copy_names_real_blocks", what, subjects=Subjects((), (source, target))
                )
                continue
            self.kv[target] = [*self.kv[source]]
            self._owners[target] = self._owners[source]
            self._writes[target] = [*self._writes[source]]
            self._checked[target] = None

    def zero(self, blocks: Iterable[v.BlockId]) -> None:
        """Blank blocks: their content must be written again before it is read."""
        for block in blocks:
            if 0 < block < len(self._owners):
                self._owners[block] = -1
                self._checked[block] = None

    def _read_states(self, row: FrameRow) -> None:
        """Check the states from which a row starts."""
        view, first = row.view, row.first
        for at in self.recurrent if first else ():
            table, index = view.tables[at], get_read_index(self.groups[at], view, at, first)
            block = table[index] if index < len(table) else v.NULL_BLOCK
            seen, expected = self._seen(block, 0, at), view.chain[first - 1]
            reader = view.request.request_id
            note = f"state read by {reader!r} at position {first} in plan {self.frame_id}"
            if block == v.NULL_BLOCK:
                what = f"group {at}: no {note}"
                self._complain("P5", "attended_position_has_a_block", what, subjects=reader)
            elif seen != expected:
                self._complain_slot("attended_slot", (block, 0), expected, seen, note, reader)
            else:
                continue
            row.is_astray = True

    def _write_states(self, row: FrameRow, at: int, writers: dict[v.BlockId, Place]) -> None:
        view, table = row.view, row.view.tables[at]
        for boundary, index in list_written(self.groups[at], row):
            block = table[index] if index < len(table) else v.NULL_BLOCK
            if self._owners[block] != at and not self._take_over(block, at):
                continue
            self.kv[block] = [view.chain[boundary - 1]]
            self._checked[block] = None
            self._writes[block] = [(0, 1, view.request.request_id, self.frame_id)]
            if block in writers:
                self._complain_shared(writers[block], (row, at, index), block)
            writers[block] = (row, at, index)

    def _write_across(self, row: FrameRow, at: int, writers: dict[v.BlockId, Place]) -> None:
        """Write the embeddings of a request's items, one to a slot, if the plan computes them."""
        view, size = row.view, self.block_sizes[at]
        name = view.request.request_id
        for index, block in enumerate(view.tables[at] if name in self.made_for else ()):
            made = view.across[index * size : (index + 1) * size]
            if not made or (self._owners[block] != at and not self._take_over(block, at)):
                continue
            self.kv[block][: len(made)] = made
            self._checked[block] = None
            self._writes[block] = [(0, len(made), name, self.frame_id)]
            if block in writers:
                self._complain_shared(writers[block], (row, at, index), block)
            writers[block] = (row, at, index)

    def _read_across(self, row: FrameRow, at: int) -> None:
        """Check all embeddings of a request's items, which every row attends to."""
        view, size, table = row.view, self.block_sizes[at], row.view.tables[at]
        reader = view.request.request_id
        if len(table) * size < len(view.across):
            what = f"{reader!r}: {len(view.across)} embeddings, {len(table) * size} slots"
            self._complain(
                "P26", "cross_attention_table_holds_the_embeddings", what, subjects=reader
            )
        for number, expected in enumerate(view.across[: len(table) * size]):
            place = table[number // size], number % size
            seen = self._seen(*place, at)
            if seen != expected:
                note = f"read by {reader!r}, embedding {number} in plan {self.frame_id}"
                self._complain_slot("attended_slot", place, expected, seen, note, reader)
                row.is_astray = True
                return

    def keep_states(self, row: FrameRow) -> None:
        """Copy the states at block ends that a row passed to their blocks, once it has sampled."""
        for at in self.recurrent:
            table = row.view.tables[at]
            for source, target in list_copied(self.groups[at], row):
                if source >= len(table) or v.NULL_BLOCK in (table[source], table[target]):
                    continue
                if self._owners[table[target]] == at or self._take_over(table[target], at):
                    self.kv[table[target]] = [self._seen(table[source], 0, at)]
                    self._checked[table[target]] = None
        move_on([(at, self.groups[at]) for at in self.recurrent], row)

    def _check_exclusive(self, row: FrameRow, writers: dict[v.BlockId, Place]) -> None:
        """Check that a written block is in no other table, except as a hit at the same position.

        Skipped blocks may be in any table.
        """
        for at, (group, table) in enumerate(zip(self.groups, row.view.tables, strict=True)):
            size = group.block_size
            first = count_unattended(group, row.first) if self.config.groups else 0
            if at in self.recurrent:  # state blocks of drafts move, which no plan shows
                first = (row.end - 1) // size
            elif at in self.attended:
                others = table[first : row.first // size] + table[-(-row.end // size) :]
                if writers.keys().isdisjoint(others):
                    continue
            for index, block in enumerate(table[first:], first):
                if block in writers and writers[block][1:] != (at, index):
                    self._complain_shared(writers[block], (row, at, index), block)

    def _read(self, row: FrameRow) -> None:
        """Check that every position which the row attends to holds what its request expects."""
        for at in self.across:
            self._read_across(row, at)
        view, kv, owners = row.view, self.kv, self._owners
        for at in self.attended:
            group, table = self.groups[at], view.tables[at]
            size = group.block_size
            full, rest = divmod(row.end, size)
            first = count_unattended(group, row.first) if self.config.groups else 0
            is_right = [kv[block] for block in table[first:full]] == view.pages[size][first:full]
            if is_right and rest:
                is_right = kv[table[full]][:rest] == view.chain[full * size : row.end]
            if is_right and self.config.groups:
                blocks = table[first : full + (rest > 0)]
                is_right = [owners[block] for block in blocks].count(at) == len(blocks)
            if not is_right:
                self._check_slots(row, at)

    def _check_slots(self, row: FrameRow, at: int) -> None:
        """Complain about the first attended slot that holds something else, if there is one."""
        view, group = row.view, self.groups[at]
        size, table = group.block_size, view.tables[at]
        first = first_attended(group, row.first)
        for position, expected in enumerate(view.chain[first : row.end], first):
            block, slot = table[position // size], position % size
            seen = self._seen(block, slot, at)
            if seen == expected:
                continue
            reader = view.request.request_id
            note = f"read by {reader!r} at position {position} in plan {self.frame_id}"
            if block == v.NULL_BLOCK:
                what = f"group {at} has no block {note}"
                self._complain("P5", "attended_position_has_a_block", what, subjects=reader)
            else:
                self._complain_slot("attended_slot", (block, slot), expected, seen, note, reader)
            row.is_astray = True
            return

    def _seen(self, block: v.BlockId, slot: int, group: int) -> Name:
        """The content of a slot for a row that reads the block as one of this group."""
        owner = self._owners[block]
        if owner != group:
            return NEVER_WRITTEN if owner < 0 else OF_ANOTHER_GROUP
        return self.kv[block][slot]

    def _complain_slot(
        self,
        what: str,
        place: tuple[v.BlockId, int],
        expected: Name,
        seen: Name,
        note: str,
        reader: v.RequestId = "",
    ) -> None:
        """Complain about a slot that holds something else than it should."""
        show = self.names.show
        blame = "P3", "holds_the_right_prefix", "the KV is of another prefix"
        if seen == NEVER_WRITTEN:
            blame = "P4", "was_written", "the slot was never written"
        elif seen == SPOILED:
            blame = "P19", "was_loaded", "the KV was not loaded, or is computed on what was not"
        elif seen == BEFORE_RESET:
            blame = "P25", "was_written_since_the_reset", "the KV is from before the reset"
        elif seen == OF_ANOTHER_GROUP:
            blame = "P3", "is_of_the_group_that_reads_it", "the KV is of another group's layers"
        elif self.names.same_tokens(expected, seen):
            message = "the tokens are the same, adapter, salt, items or embeddings are not"
            blame = "P6", "is_of_the_same_adapter_salt_and_items", message
        note = "; ".join([note, *self._describe_history(*place)])
        difference = Difference(f"kv[{place[0]}][{place[1]}]", show(expected), show(seen), note)
        subjects = Subjects((reader,) if reader else (), place[:1])
        self._complain(blame[0], f"{what}_{blame[1]}", blame[2], difference, subjects=subjects)

    def _complain_shared(self, writer: Place, other: Place, block: v.BlockId) -> None:
        places = " and ".join(
            f"{row.view.request.request_id!r} at index {index}"
            + f" of group {group}" * bool(self.config.groups)
            for row, group, index in (writer, other)
        )
        what = f"block {block} is of {places}"
        message = "; ".join([what, *self._describe_return(block)])
        names = dict.fromkeys(row.view.request.request_id for row, *_ in (writer, other))
        subjects = Subjects(tuple(names), (block,))
        self._complain("P2", "written_block_is_in_one_place", message, subjects=subjects)

    def _describe_history(self, block: v.BlockId, slot: int) -> Iterator[str]:
        """Yield the request that wrote a slot last and the one that gave its block back since, with
        the plans."""
        since = -1
        for first, stop, name, frame_id in reversed(self._writes[block]):
            if first <= slot < stop:
                since = frame_id
                yield f"written by {name!r} in plan {frame_id}"
                break
        yield from self._describe_return(block, since)

    def _describe_return(self, block: v.BlockId, since: v.FrameId = -1) -> Iterator[str]:
        name, why, frame_id = self._returns.get(block, ("", "", -1))
        if frame_id > since:
            yield f"given back by {name!r}, which {why}, says plan {frame_id}"

    def _complain(
        self,
        property_id: str,
        sentence: str,
        message: str,
        *differences: Difference,
        subjects: About = NO_SUBJECTS,
    ) -> None:
        found = violated(property_id, sentence, message, *differences, subjects=subjects)
        self._findings.append(found)
