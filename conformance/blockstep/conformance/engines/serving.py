"""Serving: a model engine held to the specification while it serves (`blockstep generate --check`).

    engine --event--> spec and scheduler in lock-step --> answer, or what is wrong
    engine --pass---> what the kernels were really given: tokens, slots, tables, lengths

Three things are held together, and the first that disagrees ends the run:

- the scheduler, to the specification and to the properties, as in `blockstep check`;
- the plans, to the worker that believes nothing else; what it samples is what the model sampled;
- every forward pass, to that worker. A tagged shadow of each paged cache remembers for every slot
  which prefix was written there, by the very slot mapping that the kernels got; every slot that
  attention reads through the block tables it got must hold the prefix that is read for (P3, P4).
  With several KV groups each has its slots and tables; a block is of the group that wrote it last.

A model engine is not imported here: it hands in what has the attributes of `ServedPass`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.judge.attention_ranges import first_attended
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.judge.worker.prefix_names import NEVER_WRITTEN, Name
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.spec import vocabulary as v


class ArrayLike(Protocol):
    """A tensor of any library."""

    def tolist(self) -> object:
        """Return its numbers as nested lists."""
        ...


class ServedInputs(Protocol):
    """The arrays of a forward pass, with the tokens of its requests one after the other."""

    @property
    def token_ids(self) -> ArrayLike:
        """Return the token ids, [num_tokens]."""
        ...

    @property
    def positions(self) -> ArrayLike:
        """Return the position of each token, [num_tokens]."""
        ...

    @property
    def slot_mapping(self) -> ArrayLike:
        """Return where each token's KV was written, [num_groups, num_tokens]: block id * block
        size + offset.
        """
        ...

    @property
    def block_tables(self) -> ArrayLike:
        """Return the block tables, [num_groups, num_seqs, max_blocks]."""
        ...

    @property
    def query_start_loc(self) -> ArrayLike:
        """Return where each request's tokens begin, [num_seqs + 1]."""
        ...

    @property
    def seq_lens(self) -> ArrayLike:
        """Return the number of positions that each request's last token attends, its own included,
        [num_seqs].
        """
        ...

    @property
    def adapters(self) -> ArrayLike | None:
        """Return the number of each token's adapter, [num_tokens], below 0 for none; None if no
        token has one.

        The engine chooses the numbers, and does not change them during a run.
        """
        ...


class ServedPass(Protocol):
    """One forward pass."""

    @property
    def is_draft(self) -> bool:
        """Return whether a draft model ran, with a cache of its own under the same block ids."""
        ...

    @property
    def request_ids(self) -> Sequence[v.RequestId]:
        """Return the requests whose tokens ran, in order."""
        ...

    @property
    def inputs(self) -> ServedInputs:
        """Return the arrays that it ran on."""
        ...


class ServedPlan(Protocol):
    """The passes and results of one plan."""

    @property
    def frame_id(self) -> v.FrameId:
        """Return the frame id of the plan."""
        ...

    @property
    def passes(self) -> Sequence[ServedPass]:
        """Return the passes, in the order in which they ran."""
        ...

    @property
    def sampled(self) -> Sequence[v.RowTokens]:
        """Return the tokens that will be committed."""
        ...

    @property
    def proposals(self) -> Mapping[v.RequestId, v.TokenIds]:
        """Return the drafts of the requests that sampled."""
        ...


class CheckFailedError(Exception):
    """The engine did not do what the specification does, or the kernels did not do what the plan
    says.

    `report.failure.render_served` explains it in full.
    """

    def __init__(self, findings: Sequence[Finding], num_events: int) -> None:
        self.findings = tuple(findings)
        self.num_events = num_events
        super().__init__(self.findings, num_events)

    def __str__(self) -> str:
        lines = [f"at event {self.num_events}"]
        for found in self.findings:
            fields = "; ".join(
                f"{one.field}: expected {one.expected}, seen {one.seen}"
                for one in found.differences
            )
            lines.append(f"{found.property_id} {found.sentence}: {found.message} {fields}".strip())
        return "\n".join(lines)


