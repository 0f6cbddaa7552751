"""Audit of the vLLM adapter: vLLM's own functions show misread keys, plans and states.

They do so even if a quirk of the profile has the same mistake.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm_support.installed import PROFILE, needs_reference, needs_vllm, quiet

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_releases import REFERENCE
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.options import find_profile
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile, Quirk

ADAPTERS = "blockstep.conformance.engines.adapters"
pytestmark = [quiet, needs_vllm]

CONFIG = v.Config(num_blocks=9, block_size=2)
ITEM = v.MultiModalItem("cat", 1, 2)
DOG = v.MultiModalItem("dog", 3, 1)
RICH = v.Request("A", (1, 2, 3, 4, 5), 4, adapter="x", cache_salt="y", items=(ITEM, DOG))


def take(name: str) -> Any:
    """Import a module of the adapter; an import at the top would import vLLM."""
    return importlib.import_module(f"{ADAPTERS}.{name}")


# A key that is not what was hashed.

KEYS: dict[str, Callable[[v.BlockKey], v.BlockKey]] = {
    "no items": lambda key: rekey(key, items=()),
    "one item only": lambda key: rekey(key, items=key.items[:1]),
    "items in another order": lambda key: rekey(key, items=key.items[::-1]),
    "another name of an item": lambda key: rekey(
        key, items=tuple(("cow", at) for _, at in key.items)
    ),
    "no salt": lambda key: rekey(key, cache_salt=None),
    "no adapter": lambda key: rekey(key, adapter=None),
    "other tokens": lambda key: rekey(key, token_ids=key.token_ids[::-1]),
    "another parent": lambda key: rekey(key, parent=None),
}


def rekey(key: v.BlockKey, **fields: Any) -> v.BlockKey:
    names = ("parent", "token_ids", "adapter", "cache_salt", "items", "group", "embeds")
    return v.BlockKey(**{name: getattr(key, name) for name in names} | fields)


@pytest.mark.parametrize("lie", KEYS)
def test_a_key_that_is_not_what_was_hashed_is_found(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = take("vllm_block_keys")
    compute = names.compute_block_key
    monkeypatch.setattr(names, "compute_block_key", lambda *a, **k: KEYS[lie](compute(*a, **k)))
    engine = take("vllm").VllmEngine(CONFIG)
    engine.apply(v.Submit(RICH))
    engine.snapshot()
    engine.apply(v.Schedule())
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


@needs_reference
@pytest.mark.parametrize("start", [0, 2])
def test_a_key_without_its_embeddings_is_found(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = take("vllm_block_keys")
    compute = names.compute_block_key

    def forget(
        release: Any, request: v.Request, parent: Any, tokens: Any, at: int, **k: Any
    ) -> Any:
        key = compute(release, request, parent, tokens, at, **k)
        return rekey(key, embeds=()) if at == start else key

    monkeypatch.setattr(names, "compute_block_key", forget)
    engine = take("vllm").VllmEngine(CONFIG)
    engine.apply(v.Submit(v.Request("A", (0, 0, 0, 0, 0), prompt_embeds=(5, 6, 7, 8, 9))))
    engine.apply(v.Schedule())
    with pytest.raises(EngineFault, match="its digest is not of that"):
        engine.snapshot()


def play(profile: Profile, request: v.Request) -> list[Finding]:
    """Return the findings of a program with the request, and then an equal one."""
    again = replace(request, request_id="B")
    steps = (v.Schedule(), Answer()) * 3
    actions = (v.Submit(request), *steps, v.Submit(again), *steps, Drain())
    _, findings = run_program(Program(CONFIG, actions), load_engine("vllm"), profile)
    return findings


MISREAD = {
    "the offset of an item": (
        {"has_offsets": False}, Quirk.ITEM_OFFSET_NOT_IN_KEY, replace(RICH, items=(ITEM,)),
    ),
    "the end of an item": (
        {"has_exact_ends": False}, Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY,
        v.Request("A", (1, 2, 3, 4), 4, items=(v.MultiModalItem("cat", 2, 2),)),
    ),
}  # fmt: skip
"""Flags with which the adapter misreads a release, and the quirk with the same mistake."""


@needs_reference
@pytest.mark.parametrize("misread", MISREAD)
def test_an_adapter_and_a_quirk_with_the_same_mistake_are_found(
    misread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, quirk, request = MISREAD[misread]
    profile = find_profile(f"vllm-{REFERENCE}")
    assert play(profile, request) == []
    assert quirk not in profile.quirks
    state, audit = take("vllm_state"), take("vllm_audit").Audit
    digests = state.Digests
    wrong = replace(profile, quirks=profile.quirks | {quirk})
    monkeypatch.setattr(
        state, "Digests", lambda release, size: digests(replace(release, **flags), size)
    )
    assert play(profile, request) != [], "a wrong adapter alone is found"
    (finding,) = play(wrong, request)
    assert "its digest is not of that" in finding.message
    monkeypatch.setattr(audit, "check_state", lambda *_: None)
    assert play(wrong, request) == [], "only the audit finds it"


# A plan or a snapshot that differs from the scheduler's state.


def drop_a_block(plan: v.Plan) -> v.Plan:
    return replace(
        plan, new=tuple(replace(row, block_ids=(row.block_ids[0][:-1],)) for row in plan.new)
    )


def repeat_a_block(plan: v.Plan) -> v.Plan:
    """Repeat a block in rows that are not new."""
    return replace(plan, cached=tuple(map(repeat, plan.cached)))


def repeat(row: v.CachedRow) -> v.CachedRow:
    return replace(row, new_block_ids=((*row.new_block_ids[0], 1),))


@pytest.mark.parametrize(
    ("lie", "first"),
    [
        (drop_a_block, "table_holds_the_scheduled_tokens"),
        (repeat_a_block, "row_gains_exactly_the_blocks_it_needs"),
    ],
)
def test_a_block_table_that_is_wrong_in_a_plan_is_found(
    lie: Callable[[v.Plan], v.Plan], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first finding names the broken property; a later one names what vLLM itself holds."""
    adapter = take("vllm")
    read_plan = adapter.read_plan
    monkeypatch.setattr(adapter, "read_plan", lambda *a: lie(read_plan(*a)))
    program = Program(CONFIG, (v.Submit(RICH), *(v.Schedule(), Answer()) * 2))
    _, findings = run_program(program, load_engine("vllm"), PROFILE)
    (fault,) = [found for found in findings if found.kind is FindingKind.FAULT]
    assert "the block table that plans told 'A' is" in fault.message
    assert findings[0].sentence == first


