"""Stored: KV that a store writes into blocks and reads from them, as the worker sees it.

    load at once    plan: present before its rows read ... commit: or it failed, and is spoiled
    load later      plan: not done -- no row reads or writes -- report: present, or spoiled
    read by it      end of a request: blocks are kept -- no row writes -- report: done

A store has the right KV of every request, and states that include the last token that it offers. KV
that failed to load is spoiled, and so is all that was computed on it: it must be written again
before a row reads it (P19).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from blockstep.conformance.judge.attention_ranges import count_unattended
from blockstep.conformance.judge.worker.items import Items
from blockstep.conformance.judge.worker.prefix_names import SPOILED, Name, NamedText
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.tagged_kv import get_read_index, list_touched
from blockstep.conformance.protocol.findings import Difference, Subjects, of_block
from blockstep.conformance.protocol.transfer_tracker import count_valid, list_loaded, loses_all
from blockstep.spec import vocabulary as v


class Stored(Items):
    """A worker's view of a store."""

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        self._asked: dict[v.RequestId, v.Request] = {}
        """Requests as they were submitted."""
        self._delays: dict[v.RequestId, bool] = {}
        """Whether the store reads the blocks of a request when it ends."""
        self._offered: dict[v.RequestId, int] = {}
        """Tokens that the store has of a request; its states include all of these tokens."""
        self._stateless: set[v.RequestId] = set()
        """Requests whose load ends where the store has no states."""
        self._loads: dict[v.RequestId, v.KVLoad] = {}
        """Asynchronous loads that have not ended."""
        self._invalid: dict[v.RequestId, set[v.BlockId]] = {}
        """Blocks of these loads that failed."""
        self._late: dict[v.RequestId, tuple[v.KVLoad, set[v.BlockId]]] = {}
        """Loads of sessions that are done; the next row shows their token sequence."""
        self._at_once: dict[v.FrameId, tuple[v.KVLoad, ...]] = {}
        """Loads of plans in flight."""
        self._unsettled: dict[v.RequestId, v.FrameId] = {}
        """Requests admitted with such a load that have held its blocks since."""
        self._until: dict[tuple[v.RequestId, v.FrameId], v.FrameId] = {}
        """The plan before which each of the others gave its blocks back; they may hold these again.
        """
        self._doubtful: dict[v.BlockId, v.RequestId] = {}
        """Blocks of these requests after the local hit, which no other request may read yet."""
        self._under_way: dict[v.BlockId, v.RequestId] = {}
        """Blocks that the store is writing."""
        self._read_by_store: dict[v.RequestId, v.BlockTables] = {}
        self._kept: Counter[v.BlockId] = Counter()
        """By block: the number of ended requests for which the store reads it."""
        self._in_use: dict[v.FrameId, dict[v.BlockId, v.RequestId]] = {}
        """Blocks that the rows of each plan in flight read or write, with the request of the row.
        """

    # Events.

    def follow_store(self, event: v.Event, seen: v.Observation) -> None:
        """Take what an event and its answer say of the store, before everything else in them."""
        match event, seen:
            case _, v.Rejected():
                return
            case v.Submit(request=request), _:
                self._asked[request.request_id] = request
                self._delays.pop(request.request_id, None)
                self._offered.pop(request.request_id, None)
                self._late.pop(request.request_id, None)  # a session of this id has ended
            case v.KVOffer(request_id=name, delays_free=delays) as offer, _ if name in self._asked:
                self._delays[name] = delays
                self._offered[name] = offer.num_tokens or 0
            case v.Reset(reset_running_requests=forced, reset_connector=both), v.ResetDone(
                success=True
            ):
                if forced:
                    self._doubtful.clear()
                if both:
                    self._delays.clear()
                    self._offered.clear()
            case v.Commit(frame_id=frame_id, transfers=report), v.Outputs(rows=rows):
                loads = self._at_once.pop(frame_id, ())
                for load in loads:
                    self._settle_load(frame_id, load, report.invalid_block_ids)
                self._end(row.request_id for row in rows if row.finish_reason is not None)
                self._take(report)
            case v.TransfersReported(transfers=report), v.Outputs(rows=rows):
                self._end(row.request_id for row in rows)
                self.note_ends(row.request_id for row in rows)
                self._take(report)
            case v.GrammarFailed(request_id=name), v.Outputs():
                self._end((name,))
            case _, v.Aborted(request_ids=names):
                self._end(names)
                self._note_over(names)  # sessions, too

    def _end(self, names: Iterable[v.RequestId]) -> None:
        """Note that requests ended. Whether a session continues is not known here."""
        for name in names:
            request = self._asked.get(name)
            if request is None or request.resumable:
                continue
            del self._asked[name]
            self._note_return(name, self.frame_id + 1)
            if self._delays.pop(name, False):
                tables = self._get_held(name)
                self._read_by_store[name] = tables
                self._kept.update(block for table in tables for block in table if block)
            self._note_over((name,))

    def _note_over(self, names: Iterable[v.RequestId]) -> None:
        """Note that these requests are over, so that the next request with such an id holds none of
        their blocks."""
        for name in names:
            if name in self.views:
                self.views[name].is_over = True

    def _get_held(self, name: v.RequestId) -> v.BlockTables:
        """The blocks of a request that ends, from plans; a waiting request may have given them
        back."""
        if name in self._loads:
            return self._loads[name].block_ids
        view = self.views.get(name)
        if view is None or view.is_over or view.is_preempted or view.may_resume:
            return ()
        return tuple([self._get_kept(view, at) for at in range(len(self.groups))])

    def _get_kept(self, view: RequestView, at: int) -> tuple[v.BlockId, ...]:
        """The blocks of one group that a request is sure to hold, from plans.

        It may have given back skipped blocks, which no plan shows. Of state blocks it holds the one
        that its next row would read; later ones move.
        """
        group, table = self.groups[at], view.tables[at]
        if at in self.recurrent:
            index = get_read_index(group, view, at, view.num_computed)
            is_there = view.num_computed > 0 and index < len(table)
            return (table[index],) if is_there else ()
        count = count_unattended(group, view.num_computed)
        return (v.NULL_BLOCK,) * count + tuple(table[count:])

    def _take(self, report: v.KVTransfers) -> None:
        """Take a worker's report, invalid blocks first."""
        for name, load in self._loads.items():
            loaded = {block for _, block in list_loaded(load, self.block_sizes)}
            self._invalid[name] |= loaded.intersection(report.invalid_block_ids)
        for name in report.finished_recving:
            load_of = self._loads.pop(name, None)
            if load_of is not None:
                self._receive(load_of, self._invalid.pop(name))
        for name in report.finished_sending:
            for table in self._read_by_store.pop(name, ()):
                self._kept.subtract(filter(None, table))
        self._kept += Counter()  # drop counts of zero

    # Loads.

    def load(self, plan: v.Plan, rows: Sequence[FrameRow]) -> None:
        """Begin the loads of a plan; those at once are present before any row reads."""
        views = {row.view.request.request_id: row for row in rows}
        for name in self._late.keys() & views.keys():
            view, (load, invalid) = views[name].view, self._late.pop(name)
            if _is_behind(view, load):  # otherwise it has lost these blocks
                self._fill_slots(load, self._name_text(view, load), invalid)
        for load in plan.kv_loads:
            name, row = load.request_id, views.get(load.request_id)
            if not self._is_sound(load):
                continue
            self._complain_of_frames(load)
            if load.is_async:
                self._begin(load)
            elif row is None:
                self._complain_of_load(f"{name!r} has no row in the plan that has it loaded")
            else:
                self._load_at_once(load, row)
        self._check_zeroed(plan)
        self.check_transfers(rows)
        self._note_in_use(rows)

    def _check_zeroed(self, plan: v.Plan) -> None:
        """Check that a plan zeroes no block that the store writes, since nothing orders the two
        (upstream #48481)."""
        for block in plan.new_block_ids_to_zero:
            if block in self._under_way:
                self.complain_of_transfer(block, "zeroed by a plan")
                return

    def _note_in_use(self, rows: Sequence[FrameRow]) -> None:
        """Note what the rows of a plan read and write until its commit.

        A worker runs plans in order, but late: a row may read and write at any time between plan
        and commit. Nothing makes a store wait for it.
        """
        if self.config.max_frames_in_flight == 1:
            return  # it is committed before the next plan, and so before the next load
        self._in_use = {at: used for at, used in self._in_use.items() if at in self._frames}
        self._in_use[self.frame_id] = {
            block: row.view.request.request_id
            for row in rows
            for group in (*self.attended, *self.recurrent)
            for _, block in self._list_attended(row, group)
            if block != v.NULL_BLOCK
        }

    def _complain_of_frames(self, load: v.KVLoad) -> None:
        """Complain if a row of a plan in flight reads or writes what the store writes."""
        for frame_id in self._frames.keys() & self._in_use.keys():
            for _, block in list_loaded(load, self.block_sizes):
                name = self._in_use[frame_id].get(block)
                if name is not None:
                    what = f"block {block} is loaded for {load.request_id!r}, and plan {frame_id}, "
                    what += f"which is not answered, reads or writes it for {name!r}"
                    self._complain(
                        "P17",
                        "loaded_block_is_of_no_plan_in_flight",
                        what,
                        subjects=Subjects((load.request_id, name), (block,)),
                    )
                    return

    def give_back(
        self, request_id: v.RequestId, tables: Iterable[Iterable[v.BlockId]], why: str
    ) -> None:
        """Note that a request no longer holds the blocks of these tables, as a plan says."""
        super().give_back(request_id, tables, why)
        if why != "was remapped":
            self._note_return(request_id, self.frame_id)
            self._forget_doubts(request_id)

    def _note_return(self, name: v.RequestId, before: v.FrameId) -> None:
        """Note that a request with a load at once holds its blocks in no plan from `before` on."""
        frame_id = self._unsettled.pop(name, None)
        if frame_id is not None:
            self._until[name, frame_id] = before

    def _is_sound(self, load: v.KVLoad) -> bool:
        """Whether a load names blocks that exist and have room for it."""
        end = load.num_computed_tokens + load.num_external_tokens
        pairs = [*zip(load.block_ids, self.groups, strict=False)]
        is_right = len(load.block_ids) == len(self.groups) and all(
            len(table) * group.block_size >= end
            and all(
                0 < one < self.config.num_blocks for one in table[count_unattended(group, end) :]
            )
            for table, group in pairs
        )
        if not is_right or load.num_external_tokens < 1:
            what = f"{load.request_id!r} is to be loaded up to {end} into {load.block_ids}"
            self._complain_of_load(what)
            return False
        num_offered = self._offered.get(load.request_id, 0)
        self._stateless.discard(load.request_id)
        if self.recurrent and end != num_offered:
            self._stateless.add(load.request_id)
            what = f"{load.request_id!r} is loaded up to {end}, and the store has the states "
            what += f"after {num_offered} tokens"
            self._complain("P19", "load_ends_where_the_store_has_the_states", what)
        return True

    def _complain_of_load(self, what: str) -> None:
        self._complain("P26", "load_goes_into_the_table_of_its_request", what)

    def _begin(self, load: v.KVLoad) -> None:
        name = load.request_id
        self._complain_of_writing(load)
        self._loads[name], self._invalid[name] = load, set()
        for _, block in list_loaded(load, self.block_sizes):
            self._under_way[block] = name
            self._doubtful.pop(block, None)  # its owner skips it
        # It fills whole blocks: after the tokens there are zeros, and no state of another request.
        self.zero(block for _, block in list_loaded(load, self.block_sizes))
        self._fill_slots(load, (), set())

    def _complain_of_writing(self, load: v.KVLoad) -> None:
        """Complain if the store writes a block that it also reads or writes for another request."""
        for _, block in list_loaded(load, self.block_sizes):
            if self.is_in_transfer(block):
                self.complain_of_transfer(block, f"loaded for {load.request_id!r}")

    def _load_at_once(self, load: v.KVLoad, row: FrameRow) -> None:
        view, name = row.view, load.request_id
        start = load.num_computed_tokens + load.num_external_tokens
        if row.first != start or not _is_behind(view, load):
            what = f"{name!r} runs from {row.first} on, and is loaded up to {start}"
            self._complain_of_load(what)
        self._complain_of_writing(load)
        self._at_once[self.frame_id] = (*self._at_once.get(self.frame_id, ()), load)
        self._unsettled[name] = self.frame_id
        for table, size in zip(view.tables, self.block_sizes, strict=True):
            behind = table[load.num_computed_tokens // size :]
            self._doubtful |= dict.fromkeys(filter(None, behind), name)
        self._fill_slots(load, self._name_text(view, load), set())

    def _receive(self, load: v.KVLoad, invalid: set[v.BlockId]) -> None:
        """Note that an asynchronous load is done."""
        name = load.request_id
        for _, block in list_loaded(load, self.block_sizes):
            self._under_way.pop(block, None)
        request, view = self._asked.get(name), self.views.get(name)
        if request is None:
            return  # it has ended, so nothing reads the load
        if request.resumable:
            self._late[name] = load, invalid
        else:
            text = view or NamedText(request, self.names)
            self._fill_slots(load, self._name_text(text, load), invalid)

    def _name_text(self, text: NamedText, load: v.KVLoad) -> Sequence[Name]:
        """The names of the loaded positions and of those before them."""
        end, start = load.num_computed_tokens + load.num_external_tokens, len(text.chain)
        if isinstance(text, RequestView):
            text.name_positions(end, ())
        elif start < end:
            text.names.extend(text.chain, text.root, text.tokens[start:end], text.extras, start)
        return text.chain[:end]

    def _fill_slots(
        self, load: v.KVLoad, names: Sequence[Name], invalid: Collection[v.BlockId]
    ) -> None:
        """Write a load in every group; a position without a name or in an invalid block is
        spoiled."""
        first, name = load.num_computed_tokens, load.request_id
        for group in self.attended:
            size = self.block_sizes[group]
            for position in range(first, first + load.num_external_tokens):
                block, slot = load.block_ids[group][position // size], position % size
                if self._owners[block] != group and not self._take_over(block, group):
                    continue
                is_there = block not in invalid and position < len(names)
                self.kv[block][slot] = names[position] if is_there else SPOILED
                self._checked[block] = None
                if slot == 0:
                    self._writes[block] = []
                self._writes[block].append((slot, slot + 1, name, self.frame_id))
        for group in self.recurrent:
            self._fill_state(load, group, names, invalid)

    def _fill_state(
        self, load: v.KVLoad, at: int, names: Sequence[Name], invalid: Collection[v.BlockId]
    ) -> None:
        """Write the state that includes the last token of a load, if the store has that one.

        Other states of the same group are not loaded: no row reads them.
        """
        end = load.num_computed_tokens + load.num_external_tokens
        block = load.block_ids[at][(end - 1) // self.block_sizes[at]]
        if self._owners[block] != at and not self._take_over(block, at):
            return
        is_there = block not in invalid and end <= len(names)
        is_there = is_there and load.request_id not in self._stateless
        self.kv[block] = [names[end - 1] if is_there else SPOILED]
        self._checked[block] = None
        self._writes[block] = [(0, 1, load.request_id, self.frame_id)]

    def _settle_load(
        self, frame_id: v.FrameId, load: v.KVLoad, invalid: Collection[v.BlockId]
    ) -> None:
        """Follow the commit of a plan with a load: the load is present, or part of it failed and
        its row is void."""
        name = load.request_id
        is_held = self._unsettled.get(name) == frame_id
        if is_held:
            del self._unsettled[name]
        self._forget_doubts(name)
        until = self._until.pop((name, frame_id), self.frame_id + 1)
        num_valid = count_valid(load, self.config, invalid)
        if num_valid is None:
            return
        view, rows = self.views.get(name), self._frames.get(frame_id, ())
        row = next((row for row in rows if row.view.request.request_id == name), None)
        if view is None or row is None or row.view is not view:
            self._spoil(load, load.block_ids, range(frame_id, until), invalid)
            return
        tables = view.tables if is_held else load.block_ids
        self._spoil(load, tables, range(frame_id, until), invalid)
        is_held = is_held and not view.may_resume
        waits = (view.is_preempted or view.may_resume) and view.num_promised > 0
        if is_held or waits:
            self.forsake(view, row, num_valid if is_held else view.num_computed)
        if is_held and loses_all(self.config):
            self.views[name].may_resume = True  # it was preempted, which no plan shows

    def _forget_doubts(self, name: v.RequestId) -> None:
        """Note that a request gave its blocks back, or that its load is confirmed."""
        if self._doubtful:
            kept = {block: owner for block, owner in self._doubtful.items() if owner != name}
            self._doubtful = kept

    def _spoil(
        self,
        load: v.KVLoad,
        tables: Sequence[Sequence[v.BlockId]],
        frames: range,
        invalid: Collection[v.BlockId],
    ) -> None:
        """Mark what failed to load, and what this request computed on it in these plans."""
        end = load.num_computed_tokens + load.num_external_tokens
        for group in self.recurrent:  # a loaded state is useless without the others
            for block in tables[group]:
                if self._wrote(load, frames, block, 0):
                    self.kv[block] = [SPOILED]
                    self._checked[block] = None
        for group in self.attended:
            size = self.block_sizes[group]
            for index, block in enumerate(tables[group]):
                for slot in range(len(self.kv[block])):
                    position = index * size + slot
                    is_loaded = load.num_computed_tokens <= position < end and block in invalid
                    if (is_loaded or position >= end) and self._wrote(load, frames, block, slot):
                        self.kv[block][slot] = SPOILED
                        self._checked[block] = None

    def _wrote(self, load: v.KVLoad, frames: range, block: v.BlockId, slot: int) -> bool:
        """Whether the last write of a slot was for the load's request, in one of these plans."""
        for first, stop, name, frame_id in reversed(self._writes[block]):
            if first <= slot < stop:
                return name == load.request_id and frame_id in frames
        return False

    def forsake(self, view: RequestView, row: FrameRow, num_computed: int) -> RequestView:
        """Make a row and later ones void; return the request as it was before the row, except its
        KV."""
        for rows in self._frames.values():
            for each in rows:
                each.is_void |= each.view is view
        fresh = self.make_view(view.request)
        fresh.replace_tokens(view.tokens[: row.num_known])
        fresh.tables, fresh.num_computed = view.tables, num_computed
        fresh.is_preempted, fresh.may_resume = view.is_preempted, view.may_resume
        self.views[view.request.request_id] = fresh
        return fresh

    # Saves.

    def save(self, plan: v.Plan) -> None:
        """Read the KV of victims, before anything in the plan changes a block."""
        for save in plan.kv_saves:
            name, view = save.request_id, self.views.get(save.request_id)
            if view is None or view.is_preempted or name not in plan.preempted_req_ids:
                what = f"{name!r} holds nothing here that this plan takes"
                self._complain("P26", "saved_request_is_preempted_by_the_plan", what, subjects=name)
                continue
            view.name_positions(save.num_tokens, ())
            for at in self.attended:
                self._check_saved(view, save, at)

    def _check_saved(self, view: RequestView, save: v.KVSave, at: int) -> None:
        """Complain about the first saved slot that does not hold KV of the request's tokens."""
        size, num_left = self.block_sizes[at], count_unattended(self.groups[at], view.num_computed)
        table = save.block_ids[at] if at < len(save.block_ids) else ()
        for position in range(save.num_tokens):
            index, slot = divmod(position, size)
            block = table[index] if index < len(table) else v.NULL_BLOCK
            if block == v.NULL_BLOCK and index < num_left:
                continue
            if self._doubtful.get(block) == save.request_id:
                what = (
                    f"block {block} is saved for {save.request_id!r}, and its load is unconfirmed"
                )
                self._complain(
                    "P19",
                    "block_is_shared_once_its_load_has_come",
                    what,
                    subjects=Subjects((save.request_id,), (block,)),
                )
                return
            expected = view.chain[position] if position < len(view.chain) else SPOILED
            seen = self._seen(block, slot, at)
            if block == v.NULL_BLOCK or seen != expected:
                show = self.names.show
                what = f"{view.request.request_id!r} is saved up to {save.num_tokens}"
                place = f"kv[{block}][{slot}]"
                difference = Difference(place, show(expected), show(seen), f"position {position}")
                self._complain(
                    "P3",
                    "saved_slot_holds_the_text_of_its_request",
                    what,
                    difference,
                    subjects=view.request.request_id,
                )
                return

    # Blocks during a transfer.

    def is_in_transfer(self, block: v.BlockId) -> bool:
        """Whether the store writes a block, or reads it for a request that ended."""
        return block in self._under_way or block in self._kept

    def complain_of_transfer(self, block: v.BlockId, what: str) -> None:
        """Complain about a write to a block in transfer."""
        message = f"block {block} is {what}, and the store {self._describe_transfer(block)}"
        self._complain("P17", "block_in_transfer_is_not_written", message, subjects=of_block(block))

    def _describe_transfer(self, block: v.BlockId) -> str:
        if block in self._under_way:
            return f"writes it for {self._under_way[block]!r}"
        held = self._read_by_store.items()
        names = [name for name, tables in held if any(block in table for table in tables)]
        return f"reads it for {', '.join(map(repr, names))}"

    def check_transfers(self, rows: Sequence[FrameRow]) -> None:
        """Check that no row writes a block in transfer, reads one that is being loaded, or reads an
        unconfirmed one."""
        if not (self._under_way or self._kept or self._doubtful):
            return
        for row in rows:
            for group in (*self.attended, *self.recurrent):
                size = self.block_sizes[group]
                for index, block in self._list_attended(row, group):
                    if (
                        index * size >= row.first
                        and self._doubtful.get(block) != row.view.request.request_id
                    ):
                        self._doubtful.pop(block, None)  # its owner skips it
                    self._check_transfer(row, block, index >= row.first // size)

    def _list_attended(self, row: FrameRow, group: int) -> Iterator[tuple[int, v.BlockId]]:
        """Yield table index and block of each block in one group that a row reads or writes."""
        if group in self.recurrent:
            table = row.view.tables[group]
            places = sorted(list_touched(self.groups[group], row, group))
            yield from [(index, table[index]) for index in places if index < len(table)]
            return
        first = count_unattended(self.groups[group], row.first)
        end = -(-row.end // self.block_sizes[group])
        yield from enumerate(row.view.tables[group][first:end], first)

    def _check_transfer(self, row: FrameRow, block: v.BlockId, is_written: bool) -> None:
        name = row.view.request.request_id
        if is_written and self.is_in_transfer(block):
            self.complain_of_transfer(block, f"written by {name!r}")
        elif block in self._under_way:
            what = f"{name!r} reads block {block}, which the store {self._describe_transfer(block)}"
            self._complain(
                "P17", "block_under_way_is_not_read", what, subjects=Subjects((name,), (block,))
            )
        elif self._doubtful.get(block, name) != name:
            what = f"{name!r} reads block {block}, whose load is unconfirmed, of "
            what += repr(self._doubtful[block])
            self._complain(
                "P19",
                "block_is_shared_once_its_load_has_come",
                what,
                subjects=Subjects((name,), (block,)),
            )


def _is_behind(view: RequestView, load: v.KVLoad) -> bool:
    """Whether a request's tables begin with the blocks that a load names."""
    pairs = zip(view.tables, load.block_ids, strict=True)
    return all(tuple(held[: len(table)]) == table for held, table in pairs)
