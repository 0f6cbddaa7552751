"""The request table: a slot that is used again remembers nothing."""

from __future__ import annotations

from blockstep.impl.host import SHA256
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.table import RequestTable
from blockstep.spec.vocabulary import Request, Status


def add(table: RequestTable, request: Request) -> int:
    return table.add(request, Lineage(request, 2, SHA256), Status.WAITING, max_known=9)


def test_slots_of_ended_requests_are_used_again() -> None:
    table = RequestTable()
    first, second = add(table, Request("a", (1,))), add(table, Request("b", (1, 2), priority=3))
    assert (first, second) == (0, 1)
    table.remove(first)
    assert "a" not in table.slot_of
    assert add(table, Request("c", (1,))) == first
    assert table.slot_of == {"b": 1, "c": 0}
    assert table.rank_of(second) == (3, 0, "b")


def test_a_slot_used_again_starts_afresh() -> None:
    table = RequestTable()
    slot = add(table, Request("a", (1, 2, 3), eos_token_id=4))
    for column in (table.num_computed, table.num_preemptions):
        column[slot] = 5
    table.num_cached_tokens[slot] = table.last_frame[slot] = 5
    table.num_output_placeholders[slot] = 5
    table.is_prefill_chunk[slot] = table.grammar_ready[slot] = True
    table.spec_token_ids[slot] = (1,)
    table.holdings[slot][0].blocks.append(3)
    table.holdings[slot][0].num_cached = 5
    table.remove(slot)
    fresh, other = add(table, Request("b", (7,))), RequestTable()
    add(other, Request("b", (7,)))
    for name, column in vars(table).items():
        if name != "lineages":
            assert column == getattr(other, name), name
    assert table.all_token_ids(fresh) == (7,)
    assert table.output_token_ids(fresh) == ()
    assert table.num_outputs(fresh) == 0