class ServingChecker:
    """Checker between a model engine and its scheduler: it checks both.

    One object is one run.

    Raises:
        CheckFailedError: from `apply` and `ran`, at the first finding.
    """

    def __init__(self, config: v.Config, make_engine: EngineFactory) -> None:
        self.worker = ServingWorker(config)
        self.run = LockStep.start(config, make_engine)
        self.run.worker = self.worker
        self.num_passes = 0
        self.num_slots_written = 0
        self.num_slots_read = 0

    def apply(self, event: v.Event) -> v.Observation:
        """Give the event to specification and scheduler; returns the scheduler's answer if it is
        right.
        """
        self._expect_nothing(self.run.apply(event))
        assert self.run.last is not None
        assert self.run.last.seen is not None
        return self.run.last.seen

    def snapshot(self) -> v.Snapshot:
        """Return the state, which is the same on both sides."""
        return self.run.spec.snapshot()

    def ran(self, served: ServedPlan) -> None:
        """Check the passes of a plan that ran, and take over the tokens that it sampled."""
        self._expect_nothing(self.worker.report(served))
        for one in served.passes:
            self.num_passes += 1
            ends, starts = _ints(one.inputs.seq_lens), _ints(one.inputs.query_start_loc)
            for group in self.worker.groups:
                self.num_slots_written += starts[-1]
                for end, (start, stop) in zip(ends, pairwise(starts), strict=True):
                    self.num_slots_read += end - first_attended(group, end - stop + start)

    def describe(self) -> str:
        """Return what was checked, on one line."""
        return (
            f"{self.run.num_events:,} events in lock-step, {self.num_passes:,} passes: "
            f"{self.num_slots_written:,} slots written and {self.num_slots_read:,} read as tagged"
        )

    def counts(self) -> dict[str, int]:
        """Return what was checked, as numbers by name."""
        return {
            "num_events": self.run.num_events,
            "num_passes": self.num_passes,
            "num_slots_written": self.num_slots_written,
            "num_slots_read": self.num_slots_read,
        }

    def _expect_nothing(self, findings: list[Finding]) -> None:
        if findings:
            raise CheckFailedError(findings, self.run.num_events)


class Shadow:
    """The prefix that each slot of a model's cache holds."""

    def __init__(self, config: v.Config) -> None:
        self.block_sizes = config.block_sizes
        self.names: list[list[Name]] = [
            [NEVER_WRITTEN] * (config.num_blocks * size) for size in config.block_sizes
        ]
        """The prefix in each slot, by group and slot; valid if the group owns the slot's block."""
        self.owners = [-1 if config.groups else 0] * config.num_blocks
        """The group that wrote each block last."""

    def write(self, group: int, slot: int, name: Name) -> None:
        """Tag a slot with a prefix.

        A group that writes to a block of another group takes it over, and its other slots are
        empty.
        """
        names, size = self.names[group], self.block_sizes[group]
        if not 0 <= slot < len(names):
            return
        block = slot // size
        if self.owners[block] != group:
            self.owners[block] = group
            names[block * size : (block + 1) * size] = [NEVER_WRITTEN] * size
        names[slot] = name

    def copy(self, one: v.BlockCopy) -> None:
        """Copy the content of one block to another, for the same group."""
        self.owners[one.destination] = self.owners[one.source]
        for names, size in zip(self.names, self.block_sizes, strict=True):
            source, target = one.source * size, one.destination * size
            names[target : target + size] = names[source : source + size]


