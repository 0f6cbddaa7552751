"""Wire format: KV events in the bytes of vLLM, and mirrors that rebuild the cache from them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from blockstep.impl.host import HostEngine
from blockstep.impl.serving.journal import Journal
from blockstep.impl.serving.mirror import Mirror
from blockstep.impl.serving.wire import (
    Batch,
    BlockHash,
    Cleared,
    ClearedMap,
    ExtraKeys,
    Form,
    KeyDigests,
    Removed,
    RemovedMap,
    Stored,
    StoredMap,
    WireEvent,
    WireWriter,
    get_extra_keys,
    read_batch,
    write_batch,
)
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    Commit,
    Config,
    Event,
    GroupKind,
    KVEvent,
    KVGroup,
    Outputs,
    Plan,
    Request,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    Submit,
)

FIRST = BlockKey(None, (1, 2), "x", "s", (("cat", -1),))
SECOND = BlockKey(FIRST, (3, 300), "x")
EVENTS: tuple[KVEvent, ...] = (
    BlockStored((FIRST, SECOND), None, (1, 2, 3, 300), 2, "x"),
    BlockStored((SECOND,), FIRST, (3, 300), 2, "x"),
    BlockRemoved((FIRST,)),
    AllBlocksCleared(),
)


def by_index(key: BlockKey) -> bytes:
    """Return a digest that contains the index of the block."""
    return bytes(24) + bytes([255, 1, 2, 3, 4, 5, 6, key.index])


def write_events(*, is_short: bool = True, form: Form = Form.ARRAYS) -> bytes:
    kinds = (KVGroup(GroupKind.FULL, 2),)
    more: dict[str, Any] = {"lora_ids": {"x": 7}, "rank": 3, "form": form, "groups": kinds}
    return WireWriter(by_index, is_short=is_short, **more).write(EVENTS, 1.5)


def test_bytes_equal_those_of_releases() -> None:
    """The expected bytes were written by `vllm.distributed.kv_events` of 0.19.1 and 0.33.0."""
    assert write_events().hex() == SHORT
    assert write_events(is_short=False).hex() == LONG
    assert write_events(form=Form.MAPS).hex() == SHORT_MAPS
    assert write_events(is_short=False, form=Form.MAPS).hex() == LONG_MAPS


SHORT = (
    "93cb3ff80000000000009499ab426c6f636b53746f72656492cfff01020304050600cfff01020304050601c0"
    "94010203cd012c0207a3475055a1789293a17892a3636174ffa17391a17899ab426c6f636b53746f72656491"
    "cfff01020304050601cfff010203040506009203cd012c0207a3475055a1789191a17893ac426c6f636b5265"
    "6d6f76656491cfff01020304050600a347505591b0416c6c426c6f636b73436c656172656403"
)
LONG = (
    "93cb3ff80000000000009499ab426c6f636b53746f72656492c4200000000000000000000000000000000000"
    "00000000000000ff01020304050600c420000000000000000000000000000000000000000000000000ff0102"
    "0304050601c094010203cd012c0207a3475055a1789293a17892a3636174ffa17391a17899ab426c6f636b53"
    "746f72656491c420000000000000000000000000000000000000000000000000ff01020304050601c4200000"
    "00000000000000000000000000000000000000000000ff010203040506009203cd012c0207a3475055a17891"
    "91a17893ac426c6f636b52656d6f76656491c420000000000000000000000000000000000000000000000000"
    "ff01020304050600a347505591b0416c6c426c6f636b73436c656172656403"
)


SHORT_MAPS = (
    "93cb3ff800000000000094de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "92cfff01020304050600cfff01020304050601b1706172656e745f626c6f636b5f68617368c0a9746f6b656e"
    "5f69647394010203cd012caa626c6f636b5f73697a6502a76c6f72615f696407a66d656469756da3475055a9"
    "6c6f72615f6e616d65a178aa65787472615f6b6579739293a17892a3636174ffa17391a178a967726f75705f"
    "69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ede000ba47479"
    "7065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfff01020304050601b1706172656e74"
    "5f626c6f636b5f68617368cfff01020304050600a9746f6b656e5f6964739203cd012caa626c6f636b5f7369"
    "7a6502a76c6f72615f696407a66d656469756da3475055a96c6f72615f6e616d65a178aa65787472615f6b65"
    "79739191a178a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f6174"
    "74656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfff0102"
    "0304050600a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b7343"
    "6c656172656403"
)
LONG_MAPS = (
    "93cb3ff800000000000094de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "92c420000000000000000000000000000000000000000000000000ff01020304050600c42000000000000000"
    "0000000000000000000000000000000000ff01020304050601b1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f69647394010203cd012caa626c6f636b5f73697a6502a76c6f72615f696407a66d65646975"
    "6da3475055a96c6f72615f6e616d65a178aa65787472615f6b6579739293a17892a3636174ffa17391a178a9"
    "67726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e"
    "de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4200000000000000000"
    "00000000000000000000000000000000ff01020304050601b1706172656e745f626c6f636b5f68617368c420"
    "000000000000000000000000000000000000000000000000ff01020304050600a9746f6b656e5f6964739203"
    "cd012caa626c6f636b5f73697a6502a76c6f72615f696407a66d656469756da3475055a96c6f72615f6e616d"
    "65a178aa65787472615f6b6579739191a178a967726f75705f69647800b26b765f63616368655f737065635f"
    "6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b"
    "5f68617368657391c420000000000000000000000000000000000000000000000000ff01020304050600a66d"
    "656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403"
)


@pytest.mark.parametrize("is_short", [True, False])
def test_the_installed_release_writes_the_same_bytes(is_short: bool) -> None:
    release = pytest.importorskip("vllm.distributed.kv_events")
    if "extra_keys" not in release.BlockStored.__struct_fields__:
        pytest.skip("this release has no extra keys in its events")
    form = get_form(release)
    kind = {"kv_cache_spec_kind": "full_attention"} if form is Form.MAPS else {}
    group = {"group_idx": 0} if form is Form.MAPS else {}

    def name(key: BlockKey) -> BlockHash:
        digest = by_index(key)
        return int.from_bytes(digest[-8:], "big") if is_short else digest

    first, second = name(FIRST), name(SECOND)
    extra = [("x", ("cat", -1), "s"), ("x",)]
    more = {"block_size": 2, "lora_id": 7, "medium": "GPU", "lora_name": "x", **group, **kind}
    events = [
        release.BlockStored([first, second], None, [1, 2, 3, 300], extra_keys=extra, **more),
        release.BlockStored([second], first, [3, 300], extra_keys=extra[1:], **more),
        release.BlockRemoved([first], "GPU", **group),
        release.AllBlocksCleared(),
    ]
    batch = release.KVEventBatch(ts=1.5, events=events, data_parallel_rank=3)
    payload = msgspec.msgpack.Encoder().encode(batch)
    written = write_events(is_short=is_short, form=form)
    theirs, ours = msgspec.msgpack.decode(payload), msgspec.msgpack.decode(written)
    own = Stored if form is Form.ARRAYS else StoredMap
    is_same_type = release.BlockStored.__struct_fields__ == own.__struct_fields__
    if form is Form.ARRAYS and not is_same_type:  # 0.20 appends the group, which is None here
        theirs[1] = [it[: len(mine)] for it, mine in zip(theirs[1], ours[1], strict=True)]
    assert theirs == ours
    if is_same_type:
        assert payload == written  # a map of a type with fewer fields has a shorter header
    read = msgspec.msgpack.decode(written, type=release.KVEventBatch)
    assert read.events[0].token_ids == batch.events[0].token_ids
    assert msgspec.msgpack.Encoder().encode(read) == payload


def get_form(release: Any) -> Form:
    """Return the form in which this release writes events."""
    is_array = release.BlockRemoved.__struct_config__.array_like
    return Form.ARRAYS if is_array else Form.MAPS


def test_written_events_are_read_back() -> None:
    batch = read_batch(write_events())
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    assert [type(event) for event in batch.events] == [Stored, Stored, Removed, Cleared]
    assert write_batch(batch) == write_events()
    named = read_batch(write_events(form=Form.MAPS))
    assert [type(event) for event in named.events] == [StoredMap] * 2 + [RemovedMap, ClearedMap]
    assert write_batch(named) == write_events(form=Form.MAPS)


def test_missing_fields_of_old_releases_have_defaults() -> None:
    """vLLM 0.11.0 and 0.12.0 write neither the adapter's name nor the extra keys."""
    batch = read_batch(
        msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [7], 1, None, "GPU"]]])
    )
    assert batch.events == [Stored([1], None, [7], 1, None, "GPU", None)]