STATES: dict[str, tuple[Callable[[v.Snapshot], v.Snapshot], str]] = {
    "a key of a block that has none": (
        lambda s: replace(s, block_keys=(*s.block_keys[:-1], v.BlockKey(None, (1, 2)))),
        "block 8 is shown with key",
    ),
    "no key where there is one": (
        lambda s: replace(s, block_keys=(None,) * 9), "block 1 is shown with key None",
    ),
    "a key of another block": (
        lambda s: replace(s, cached=dict.fromkeys(s.cached, (8,))), "block 1 is hit under",
    ),
    "an empty map of keys": (lambda s: replace(s, cached={}), "is hit under"),
    "another table": (
        lambda s: replace(s, requests=(replace(s.requests[0], block_tables=((1,),)),)),
        "the block table shown of 'A' is",
    ),
    "a short free queue": (
        lambda s: replace(s, free_queue=s.free_queue[1:]), "blocks in the free queue: 4",
    ),
    "an empty running list": (
        lambda s: replace(s, running=()), "running: 0 in the snapshot, 1 says",
    ),
    "a request that waits": (
        lambda s: replace(s, skipped_waiting=("A",)), "waiting: 1 in the snapshot, 0",
    ),
    "a request that has ended": (
        lambda s: replace(s, finished_req_ids=("B",)), "has ended: True in the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", STATES)
def test_a_wrong_snapshot_is_found(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, (change, message) = take("vllm"), STATES[lie]
    read_snapshot = adapter.read_snapshot
    engine = adapter.VllmEngine(CONFIG)
    engine.apply(v.Submit(RICH))
    engine.snapshot()
    engine.apply(v.Schedule())
    monkeypatch.setattr(adapter, "read_snapshot", lambda run: change(read_snapshot(run)))
    with pytest.raises(EngineFault, match=message):
        engine.snapshot()
    monkeypatch.undo()
    engine.snapshot()