class ServingWorker(Worker):
    """A worker that samples what a model sampled, with tagged shadows of the model's caches."""

    def __init__(self, config: v.Config) -> None:
        super().__init__(config, _no_next_token)
        self.shadows = {is_draft: Shadow(config) for is_draft in (False, True)}
        """One shadow for the draft model (True) and one for the model (False)."""
        self.adapter_numbers: dict[str, int] = {}
        """The number of each adapter that has run."""

    def _finish(self, row: FrameRow) -> None:
        """Note that samples are due: they are not known yet when a plan is dispatched; `report`
        delivers them.
        """
        self._promise(row)

    def _fill_slots(
        self, load: v.KVLoad, names: Sequence[Name], invalid: Collection[v.BlockId]
    ) -> None:
        """Fill the slots that a store has loaded or spoiled, for the layers of both models."""
        super()._fill_slots(load, names, invalid)
        first, end = load.num_computed_tokens, load.num_computed_tokens + load.num_external_tokens
        for group, table in enumerate(load.block_ids):
            for position in range(first, end):
                index, offset = divmod(position, self.block_sizes[group])
                name = self.kv[table[index]][offset]
                for shadow in self.shadows.values():
                    shadow.write(group, table[index] * self.block_sizes[group] + offset, name)

    def copy(self, copies: Iterable[v.BlockCopy]) -> None:
        """Copy blocks, for the layers of both models."""
        super().copy(copies)
        for one in copies:
            for shadow in self.shadows.values():
                shadow.copy(one)

    def report(self, served: ServedPlan) -> list[Finding]:
        """Take in a dispatched plan that ran; returns what is wrong with its passes."""
        self._findings = []
        rows = {row.view.request.request_id: row for row in self._frames[served.frame_id]}
        for row in rows.values():
            row.view.name_positions(row.end, row.drafts)
        for one in served.passes:
            if not one.is_draft and self._runs_the_rows(one, rows):
                self._check_pass(one, rows)
        for sampled in served.sampled:
            row = rows[sampled.request_id]
            self._deliver(row, sampled.token_ids)
            if self.config.async_scheduling:
                row.view.proposal = served.proposals.get(sampled.request_id, ())
        for name, row in rows.items():
            row.view.name_positions(len(row.view.tokens), ())
            drafts = served.proposals.get(name, ())
            row.view.name_positions(len(row.view.tokens) + len(drafts), drafts)
        for one in served.passes:
            if one.is_draft:
                self._check_pass(one, rows)
        for row in rows.values():
            row.view.cut_names(len(row.view.tokens))
        return self._findings

    def _runs_the_rows(self, one: ServedPass, rows: Mapping[v.RequestId, FrameRow]) -> bool:
        """Return whether the model runs exactly the rows of the plan, each from its first position
        on."""
        ends, starts = _ints(one.inputs.seq_lens), _ints(one.inputs.query_start_loc)
        seen = {
            name: (ends[row] - (starts[row + 1] - starts[row]), ends[row])
            for row, name in enumerate(one.request_ids)
        }
        expected = {name: (row.first, row.end) for name, row in rows.items()}
        if seen == expected and list(one.request_ids) == list(rows):
            return True
        difference = Difference("positions per request", str(expected), str(seen))
        self._complain("P26", "pass_runs_the_rows_of_the_plan", "the model ran others", difference)
        return False

    def _check_pass(self, one: ServedPass, rows: Mapping[v.RequestId, FrameRow]) -> None:
        """Check that every token is written to its request's slot, and that every slot read holds
        what was written there.
        """
        inputs, shadow = one.inputs, self.shadows[one.is_draft]
        tokens, positions = _ints(inputs.token_ids), _ints(inputs.positions)
        slots, starts = _rows(inputs.slot_mapping), _ints(inputs.query_start_loc)
        adapters = [-1] * len(tokens) if inputs.adapters is None else _ints(inputs.adapters)
        for number, name in enumerate(one.request_ids):
            view = rows[name].view
            self._check_adapter(view, {*adapters[starts[number] : starts[number + 1]]})
            for at in range(starts[number], starts[number + 1]):
                if positions[at] < min(len(view.chain), self._count_slots(view)):
                    written = [own[at] for own in slots]
                    self._run_token(shadow, view, tokens[at], positions[at], written)
                else:
                    what = f"{name!r}: ran at {positions[at]}"
                    self._complain("P26", "token_has_a_position_of_its_request", what)
        tables = _rows(inputs.block_tables)
        for number, end in enumerate(_ints(inputs.seq_lens)):
            view = rows[one.request_ids[number]].view
            first = end - starts[number + 1] + starts[number]
            for group in range(len(self.groups)):
                self._read_slots(shadow, view, group, tables[group][number], range(first, end))

    def _check_adapter(self, view: RequestView, numbers: set[int]) -> None:
        """Check that all tokens of a request run with its adapter, and that no other adapter has
        its number.
        """
        name, adapter = view.request.request_id, view.request.adapter
        if adapter is None:
            is_right = max(numbers) < 0
        else:
            others = {own for other, own in self.adapter_numbers.items() if other != adapter}
            expected = self.adapter_numbers.setdefault(adapter, min(numbers))
            is_right = numbers == {expected} and expected >= 0 and expected not in others
        if not is_right:
            what = f"{name!r}: its tokens ran with the adapters numbered {sorted(numbers)}"
            difference = Difference("adapter", str(adapter), str(sorted(numbers)))
            self._complain("P6", "token_runs_with_the_adapter_of_its_request", what, difference)

    def _run_token(
        self, shadow: Shadow, view: RequestView, token: int, position: int, slots: Sequence[int]
    ) -> None:
        """Tag the slots that were really written; complain if a slot or the token is not the
        request's.
        """
        name, expected = view.request.request_id, view.chain[position]
        for group, slot in enumerate(slots):
            size = self.block_sizes[group]
            expected_slot = view.tables[group][position // size] * size + position % size
            if slot != expected_slot:
                what = f"{name!r}: position {position} was written elsewhere"
                difference = Difference("slot", str(expected_slot), str(slot))
                self._complain("P3", "token_is_written_to_its_slot", what, difference)
            shadow.write(group, slot, expected)
        if token != self.names.token_of(expected):
            property_id = "P24" if position >= view.num_prompt else "P26"
            what = f"{name!r}: another token ran at position {position}"
            difference = Difference("token", str(self.names.token_of(expected)), str(token))
            self._complain(property_id, "model_runs_the_tokens_of_the_plan", what, difference)

    def _read_slots(
        self, shadow: Shadow, view: RequestView, group: int, table: Sequence[int], ran: range
    ) -> None:
        """Complain about the first slot that these tokens read and that does not hold the expected
        prefix.
        """
        size, names = self.block_sizes[group], shadow.names[group]
        first = first_attended(self.groups[group], ran.start)
        for position, expected in enumerate(view.chain[first : ran.stop], first):
            index, offset = divmod(position, size)
            block = table[index] if index < len(table) else v.NULL_BLOCK
            note = f"read by {view.request.request_id!r} at position {position}"
            seen = names[block * size + offset]
            owner = shadow.owners[block]
            if owner not in (-1, group):
                what = "the KV is of the layers of another group"
                difference = Difference(
                    f"kv[{block}]", f"of group {group}", f"of group {owner}", note
                )
                self._complain(
                    "P3", "attended_slot_is_of_the_group_that_reads_it", what, difference
                )
                return
            if seen != expected:
                self._complain_slot("attended_slot", (block, offset), expected, seen, note)
                return


def _ints(array: ArrayLike) -> list[int]:
    values = array.tolist()
    assert isinstance(values, list)
    return values


def _rows(array: ArrayLike) -> list[Any]:
    """Return its outermost lists: one for each KV group."""
    values = array.tolist()
    assert isinstance(values, list)
    return values


def _no_next_token(text: Sequence[int]) -> int:
    raise AssertionError(f"the token after {len(text)} tokens comes from the model")