def test_a_map_has_every_field_that_a_release_requires() -> None:
    """vLLM 0.24.0 and later refuse a map without one of these, nil or not."""
    stored = BlockStored((BlockKey(None, (1, 2)),), None, (1, 2), 2)
    payload = WireWriter(form=Form.MAPS).write((stored, BlockRemoved(stored.keys)), 0.0)
    first, last = msgspec.msgpack.decode(payload)[1]
    required = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"}
    assert first.keys() >= required | {"type", "lora_name"}
    assert last.keys() >= {"type", "block_hashes", "medium"}


def test_additional_fields_of_an_array_are_ignored() -> None:
    """vLLM 0.22.1 appends the group and its kind."""
    stored = ["BlockStored", [1], None, [7], 1, None, "GPU", None, None, 0, "full_attention", None]
    removed = ["BlockRemoved", [1], "GPU", 0]
    batch = read_batch(msgspec.msgpack.encode([0.0, [stored, removed], 0]))
    assert batch.events == [Stored([1], None, [7], 1, None, "GPU", None), Removed([1], "GPU")]


@pytest.mark.parametrize(
    ("group", "kind", "window"),
    [
        (KVGroup(GroupKind.FULL, 2), "full_attention", None),
        (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=4), "sliding_window", 4),
        (
            KVGroup(GroupKind.CHUNKED_LOCAL, 2, attention_chunk_size=4),
            "chunked_local_attention",
            None,
        ),
        (KVGroup(GroupKind.RECURRENT, 2), "mamba", None),
        (KVGroup(GroupKind.CROSS_ATTENTION, 2), "cross_attention", None),
    ],
    ids=lambda given: str(given.kind) if isinstance(given, KVGroup) else None,
)
def test_a_map_has_the_group_of_its_blocks(group: KVGroup, kind: str, window: int | None) -> None:
    """The event has the number of its group, and the kind in vLLM's word if groups are given."""
    stored = BlockStored((BlockKey(None, (1, 2)).in_group(1),), None, (1, 2), 2)
    removed = BlockRemoved(stored.keys)
    for groups, expected in (((group, group), (kind, window)), ((), (None, None))):
        writer = WireWriter(form=Form.MAPS, groups=groups)
        first, last = read_batch(writer.write((stored, removed), 0.0)).events
        assert isinstance(first, StoredMap)
        assert isinstance(last, RemovedMap)
        assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == expected
        assert first.group_idx == last.group_idx == 1


