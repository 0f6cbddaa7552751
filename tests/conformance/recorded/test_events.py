"""Streams of KV events: cached blocks, contradictions, and indexes that are wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.recorded.index import IndexJudge, ProcessIndex, load_index
from blockstep.conformance.recorded.stream import (
    Batch,
    Follower,
    KVRecord,
    StreamError,
    parse_batch,
    read_dump,
    read_message,
    write_line,
)
from blockstep.impl.serving.sockets import Publisher

A, B, C, D = 17, 18, 19, 20
STORE_AB = ["BlockStored", [A, B], None, [1, 2, 3, 4], 2, None, "GPU"]
STORE_C = {
    "type": "BlockStored",
    "block_hashes": [C],
    "parent_block_hash": B,
    "token_ids": [5, 6],
    "block_size": 2,
}
REMOVE_B = ["BlockRemoved", [B], "GPU"]


def batches(*events: Any, start: int = 0) -> list[Batch]:
    """One batch for each event."""
    return [parse_batch([0.5, [event], None], seq) for seq, event in enumerate(events, start)]


def follow(*events: Any) -> Follower:
    follower = Follower()
    for batch in batches(*events):
        follower.take(batch)
    return follower


def write_dump(path: Path, found: Sequence[Batch]) -> str:
    path.write_bytes(b"".join(map(write_line, found)))
    return str(path)


def run(*given: str) -> Result:
    return CliRunner().invoke(app, ["events", *given])


# Reading.


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [A], None, [1, 2], 2, None],  # vLLM 0.9, SGLang
        ["BlockStored", [A], None, [1, 2], 2, None, "GPU"],
        ["BlockStored", [A], None, [1, 2], 2, None, "GPU", "lora"],
        ["BlockStored", [A], None, [1, 2], 2, None, "GPU", None, [None]],
        {"type": "BlockStored", "block_hashes": [A], "token_ids": [1, 2], "block_size": 2},
        {"type": "BlockStored", "block_hashes": [A], "token_ids": [1, 2], "block_size": 2,
            "parent_block_hash": None, "group_idx": None, "field_of_tomorrow": 3},
    ],
)  # fmt: skip
def test_every_format_of_an_event_is_read_as_the_same_event(event: Any) -> None:
    (record,) = parse_batch([1, [event]], 0).events
    assert record in (
        KVRecord("BlockStored", (A,), None, (1, 2), 2, "GPU"),
        KVRecord("BlockStored", (A,), None, (1, 2), 2, None),
    )
    assert follow(event).count_found([A]) == 1


def test_block_hashes_that_are_bytes_are_read_from_msgpack() -> None:
    payload = msgspec.msgpack.encode([1.5, [["BlockRemoved", [b"\x0a\xff"], None]], 3])
    batch = read_message(payload, 7)
    assert (batch.seq, batch.rank, batch.ts) == (7, 3, 1.5)
    assert batch.events == (KVRecord("BlockRemoved", ("0aff",)),)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (7, "a batch is"),
        ([1.0, "x"], "a batch is"),
        ([1.0, [7]], "names its type"),
        ([1.0, [[7]]], "names its type"),
        ([1.0, [], "rank"], "data_parallel_rank"),
        ([1.0, [["BlockStored", [A], None]]], "BlockStored without token_ids"),
        ([1.0, [["BlockRemoved", 3]]], "not iterable"),
        ([1.0, [["BlockRemoved", [1.5]]]], "block hash 1.5"),
        ([1.0, [["BlockStored", [A], None, ["x"], 2]]], "Expected `int`, got `str`"),
    ],
)
def test_a_message_that_is_no_batch_is_refused(raw: Any, words: str) -> None:
    with pytest.raises(StreamError) as caught:
        parse_batch(raw, 0)
    assert words in str(caught.value)
    with pytest.raises(StreamError):
        read_message(msgspec.msgpack.encode(raw)[:-1], 0)


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = batches(STORE_AB, STORE_C, REMOVE_B, ["AllBlocksCleared"])
    path = tmp_path / "dump"
    write_dump(path, found)
    assert list(read_dump(path)) == found
    path.write_text('{"seq": 0, "events": [7]}\n')
    with pytest.raises(TraceError, match=":1: "):
        list(read_dump(path))


# Following.


def test_a_block_is_cached_from_its_storing_to_its_removal() -> None:
    follower = follow(STORE_AB, STORE_C)
    assert follower.count_found([A, B, C, D]) == 3
    assert follower.get_chain((0, C)) == [A, B, C]
    for batch in batches(REMOVE_B, start=2):
        follower.take(batch)
    assert follower.count_found([A, B, C]) == 1
    assert follower.num_contradictions == 0
    assert (follower.num_cached_peak, len(follower.blocks)) == (3, 2)


def test_a_block_is_cached_until_each_copy_was_removed() -> None:
    follower = follow(STORE_AB, STORE_AB, REMOVE_B)
    assert follower.count_found([A, B]) == 2
    assert follow(STORE_AB, STORE_AB, REMOVE_B, REMOVE_B).count_found([A, B]) == 1


def test_media_and_groups_are_kept_apart() -> None:
    on_cpu = {**STORE_C, "block_hashes": [A], "parent_block_hash": None, "medium": "CPU"}
    follower = follow(STORE_AB, on_cpu | {"token_ids": [1, 2]}, ["BlockRemoved", [A], "GPU"])
    assert follower.count_found([A]) == 1
    other = follow(STORE_AB, {"type": "BlockRemoved", "block_hashes": [A], "group_idx": 1})
    assert (other.count_found([A]), other.num_contradictions) == (1, 1)


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([REMOVE_B], "removed_block_was_stored"),
        ([STORE_AB, REMOVE_B, REMOVE_B], "removed_block_was_stored"),
        ([STORE_AB, ["BlockRemoved", [A], "CPU"]], "removed_block_was_stored"),
        ([STORE_C], "parent_was_stored_before"),
        ([["BlockStored", [A], None, [1, 2, 3], 2, None]], "stored_tokens_fill_the_blocks"),
        ([STORE_AB, ["BlockStored", [A], None, [7, 8], 2, None, "GPU"]], "hash_names_one_content"),
        ([STORE_AB, ["AllBlocksCleared"], STORE_C], "parent_was_stored_before"),
    ],
)
def test_contradictions_have_names(events: list[Any], name: str) -> None:
    follower = follow(*events)
    assert [one.name for one in follower.contradictions] == [name]


def test_a_gap_excuses_contradictions_until_all_blocks_are_cleared() -> None:
    follower = Follower()
    for batch in (*batches(STORE_AB), *batches(REMOVE_B, ["BlockRemoved", [D]], start=4)):
        follower.take(batch)
    assert (follower.gaps, follower.num_contradictions) == ([(1, 3)], 0)
    for batch in batches(["AllBlocksCleared"], ["BlockRemoved", [A]], start=6):
        follower.take(batch)
    assert follower.num_contradictions == 1


def test_a_restart_of_the_stream_clears_all_blocks() -> None:
    follower = Follower()
    for batch in (*batches(STORE_AB, STORE_C), *batches(STORE_AB)):
        follower.take(batch)
    assert follower.restarts == [0]
    assert follower.count_found([A, B, C]) == 2


def test_a_stream_that_is_joined_late_begins_with_a_gap() -> None:
    follower = Follower()
    for batch in batches(STORE_C, start=5):
        follower.take(batch)
    assert (follower.gaps, follower.num_contradictions) == ([(0, 4)], 0)


def test_unknown_types_are_counted_by_name() -> None:
    follower = follow(STORE_AB, ["BlockTransferred", [A]], {"type": "Heartbeat"})
    assert follower.unknown == {"BlockTransferred": 1, "Heartbeat": 1}
    assert follower.count_found([A, B]) == 2


# Indexes.


class GoodIndex:
    """An index that counts copies."""

    def __init__(self) -> None:
        self.copies: Counter[Any] = Counter()

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.copies.clear()
                case "BlockStored":
                    self.copies.update(event["block_hashes"])
                case "BlockRemoved":
                    self.copies.subtract(event["block_hashes"])

    def lookup(self, block_hashes: Sequence[Any]) -> int:
        found = 0
        for one in block_hashes:
            if self.copies[one] < 1:
                break
            found += 1
        return found


class SetIndex(GoodIndex):
    """An index that forgets a block with its first copy, as a set does."""

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        super().apply(events)
        for event in events:
            if event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self.copies[one] = 0


class DeafIndex(GoodIndex):
    """An index that ignores `AllBlocksCleared`."""

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        super().apply([event for event in events if event["type"] != "AllBlocksCleared"])


class BrokenIndex(GoodIndex):
    """An index that fails."""

    def lookup(self, block_hashes: Sequence[Any]) -> int:
        raise KeyError(block_hashes[0])


STORY = (STORE_AB, STORE_AB, STORE_C, REMOVE_B, ["AllBlocksCleared"], STORE_AB)


def judge(index: Any, *events: Any) -> Any:
    judged = IndexJudge(index, Follower(), num_lookups=4, seed=1)
    return next(filter(None, map(judged.take, batches(*events))), None)


def test_a_right_index_has_no_finding() -> None:
    assert judge(GoodIndex(), *STORY) is None


def test_an_index_is_notified_of_a_restart() -> None:
    judged = IndexJudge(GoodIndex(), Follower(), num_lookups=4, seed=1)
    stream = (*batches(STORE_AB, STORE_C), *batches(["BlockStored", [D], None, [1, 2], 2, None]))
    assert [judged.take(batch) for batch in stream] == [None] * 3
    deaf = IndexJudge(DeafIndex(), Follower(), num_lookups=4, seed=1)
    assert [lie.seq for batch in stream if (lie := deaf.take(batch)) is not None] == [0]


def test_an_index_that_counts_no_copies_is_found() -> None:
    lie = judge(SetIndex(), *STORY)
    assert (lie.seq, lie.expected, lie.seen) == (3, 2, 1)
    assert lie.block_hashes[:2] == (A, B)


def test_an_index_that_ignores_clearing_is_found() -> None:
    store = ["BlockStored", [A], None, [1, 2], 2, None, "GPU"]
    lie = judge(DeafIndex(), STORE_AB, STORE_C, ["AllBlocksCleared"], store, STORE_AB, REMOVE_B)
    assert lie is not None


def test_an_index_that_raises_is_found() -> None:
    assert "KeyError" in judge(BrokenIndex(), *STORY).seen


PROCESS_INDEX = """
import json, sys
known = set()
for line in sys.stdin:
    row = json.loads(line)
    if row["type"] == "Events":
        for event in row["events"]:
            known.update(event.get("block_hashes", []) if event["type"] == "BlockStored" else [])
        print(json.dumps({"type": "Ok"}), flush=True)
    else:
        count = 0
        for one in row["block_hashes"]:
            if one not in known: break
            count += 1
        print(json.dumps({"type": "Found", "num_blocks": count}), flush=True)