def test_words_for_kinds_equal_those_of_the_release() -> None:
    release = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(release, "KVCacheSpecKind"):
        pytest.skip("this release has no kinds in its events")
    words = {kind.value for kind in release.KVCacheSpecKind}
    stored = BlockStored((BlockKey(None, (1, 2)),), None, (1, 2), 2)
    for kind in GroupKind:
        payload = WireWriter(form=Form.MAPS, groups=[KVGroup(kind, 2)]).write((stored,), 0.0)
        (event,) = read_batch(payload).events
        assert isinstance(event, StoredMap)
        assert event.kv_cache_spec_kind in words


def test_extra_keys_are_per_block_and_none_without_extras() -> None:
    assert get_extra_keys(BlockKey(None, (1, 2)), 2) is None
    assert get_extra_keys(SECOND, 2) == ("x",)
    assert get_extra_keys(SECOND, 4) == ("x", ("cat", -1), "s")
    again = BlockKey(FIRST, (3, 4), "x", items=(("cat", -3), ("dog", 1)))
    assert get_extra_keys(again, 4) == ("x", ("cat", -1), ("dog", 3), "s")
    embedded = get_extra_keys(BlockKey(None, (1, 2), embeds=(5, 6)), 2)
    assert embedded is not None
    assert len(embedded[0]) == 32


def test_different_keys_have_different_digests() -> None:
    digest, bare = KeyDigests(), BlockKey(None, (1, 2))
    keys = [FIRST, SECOND, bare, BlockKey(bare, (1, 2)), BlockKey(None, (1, 2), "s")]
    keys += [BlockKey(None, (1, 2), None, "s"), bare.in_group(1), BlockKey(None, (1,))]
    assert len({digest(key) for key in keys}) == len(keys)
    assert KeyDigests()(SECOND) == digest(SECOND)


# Whoever reads it.


def run_engine(
    seed: int, num_steps: int = 60, form: Form = Form.ARRAYS, groups: tuple[KVGroup, ...] = ()
) -> list[tuple[bytes, dict[BlockHash, int]]]:
    """Return batches of an engine short of blocks, each with the blocks cached after it."""
    draw, writer, count = random.Random(seed), WireWriter(form=form), 0
    config = Config(
        num_blocks=9 if not groups else 19,
        block_size=2,
        max_model_len=16,
        max_num_batched_tokens=6,
        groups=groups,
    )
    engine = HostEngine(replace(config, enable_kv_cache_events=True))
    batches: list[tuple[bytes, dict[BlockHash, int]]] = []

    def apply(event: Event) -> object:
        answer = engine.apply(event)
        if isinstance(answer, Outputs | ResetDone) and answer.kv_events:
            shown = engine.snapshot().cached
            findable = {writer.name(key): len(blocks) for key, blocks in shown.items()}
            batches.append((writer.write(answer.kv_events, float(len(batches))), findable))
        return answer

    for _ in range(num_steps):
        if draw.random() < 0.5:
            prompt = tuple(draw.choice((1, 2)) for _ in range(draw.randint(1, 9)))
            apply(Submit(Request(f"r{count}", prompt, max_tokens=draw.randint(1, 5))))
            count += 1
        if draw.random() < 0.05:
            apply(Reset(reset_running_requests=True))
        plan = apply(Schedule())
        assert isinstance(plan, Plan)
        if plan.rows:
            samples = engine.frames[plan.frame_id].build_rows()
            rows = [
                RowTokens(name, () if drafts is None else (draw.choice((1, 2)),))
                for name, drafts in samples.items()
            ]
            apply(Commit(plan.frame_id, tuple(rows)))
    return batches


@pytest.mark.parametrize("seed", range(5))
def test_a_mirror_has_the_cached_blocks_after_each_batch(seed: int) -> None:
    mirror, batches = Mirror(), run_engine(seed, form=[Form.ARRAYS, Form.MAPS][seed % 2])
    assert any(max(findable.values(), default=0) > 1 for _, findable in batches) or seed
    for seq, (payload, findable) in enumerate(batches):
        assert mirror.take(seq, payload)
        assert mirror.list_findable() == findable


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_consumer_with_classes_of_the_release_has_the_cached_blocks(num_groups: int) -> None:
    """The consumer counts block hashes with vLLM's classes and uses no code of ours."""
    release = pytest.importorskip("vllm.distributed.kv_events")
    groups = (KVGroup(GroupKind.FULL, 2), KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=4))
    found, decoder = Counter[Any](), msgspec.msgpack.Decoder(type=release.KVEventBatch)
    batches = run_engine(num_groups, 400, get_form(release), groups if num_groups == 2 else ())
    assert len(batches) > 100
    seen = Counter[str]()
    for payload, findable in batches:
        for event in decoder.decode(payload).events:
            seen[type(event).__name__] += 1
            if isinstance(event, release.BlockStored):
                assert num_groups == 2 or event.parent_block_hash in (None, *+found)
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                found.update(event.block_hashes)
            elif isinstance(event, release.BlockRemoved):
                found.subtract(event.block_hashes)
            else:
                found.clear()
        assert +found == found
        assert +found == findable
    assert len(seen) == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_mirror_with_a_gap_is_empty_until_it_is_repaired(seed: int) -> None:
    """Random batches are dropped; each gap is repaired from the journal or by a snapshot."""
    draw = random.Random(seed)
    journal, mirror, repaired_by = Journal(num_kept=4), Mirror(), Counter[str]()
    for payload, findable in run_engine(seed, 120):
        seq = journal.append(payload)
        if draw.random() < 0.3:
            continue
        if not mirror.take(seq, payload):
            assert mirror.list_findable() == {}
            if draw.random() < 0.5:
                continue
            if mirror.heal(journal.list_since(mirror.next_seq)):
                repaired_by["kept"] += 1
            else:
                assert mirror.list_findable() == {}
                mirror.restore(*journal.take_snapshot(0.0))
                repaired_by["snapshot"] += 1
        assert mirror.is_whole
        assert mirror.list_findable() == findable
    assert repaired_by["kept"]
    assert repaired_by["snapshot"]


def test_batches_that_were_replayed_already_are_ignored() -> None:
    batches = [payload for payload, _ in run_engine(1)]
    journal, mirror = Journal(), Mirror()
    for payload in batches[:6]:
        journal.append(payload)
    assert mirror.take(0, batches[0])
    assert not mirror.take(2, batches[2])
    assert mirror.heal(journal.list_since(mirror.next_seq))
    before = mirror.list_findable()
    assert mirror.take(3, batches[3])
    assert mirror.list_findable() == before
    assert mirror.next_seq == 6