"""


def test_an_index_in_another_process_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "index.py"
    script.write_text(PROCESS_INDEX)
    index = load_index(f"cmd:{sys.executable} {script}")
    assert isinstance(index, ProcessIndex)
    try:
        lie = judge(index, STORE_AB, REMOVE_B)
    finally:
        index.close()
    assert (lie.expected, lie.seen) == (1, 2)


# The command.


def test_the_command_prints_counts_of_cached_blocks(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d.jsonl", batches(*STORY))
    result = run(dump, "--index", f"{__name__}:GoodIndex", "--json", "-")
    counts = json.loads(result.stdout)
    assert (result.exit_code, counts["cached"], counts["cached_peak"]) == (0, 2, 3)
    assert counts["lookups"] > 0
    wrong = run(dump, "--index", f"{__name__}:SetIndex")
    assert wrong.exit_code == 1
    assert "  expected  2 leading blocks, seen 1" in wrong.output.splitlines()


def test_gaps_restarts_and_contradictions_are_printed(tmp_path: Path) -> None:
    found = [
        *batches(STORE_AB),
        *batches(REMOVE_B, start=3),
        *batches(STORE_AB, REMOVE_B, REMOVE_B),
    ]
    result = run(write_dump(tmp_path / "d", found))
    assert result.exit_code == 1
    for words in ("messages 1 to 2 are missing", "message 0 is numbered", "removed_block"):
        assert words in result.output


def test_one_command_reports_all_mistakes_of_a_stream_and_its_index(tmp_path: Path) -> None:
    """A gap, a restart, an event of an unknown type, and an index that forgets a copy."""
    found = [
        *batches(STORE_AB, {"type": "BlockUpdated", "block_hashes": [A]}),
        *batches(STORE_C, start=4),
        *batches(STORE_AB, STORE_AB, REMOVE_B),
    ]
    path = tmp_path / "d.jsonl"
    rows = [json.loads(write_line(batch)) for batch in found]
    rows[1]["events"] = [{"type": "BlockUpdated", "block_hashes": [A]}]  # a dump of another tool
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(str(path), "--index", f"{__name__}:SetIndex")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    for line in (
        "gap         messages 2 to 3 are missing",
        "restart     message 0 is numbered as an earlier one",
        "unknown     1 event of the type BlockUpdated, without effect here",
        f"WRONG INDEX {__name__}:SetIndex after message 2: lookup of 2 blocks",
        "  chain     17, 18",
        "  expected  2 leading blocks, seen 1",
    ):
        assert line in lines, result.output


def test_bad_input_is_a_usage_error(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d", batches(STORE_AB))
    for given in (
        [str(tmp_path / "no")],
        [dump, "--index", "no_such_module:Index"],
        [dump, "--index", "json:dumps"],
        [dump, "--index", "cmd:"],
        [dump, "--index", "cmd:./no-such-index"],
        ["tcp://nowhere:x", "--seconds", "1"],
    ):
        assert run(*given).exit_code == 2, given
    empty = tmp_path / "e"
    empty.write_text("")
    assert run(str(empty)).exit_code == 5
    ranks = [parse_batch([0, [], rank], 0) for rank in (0, 1)]
    several = write_dump(tmp_path / "r", ranks)
    assert "--rank" in run(several).output
    assert run(several, "--rank", "1").exit_code == 0
    with pytest.raises(UsageError):
        load_index("json:loads")


def pack(hashes: list[int], tokens: list[int]) -> bytes:
    event = ["BlockStored", hashes, None, tokens, 2, None, "GPU", None, None]
    return msgspec.msgpack.encode([0.5, [event], None])


def test_a_live_stream_is_followed_and_earlier_messages_are_replayed(tmp_path: Path) -> None:
    save = tmp_path / "saved.jsonl"
    stream, replay = (f"ipc://{tmp_path}/{name}" for name in ("stream", "replay"))
    with Publisher(stream, replay) as publisher:
        publisher.publish(pack([A, B], [1, 2, 3, 4]))  # before the command listens
        is_done = threading.Event()

        def serve() -> None:
            number = 0
            while not is_done.is_set():
                publisher.answer()
                if number < 40:
                    publisher.publish(pack([100 + number], [1, 2]))
                    number += 1
                time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            result = run(
                stream, "--replay", replay, "--seconds", "1.5", "--save", str(save), "--json", "-"
            )
        finally:
            is_done.set()
            thread.join()
    counts = json.loads(result.stdout)
    assert (counts["gaps"], counts["num_contradictions"]) == ([], 0)
    assert counts["cached"] >= 3
    assert len(list(read_dump(save))) == counts["batches"]