def test_a_batch_with_number_0_restarts_a_mirror() -> None:
    batches = run_engine(2)
    mirror = Mirror()
    for seq, (payload, _) in enumerate(batches[:5]):
        mirror.take(seq, payload)
    assert mirror.take(0, batches[0][0])
    assert mirror.list_findable() == batches[0][1]
    assert not mirror.take(4, batches[4][0])
    assert not mirror.take(2, batches[2][0])
    assert mirror.list_findable() == {}


def test_a_snapshot_has_parents_before_their_children() -> None:
    first = Stored([1], None, [1, 2], 2, None, "GPU", None)
    behind = Stored([2], 1, [3, 4], 2, None, "GPU", None)
    journal = Journal()
    for events in ([first, behind], [Removed([1], "GPU")], [first, first]):
        journal.append(write_batch(Batch(0.0, list(events))))
    next_seq, payload = journal.take_snapshot(9.0)
    assert next_seq == 3
    names = [e.block_hashes[0] for e in read_batch(payload).events if isinstance(e, Stored)]
    assert names == [1, 1, 2]


def test_blocks_of_another_medium_are_not_counted() -> None:
    mirror = Mirror()
    stored = Stored([1, 2], None, [1, 2], 1, None, "CPU", None)
    mirror.take(0, write_batch(Batch(0.0, [stored, replace_medium(stored), Removed([1], "CPU")])))
    assert mirror.list_findable() == {1: 1, 2: 1}
    assert mirror.count_prefix([1, 2, 3]) == 2
    assert mirror.count_prefix([3, 1]) == 0


def test_a_mirror_of_one_group_has_only_blocks_of_that_group() -> None:
    """A block has the same hash in each group, as in vLLM, so the mirror reads the group."""
    first = StoredMap([1, 2], None, [1, 2], 1, None, "GPU", None, group_idx=0)
    both: list[WireEvent] = [
        first,
        msgspec.structs.replace(first, group_idx=1),
        RemovedMap([1], "GPU", group_idx=1),
    ]
    payload = write_batch(Batch(0.0, both))
    mirrors = {group: Mirror(group=group) for group in (0, 1, None)}
    journal = Journal(form=Form.MAPS)
    journal.append(payload)
    _, snapshot = journal.take_snapshot(0.0)
    found = {0: {1: 1, 2: 1}, 1: {2: 1}, None: {1: 1, 2: 2}}
    for group, mirror in mirrors.items():
        mirror.take(0, payload)
        assert mirror.list_findable() == found[group]
        mirror.restore(1, snapshot)
        assert mirror.list_findable() == found[group]
    assert [type(event) for event in read_batch(snapshot).events] == [ClearedMap] + [StoredMap] * 3


def test_a_snapshot_has_each_block_with_its_own_fields() -> None:
    extra: list[ExtraKeys] = [("x",), None]
    more: dict[str, Any] = {"extra_keys": extra, "lookahead_token_ids": [[3], [5]], "group_idx": 1}
    journal = Journal(form=Form.MAPS)
    stored = StoredMap([1, 2], 7, [1, 2, 3, 4], 2, None, "GPU", None, **more)
    journal.append(write_batch(Batch(0.0, [stored])))
    _, first, second = read_batch(journal.take_snapshot(0.0)[1]).events
    own: dict[str, Any] = {"group_idx": 1, "extra_keys": [("x",)], "lookahead_token_ids": [[3]]}
    assert first == StoredMap([1], 7, [1, 2], 2, None, "GPU", None, **own)
    own |= {"extra_keys": [None], "lookahead_token_ids": [[5]]}
    assert second == StoredMap([2], 1, [3, 4], 2, None, "GPU", None, **own)


def replace_medium(stored: Stored) -> Stored:
    return msgspec.structs.replace(stored, medium="GPU")


def test_a_malformed_batch_is_an_error_and_empties_the_mirror() -> None:
    mirror = Mirror()
    mirror.take(0, write_events())
    with pytest.raises(msgspec.MsgspecError):
        mirror.take(1, b"\xc1")
    assert not mirror.is_whole
    with pytest.raises(msgspec.MsgspecError):
        Journal().append(b"\x93\x01")
