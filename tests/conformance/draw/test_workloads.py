"""Workloads: published formats are read as requests whose prompts share tokens as their ids do."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_traces import find_trace
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.draw.workloads import (
    OUTPUT_TOKENS_START,
    Follows,
    Workload,
    WorkloadFormat,
    load,
)
from blockstep.conformance.recorded.arrival_rate import REPLAY_PRESETS
from blockstep.conformance.recorded.replay import replay
from blockstep.conformance.recorded.traces import TraceError
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Submit, event_problem

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
CONFIG = REPLAY_PRESETS[WorkloadFormat.AZURE].config


def mooncake(ids: list[int], length: int, output: int = 3, time: int = 0) -> dict[str, object]:
    return {"timestamp": time, "input_length": length, "output_length": output, "hash_ids": ids}


def agent(
    ids: list[int], length: int, output: int = 3, time: int = 0, suite: str = "s"
) -> dict[str, object]:
    return {
        "suite": suite,
        "session": "1",
        "timestamp_us": time,
        "input_length": length,
        "output_length": output,
        "hash_ids": ids,
    }


def jsonl(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(*rows: str) -> str:
    return "".join(f"{row}\r\n" for row in (AZURE_HEADER, *rows))


def loaded(folder: Path, text: str, **options: Any) -> Workload:
    path = folder / "w"
    path.write_text(text)
    return load(path, **options)


def read(folder: Path, text: str, **options: Any) -> Workload:
    """Load a text with a tokenizer."""
    return loaded(folder, text, tokenize=words, **options)


def agree(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading tokens two prompts share."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


MOONCAKE = jsonl(mooncake([0, 1], 600), mooncake([0, 2, 3], 1536, time=7))
AGENT = jsonl(agent([0, 1], 40), agent([0, 1, 2], 48, time=9_999), agent([0], 32, suite="t"))
AZURE = csv("2023-11-16 18:17:03.9799600,20,10", "2023-11-16 18:17:04.0319600,3,8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MOONCAKE, WorkloadFormat.MOONCAKE),
        (AGENT, WorkloadFormat.AGENT),
        (AZURE, WorkloadFormat.AZURE),
    ],
)
def test_the_format_is_detected_by_content_and_gzip_by_its_magic(
    tmp_path: Path, text: str, expected: WorkloadFormat
) -> None:
    plain, zipped = tmp_path / "a.gz", tmp_path / "b.txt"
    plain.write_text(text)
    zipped.write_bytes(gzip.compress(text.encode()))
    one, other = load(plain), load(str(zipped), as_format=expected)
    assert one.format is other.format is expected
    assert list(one) == list(other) == list(one)
    twice = tmp_path / "c"
    twice.write_bytes(gzip.compress(text[:99].encode()) + gzip.compress(text[99:].encode()))
    assert list(load(twice)) == list(one), "a gzip file may have several members"
    assert len(one) == len(list(one))
    assert all(event_problem(Submit(request)) is None for request in one)


def test_a_named_format_that_is_not_the_file_s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    for text, wrong in ((MOONCAKE, "agent"), (AGENT, "azure"), (AZURE, "mooncake")):
        path.write_text(text)
        with pytest.raises(TraceError) as caught:
            load(path, as_format=WorkloadFormat(wrong))
        assert caught.value.line == 1


def test_requests_have_the_lengths_times_and_ids_of_the_file(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, MOONCAKE)
    assert (first.request_id, second.request_id) == ("r0", "r1")
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (600, 1536)
    assert (first.arrival_time, second.arrival_time) == (0, 7)
    assert first.max_tokens == 3
    assert first.eos_token_id is None


def test_azure_times_are_parsed_to_milliseconds(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, AZURE)
    assert (first.arrival_time, second.arrival_time) == (0, 52)
    assert agree(first.prompt_token_ids, second.prompt_token_ids) == 0
    rows = ("2023-12-31 23:59:59,1,1", "2024-01-01 00:00:00.25+00:00,1,1")
    assert [r.arrival_time for r in loaded(tmp_path, csv(*rows))] == [0, 1250]


def test_requests_are_ordered_by_arrival_then_by_place_in_the_file(tmp_path: Path) -> None:
    times = [5_000, 2_000, 5_000, 2_999]
    rows = [agent([], 1, time=time) for time in times]
    requests = list(loaded(tmp_path, jsonl(*rows)))
    assert [r.request_id for r in requests] == ["r1", "r3", "r0", "r2"]
    assert [r.arrival_time for r in requests] == [0, 0, 3, 3]


def test_block_ids_are_shared_within_a_suite_only(tmp_path: Path) -> None:
    rows = [agent([0], 16), agent([0], 16, suite="t"), agent([0], 16)]
    one, other, again = (r.prompt_token_ids for r in loaded(tmp_path, jsonl(*rows)))
    assert agree(one, again) == 16
    assert agree(one, other) == 0


def test_tokens_without_an_id_are_shared_with_no_other_request(tmp_path: Path) -> None:
    rows = [agent([0, 1], 47), agent([0, 1], 47), agent([0], 32), agent([0, 1], 32)]
    one, other, short, whole = (r.prompt_token_ids for r in loaded(tmp_path, jsonl(*rows)))
    assert agree(one, other) == 32
    assert agree(one, whole) == 32
    assert agree(short, whole) == 16, "a last block left out may be anything"


def test_a_request_without_output_still_samples_once(tmp_path: Path) -> None:
    (request,) = loaded(tmp_path, jsonl(agent([], 3, output=0)))
    assert request.max_tokens == 1


id_lists = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    one=id_lists,
    other=id_lists,
    cuts=st.tuples(st.integers(0, 511), st.integers(0, 511)),
    size=st.sampled_from([1, 3, 8, 16, 32, 48, 500, 512, 1024]),
)
def test_prompts_share_exactly_the_tokens_of_their_common_ids(
    one: list[int],
    other: list[int],
    cuts: tuple[int, int],
    size: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    lengths = [len(ids) * 512 - cut for ids, cut in zip((one, other), cuts, strict=True)]
    rows = [mooncake(ids, n) for ids, n in zip((one, other), lengths, strict=True)]
    requests = list(loaded(tmp_path_factory.mktemp("w"), jsonl(*rows)))
    left, right = (request.prompt_token_ids for request in requests)
    common = next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    expected = min(common * 512, *lengths)
    assert agree(left, right) == expected
    # What an engine with blocks of `size` finds is the same, chained or (from 16 up) unchained.
    shared = agree_in_blocks(left, right, size)
    assert shared == expected // size
    assert max(left + right) < OUTPUT_TOKENS_START
    if size % 16 == 0:
        unchained = set(blocks(left[expected:], size)) & set(blocks(right[expected:], size))
        assert not unchained or set(one[common:]) & set(other[common:])


def blocks(tokens: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]


def agree_in_blocks(one: tuple[int, ...], other: tuple[int, ...], size: int) -> int:
    pairs = zip(blocks(one, size), blocks(other, size), strict=False)
    shorter = min(len(one), len(other)) // size
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def test_nothing_is_read_after_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text(MOONCAKE + "junk\n")
    whole = load(path, limit=2)
    assert len(whole) == 2
    assert list(load(path, limit=1)) == [whole.request(whole.rows[0])]
    with pytest.raises(TraceError) as caught:
        load(path)
    assert caught.value.line == 3
    with pytest.raises(ValueError, match="limit"):
        load(path, limit=0)


def changed(**fields: object) -> str:
    row = mooncake([0], 5) | fields
    return MOONCAKE + jsonl({k: v for k, v in row.items() if v is not ...})


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    for text in (MOONCAKE, csv("2023-11-16 18:17:03.9799600,4808,10")):
        assert read(tmp_path, "\ufeff" + text).rows == read(tmp_path, text).rows


@pytest.mark.parametrize("text", [MOONCAKE + "\n", csv("2023-11-16 18:17:03.9799600,9,1") + " \n"])
def test_an_empty_line_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="3: an empty line: every line is one row"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        pytest.param(b"", 0, id="empty"),
        pytest.param(b"\n", 1, id="blank"),
        pytest.param(csv().encode(), 0, id="header only"),
        pytest.param(bytes(range(128, 256)) * 9, 1, id="junk"),
        pytest.param(b"\0" * 999, 1, id="zeros"),
        pytest.param(MOONCAKE.encode("utf-16"), 1, id="utf-16"),
        pytest.param(MOONCAKE.encode() + b'{"\xff', 3, id="not utf-8"),
        pytest.param(b"\x1f\x8bjunk", 1, id="no gzip"),
        pytest.param(gzip.compress(b""), 0, id="empty gzip"),
        pytest.param(b"hello, world\n", 1, id="text"),
        pytest.param(b"[1, 2]\n", 1, id="a list"),
        pytest.param(b'{"format":"blockstep-trace","version":1}\n', 1, id="a recorded run"),
        pytest.param(b"time,in,out\n1,2,3\n", 1, id="another csv"),
        pytest.param(b"[" * 99_999, 1, id="deep"),
        pytest.param((MOONCAKE + AGENT).encode(), 3, id="two formats"),
        pytest.param((MOONCAKE + "\n" + MOONCAKE).encode(), 3, id="blank line"),
        pytest.param(MOONCAKE[:-9].encode(), 2, id="cut"),
        pytest.param(changed(output_length=...).encode(), 3, id="missing"),
        pytest.param(changed(more=1).encode(), 3, id="unknown"),
        pytest.param(changed(input_length=-1).encode(), 3, id="negative"),
        pytest.param(changed(input_length=2**31).encode(), 3, id="too long"),
        pytest.param(changed(timestamp="1").encode(), 3, id="string"),
        pytest.param(changed(timestamp=2**70).encode(), 3, id="wide"),
        pytest.param(changed(timestamp=2**40).encode(), 3, id="too late"),
        pytest.param(changed(output_length=True).encode(), 3, id="bool"),
        pytest.param(changed(hash_ids=None).encode(), 3, id="null"),
        pytest.param(changed(hash_ids=[-1]).encode(), 3, id="negative id"),
        pytest.param(changed(hash_ids=["a"]).encode(), 3, id="named id"),
        pytest.param(changed(hash_ids=[]).encode(), 3, id="too few ids"),
        pytest.param(changed(hash_ids=[1, 2]).encode(), 3, id="too many ids"),
        pytest.param(jsonl(agent([], 32)).encode(), 1, id="agent: too few ids"),
        pytest.param(jsonl(agent([0, 1, 2], 40)).encode(), 1, id="agent: too many ids"),
        pytest.param(csv("2023-11-16 18:17:03,1").encode(), 2, id="csv: missing"),
        pytest.param(csv("2023-11-16 18:17:03,1,2,3").encode(), 2, id="csv: extra"),
        pytest.param(csv("2023-11-16 18:17:03,-1,2").encode(), 2, id="csv: negative"),
        pytest.param(csv("2023-11-16 18:17:03,1.5,2").encode(), 2, id="csv: float"),
        pytest.param(csv("2023-02-30 18:17:03,1,2").encode(), 2, id="csv: no such day"),
        pytest.param(csv("2023-11-16 24:17:03,1,2").encode(), 2, id="csv: no such hour"),
        pytest.param(csv("0000-11-16 18:17:03,1,2").encode(), 2, id="csv: no such year"),
        pytest.param(csv("18:17:03,1,2").encode(), 2, id="csv: no day"),
        pytest.param(csv("2023-11-16 18:17:03,9999999999,2").encode(), 2, id="csv: too long"),
        pytest.param(csv("2023-11-16 18:17:03,\u0661,2").encode(), 2, id="csv: other digits"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_with_its_line(
    tmp_path: Path, data: bytes, line: int
) -> None:
    path = tmp_path / "w"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load(path)
    error = caught.value
    assert error.line == line
    assert error.path == path
    assert all((error.found, error.rule, error.fix))
    assert str(error).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def test_a_truncated_gzip_is_refused_with_the_line_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "w.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode() * 50)[:-8])
    with pytest.raises(TraceError, match="breaks off") as caught:
        load(path)
    assert caught.value.line == 101
    assert len(load(path, limit=3)) == 3, "what comes before the break can be read"


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_without_end_does_not_fill_the_memory(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockstep.conformance.protocol.trace_lines.LINE_BYTES_MAX", 1 << 18)
    path = tmp_path / "w"
    data = b" " * (1 << 20)
    path.write_bytes(gzip.compress(data) if zipped else data)
    with pytest.raises(TraceError, match="without a line end"):
        load(path)
    path.write_bytes(MOONCAKE.encode() + b" " * (1 << 17) + MOONCAKE.encode())
    assert len(load(path)) == 4, "lines may be longer than what is read at once"


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no", "a\0b"):
        with pytest.raises(TraceError, match="cannot be read") as caught:
            load(path)
        assert caught.value.line == 0


def test_calls_of_a_session_follow_each_other_after_tool_times(tmp_path: Path) -> None:
    calls = [
        {"input_toks": 4, "output_toks": 1, "tool_duration_ns": 5_000_000},
        {"input_toks": 6, "output_toks": 2, "tool_duration_ns": 0},
    ]
    row = {"arrival_time_ns": 3_000_000, "sub_requests": calls}
    flat = {"input_toks": 2, "output_toks": 1, "arrival_time_ns": 1_000_000}
    workload = loaded(tmp_path, jsonl(row, flat))
    assert workload.follows == {"r1": Follows(("r0",), 5)}
    assert [(row.row, row.arrival_time) for row in workload.rows] == [(2, 0), (0, 2), (1, 2)]


def test_the_size_of_blocks_with_ids_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text(jsonl(mooncake([0, 1], 100), mooncake([0, 2], 128)))
    with pytest.raises(TraceError, match="blocks of 512 make 1"):
        load(path)
    one, other = load(path, id_block_size=64)
    assert agree(one.prompt_token_ids, other.prompt_token_ids) == 64
    path.write_text(AZURE)
    with pytest.raises(TraceError, match="only for a format with block ids"):
        load(path, id_block_size=64)


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 144_793_823),
        ("azure_2023_code.csv", 8_819, 18_059_974),
        ("agent_blocks16.jsonl.gz", 1_619, 3_972_460),
    ],
)
def test_the_published_traces_load(name: str, requests: int, prompt_tokens: int) -> None:
    workload = load(find_trace(name))
    assert len(workload) == requests
    assert sum(row.input_length for row in workload.rows) == prompt_tokens
    times = [row.arrival_time for row in workload.rows]
    assert times == sorted(times)
    assert times[0] == 0
    for row in workload.rows[:: max(requests // 50, 1)]:
        assert len(workload.request(row).prompt_token_ids) == row.input_length


# A made sample of each published format, with numbers that were counted by hand.


def lengths(tokens: int, output: int, **more: Any) -> dict[str, Any]:
    return {"input_length": tokens, "output_length": output, **more}


def words(text: str) -> list[int]:
    """A tokenizer: one token for each word."""
    return [sum(map(ord, word)) for word in text.split()]


def end(at: int, name: str, tokens: int, hashes: list[int], output: int) -> dict[str, Any]:
    """A record of Dynamo's request trace."""
    replayed = {
        "trace_block_size": 16,
        "input_length": tokens,
        "input_sequence_hashes": hashes,
        "completion_sequence_hashes": None,
    }
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at + 900,
        "event_source": "dynamo",
        "agent_context": {"session_id": name, "parent_session_id": None},
        "request": {
            "request_id": f"{name}{at}",
            "model": "m",
            "input_tokens": tokens,
            "output_tokens": output,
            "request_received_ms": at,
            "total_time_ms": 900.5,
            "replay": replayed,
        },
    }


TOOL = {"event_type": "tool_end", "event_time_unix_ms": 5, "tool": {"tool_call_id": "c"}}
TOOL |= {"schema": "dynamo.request.trace.v1"}
HASH = 2**64 - 1
TEN = "one two three four five six seven eight nine ten "
CONVERSATION = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "human", "value": TEN + TEN},
        {"from": "gpt", "value": "a b c"},
        {"from": "human", "value": "what now"},
        {"from": "gpt", "value": TEN},
    ],
}
ENDS_WITH_A_QUESTION = {
    "id": "x",
    "conversations": [
        {"from": "gpt", "value": "left over"},
        {"from": "human", "value": "and?"},
    ],
}

SAMPLES: dict[str, tuple[str, str, tuple[int, int, int, int]]] = {
    # Format, text; then counted by hand: requests, prompt tokens, output tokens, tokens hit.
    # 600 equal tokens are 37 blocks of 16, of which a prompt of 600 tokens may hit 37 (592); the
    # third prompt has one id of 512 tokens in common.
    "mooncake": (
        "mooncake",
        jsonl(
            lengths(600, 3, timestamp=0, hash_ids=[0, 1]),
            lengths(600, 3, timestamp=27, hash_ids=[0, 1]),
            lengths(1536, 4, timestamp=30.25, hash_ids=[0, 2, 3]),
        ),
        (3, 2736, 10, 1104),
    ),
    "mooncake of AIPerf: sessions": (
        "mooncake",
        jsonl(
            lengths(1024, 4, session_id="a", hash_ids=[0, 1], type="mooncake_trace"),
            lengths(512, 1, session_id="b", hash_ids=[7], timestamp=70.5),
            lengths(1536, 2, session_id="a", hash_ids=[0, 1, 2], delay=500.9, priority=2),
        ),
        (3, 3072, 7, 1024),
    ),
    "mooncake of AIPerf: texts": (
        "mooncake",
        jsonl(
            {"text_input": TEN + TEN, "output_length": 2, "timestamp": 0},
            {"text_input": TEN + TEN + "more", "output_length": 3, "timestamp": 5},
        ),
        (2, 41, 5, 16),
    ),
    "qwen": (
        "qwen",
        jsonl(
            lengths(33, 4, chat_id=1, parent_chat_id=-1, timestamp=0.114, hash_ids=[1, 2, 3]),
            lengths(40, 4, chat_id=2, parent_chat_id=1, timestamp=1.5, turn=2, hash_ids=[1, 2, 4]),
            lengths(33, 1, chat_id=3, parent_chat_id=-1, timestamp=2.25, hash_ids=[1, 2, 3]),
        ),
        (3, 106, 9, 64),
    ),
    "dynamo": (
        "dynamo",
        jsonl(
            TOOL,
            end(1000, "s", 40, [HASH, 2, 3], 5),
            {"timestamp": 1, "event": end(2500, "s", 48, [HASH, 2, 4], 6)},
            {"timestamp": 2, "event": {"event_type": "request_payload"}},
        ),
        (2, 88, 11, 32),
    ),
    "agent": (
        "agent",
        jsonl(
            *(
                lengths(n, 2, suite=suite, session="1", timestamp_us=0, hash_ids=ids)
                for n, suite, ids in ((40, "s", [0, 1]), (48, "s", [0, 1, 2]), (32, "t", [0]))
            )
        ),
        (3, 120, 6, 32),
    ),
    "azure of 2023": (
        "azure",
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
            "2023-11-16 18:17:03.9799600,374,44\r\n2023-11-16 18:17:04.0319600,396,109"
        ),
        (2, 770, 153, 0),
    ),
    "azure of 2024": (
        "azure",
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
        ),
        (2, 4561, 11, 0),
    ),
    "burstgpt": (
        "burstgpt",
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
            "Log Type\n5,,1,ChatGPT,472,18,490,Conversation log\n45.5,7,2,GPT-4,1087,230,1317,API"
        ),
        (2, 1559, 248, 0),
    ),
    "servingsim: ShareGPT with token ids": (
        "servingsim",
        jsonl(
            {
                "input_toks": 20,
                "output_toks": 2,
                "arrival_time_ns": 2_000_000,
                "input_tok_ids": [*range(20)],
                "output_tok_ids": [1, 2],
            },
            {
                "input_toks": 17,
                "output_toks": 1,
                "arrival_time_ns": 4_999_999,
                "input_tok_ids": [*range(17)],
            },
        ),
        (2, 37, 3, 16),
    ),
    "servingsim: a session": (
        "servingsim",
        jsonl(
            {
                "arrival_time_ns": 3_000_000,
                "sub_requests": [
                    {"input_toks": 4, "output_toks": 1, "tool_duration_ns": 5_000_000},
                    {"input_toks": 6, "output_toks": 2, "tool_duration_ns": 0},
                ],
            }
        ),
        (2, 10, 3, 0),
    ),
    "vllm-bench": (
        "vllm-bench",
        json.dumps({"input_lens": [20, 3], "output_lens": [10, 0], "start_times": [9.25, 9.0]}),
        (2, 23, 11, 0),
    ),
    "vllm-custom": (
        "vllm-custom",
        jsonl({"prompt": TEN + TEN, "output_tokens": 4}, {"prompt": TEN + TEN, "output_tokens": 5}),
        (2, 40, 9, 16),
    ),
    # Prompts of 20 and of 20 + 3 + 2 words; the first reply has 3, the second 10.
    "sharegpt": ("sharegpt", json.dumps([CONVERSATION, ENDS_WITH_A_QUESTION]), (2, 45, 13, 16)),
    "sharegpt in lines": ("sharegpt", jsonl(CONVERSATION, CONVERSATION), (4, 90, 26, 48)),
    "sharegpt, indented": (
        "sharegpt",
        json.dumps([CONVERSATION, CONVERSATION], indent=2),
        (4, 90, 26, 48),
    ),
    "aiperf: single turn": (
        "aiperf",
        jsonl({"text": TEN, "output_length": 2}, {"texts": [TEN, "x"], "output_length": 2}),
        (2, 21, 4, 0),
    ),
    # The second prompt has the text of the first turn, too: 20, and 20 + 2 words.
    "aiperf: turns": (
        "aiperf",
        jsonl(
            {
                "session_id": "s",
                "turns": [
                    {"text": TEN + TEN, "output_length": 3, "timestamp": 5},
                    {"text": "go on", "output_length": 1, "delay": 200, "role": "user"},
                ],
            }
        ),
        (2, 42, 4, 16),
    ),
}


def count(workload: Workload) -> tuple[int, int, int, int]:
    """Replay, and return the numbers of requests, prompt, output and hit tokens."""
    config = replace(CONFIG, num_blocks=1000)
    report = replay(workload, config, HostEngine, follows=workload.follows)
    assert report.finding is None
    assert report.requests_finished == len(workload)
    return (
        report.requests_finished,
        report.tokens_prompt,
        report.tokens_output,
        report.tokens_prefix_hit,
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_recognized_and_has_the_numbers_counted_by_hand(
    tmp_path: Path, name: str
) -> None:
    expected, text, numbers = SAMPLES[name]
    workload = read(tmp_path, text)
    assert workload.format == expected
    assert count(workload) == numbers
    assert count(read(tmp_path, text, as_format=WorkloadFormat(expected))) == numbers


WHEN = {
    "qwen": ([0, 1386, 2136], [33, 40, 33]),
    "mooncake of AIPerf: sessions": ([0, 0, 70], [1024, 1536, 512]),
    "burstgpt": ([0, 40_500], [472, 1087]),
    "servingsim: ShareGPT with token ids": ([0, 2], [20, 17]),
    "vllm-bench": ([0, 250], [3, 20]),
}
"""Times at which requests arrive, and the lengths of their prompts."""


@pytest.mark.parametrize("name", WHEN)
def test_each_format_gives_arrival_times_and_lengths(tmp_path: Path, name: str) -> None:
    times, sizes = WHEN[name]
    workload = loaded(tmp_path, SAMPLES[name][1])
    assert [row.arrival_time for row in workload.rows] == times
    assert [len(request.prompt_token_ids) for request in workload] == sizes


def test_every_format_has_a_sample() -> None:
    sampled = {expected for expected, _, _ in SAMPLES.values()}
    assert {*WorkloadFormat} - sampled == {WorkloadFormat.TIMED_TRACE}  # it has to be named


def test_a_timed_trace_of_vllm_is_read_if_its_format_is_named(tmp_path: Path) -> None:
    text = jsonl(
        lengths(33, 4, timestamp=0.5, hash_ids=[1, 2, 3]),
        lengths(33, 4, timestamp=2, hash_ids=[1, 2, 3]),
    )
    workload = read(tmp_path, text, as_format=WorkloadFormat.TIMED_TRACE)
    assert [row.arrival_time for row in workload.rows] == [0, 1500]
    assert count(workload) == (2, 66, 8, 32)


def test_prompts_of_rows_without_ids_share_nothing(tmp_path: Path) -> None:
    rows = [lengths(100, 5, timestamp=at) for at in (0, 3)]
    workload = read(tmp_path, jsonl(*rows), as_format=WorkloadFormat.MOONCAKE)
    assert count(workload) == (2, 200, 10, 0)
    mixed = jsonl(*rows, lengths(100, 5, timestamp=9, hash_ids=[4]))
    with pytest.raises(TraceError, match="some rows have ids of the prompt's blocks"):
        read(tmp_path, mixed, as_format=WorkloadFormat.MOONCAKE)


AGENTIC = jsonl(
    {
        "request_id": "p",
        "session_id": "s",
        "input_tokens": 40,
        "output_tokens": 2,
        "hash_ids": [0, 1, 2],
        "created_time": 0.0,
        "priority": 5,
        "branches": ["q"],
    },
    {
        **lengths(48, 1, request_id="q", session_id="t", hash_ids=[0, 1, 3], timestamp=None),
        "wait_for": ["p"],
        "delay_ms": 10,
        "tool_wait_ms": 20.5,
        "tool_events": [],
    },
    lengths(64, 1, request_id="r", session_id="s", hash_ids=[0, 1, 2, 4], wait_for=["p", "q"]),
)


def test_agentic_rows_of_dynamo_wait_for_other_rows(tmp_path: Path) -> None:
    workload = read(tmp_path, AGENTIC, id_block_size=16)
    assert workload.follows == {"r1": Follows(("r0",), 30), "r2": Follows(("r0", "r1"), 0)}
    assert [row.priority for row in workload.rows] == [-5, 0, 0]
    # Id 2 names 8 tokens of the first prompt: no block of 16 that the third one could hit.
    assert count(workload) == (3, 152, 4, 64)


def test_the_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
    chats = read(tmp_path, SAMPLES["qwen"][1])
    assert chats.follows == {"r1": Follows(("r0",), 0)}
    sessions = read(tmp_path, SAMPLES["mooncake of AIPerf: sessions"][1])
    assert sessions.follows == {"r2": Follows(("r0",), 500)}
    # Dynamo serves the greatest priority first, vLLM the least.
    assert [request.priority for request in sessions] == [0, -2, 0]
    workload = read(tmp_path, SAMPLES["sharegpt in lines"][1])
    assert workload.follows == {"r1": Follows(("r0",), 0), "r3": Follows(("r2",), 0)}
    turns = read(tmp_path, SAMPLES["aiperf: turns"][1])
    assert turns.follows == {"r1": Follows(("r0",), 200)}
    traced = read(tmp_path, SAMPLES["dynamo"][1])
    assert traced.follows == {"r1": Follows(("r0",), 0)}
    assert [row.arrival_time for row in traced.rows] == [0, 1500]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            jsonl(lengths(9, 1, hash_ids=[0], request_id="a", wait_for=["z"])),
            "it waits for 'z', which is no row before it",
        ),
        (jsonl(end(0, "s", 40, [1, 2], 3)), "2 block ids for 40 tokens, where blocks of 16 make 3"),
        (
            jsonl(end(0, "s", 16, [1], 3)).replace(', "output_tokens": 3', ""),
            "missing required field `output_tokens` - at `$.request` in 'request_end'",
        ),
        (
            jsonl(end(0, "s", 16, [1], 3), end(0, "s", 32, [1], 3)).replace(
                '"trace_block_size": 16, "input_length": 32',
                '"trace_block_size": 32, "input_length": 32',
            ),
            "blocks of 32 tokens after blocks of 16",
        ),
        (jsonl({"prompt": "a b"}), "no field 'output_tokens'"),
        (jsonl({"image": "x.png", "turns": []}), "no rows"),
        (jsonl({"turns": [{"image": "x.png"}]}), "unknown field 'image'"),
        (jsonl({"conversations": [{"from": "gpt"}]}), "a turn without 'from' and 'value'"),
        (jsonl({"conversations": 3}), "Expected `array`, got `int` in 'conversations'"),
        ('[{"conversations": []}, {"id": 3\n', "a JSON array that does not end"),
        ("[\n", "a JSON array that does not end"),
        ("[]\n", "no rows"),
        ('[{"prompt": "a", "output_tokens": 1}, 7]', "an element that is no object"),
        ('["prompt"]', "an element that is no object"),
        ('[{"prompt": "a", "output_tokens": 1}\n7\n]', "an element that is no object"),
        ('[{"prompt": "a]\n}]', "no known format"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_brackets_within_strings_do_not_end_an_element(tmp_path: Path) -> None:
    text = (
        '[ {"prompt": "a }] \\" {[", "output_tokens": 1},\n{"prompt": "b",\n"output_tokens": 2} ]'
    )
    assert count(read(tmp_path, text)) == (2, 5, 3, 0)


def test_a_default_replaces_missing_output_lengths(tmp_path: Path) -> None:
    text = jsonl({"prompt": "a b"}, {"prompt": "c", "output_tokens": 2})
    assert count(read(tmp_path, text, output_length=7)) == (2, 3, 9, 0)


def test_blocks_of_16_are_shared_as_far_as_their_ids(tmp_path: Path) -> None:
    first, second, third = (it.prompt_token_ids for it in loaded(tmp_path, SAMPLES["qwen"][1]))
    assert (agree(first, second), agree(first, third)) == (32, 33)


def test_token_ids_in_the_file_become_the_prompt(tmp_path: Path) -> None:
    workload = loaded(tmp_path, SAMPLES["servingsim: ShareGPT with token ids"][1])
    assert [it.prompt_token_ids for it in workload] == [tuple(range(20)), tuple(range(17))]


SERVED = {"input_toks": 2, "output_toks": 1, "arrival_time_ns": 4_999_999}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:41\n", "git lfs pull"),
        ('[{"id": "1", "conversations": []}]\n', "--tokenizer"),
        (
            jsonl({"timestamp": 1, "input_length": 3, "output_length": 2}),
            "and without ids of the prompt's blocks (hash_ids) as mooncake has",
        ),
        ("Timestamp,Request tokens\n1,2\n", "without output tokens (Response tokens) as burstgpt"),
        ('{"a": 1}\n', "no known format"),
        (jsonl({**mooncake([0], 9), "session_id": "s", "speed": 1}), "unknown field 'speed'"),
        (jsonl({"input_length": 3, "output_length": 2, "hash_ids": [0]}), "no time of arrival"),
        (jsonl({**mooncake([0], 9), "delay": 1}), "a delay without a session_id"),
        (f"{SAMPLES['burstgpt'][1]}\n1,GPT-4,2\n", "3 values, where the header has 8"),
        (jsonl({**SERVED, "input_tok_ids": [5]}), "1 token ids for 2 tokens"),
        (jsonl({**SERVED, "input_tok_ids": [5, 1 << 30]}), "<= 1073741823"),
        (
            SAMPLES["vllm-bench"][1].replace("[10, 0]", "[10]"),
            "arrays of different lengths: 2 start_times",
        ),
    ],
)
def test_the_missing_or_unknown_field_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError) as caught:
        loaded(tmp_path, text)
    assert words in str(caught.value)


DAMAGED = (
    *("mooncake of AIPerf: sessions", "mooncake of AIPerf: texts", "qwen", "dynamo", "burstgpt"),
    *("servingsim: ShareGPT with token ids", "vllm-bench", "sharegpt, indented", "aiperf: turns"),
)


@pytest.mark.parametrize("text", [MOONCAKE, AGENT, AZURE, *(SAMPLES[it][1] for it in DAMAGED)])
def test_a_damaged_file_is_a_workload_or_a_trace_error(tmp_path: Path, text: str) -> None:
    rng, num_errors = random.Random(41), 0
    path = tmp_path / "w"
    for zipped in (False, True):
        whole = gzip.compress(text.encode()) if zipped else text.encode()
        for _ in range(200):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data[: rng.randint(1, 2 * len(data))])
            try:
                assert len(load(path, tokenize=words)) >= 1
            except TraceError:
                num_errors += 1
    assert num_errors > 200


# The command.


def run(*given: str) -> Result:
    return CliRunner().invoke(app, ["replay", *given, "--no-spec", "--json", "-"])


def test_prompts_given_as_text_are_replayed_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(f"{TEN} a b c what now".split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "sharegpt.json"
    path.write_text(SAMPLES["sharegpt"][1])
    result = run(str(path))
    assert result.exit_code == 2
    assert "name the tokenizer.json of the model with --tokenizer" in " ".join(
        result.output.split()
    )
    result = run(str(path), "--tokenizer", str(tmp_path))
    numbers = json.loads(result.stdout)
    assert (numbers["tokens_prompt"], numbers["tokens_prefix_hit"]) == (45, 16)
    result = run(str(path), "--tokenizer", str(path))
    assert result.exit_code == 2
    assert "give a tokenizer.json" in " ".join(result.output.split())


# A published file, read where it is: 20,448 of 258,691 prompt tokens are hits at blocks of 16.


def test_hits_of_a_published_sharegpt_file_equal_those_counted_by_ids() -> None:
    path = find_trace("sharegpt-qwen3-32b-300-sps10.jsonl")
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for line in path.read_text().splitlines():
        ids = json.loads(line)["input_tok_ids"]
        blocks = [tuple(ids[: at + 16]) for at in range(0, len(ids) - 15, 16)]
        for block in blocks[: (len(ids) - 1) // 16]:
            if block not in seen:
                break
            hits += 16
        seen.update(blocks)
    config = replace(CONFIG, num_blocks=40_000)
    report = replay(load(path), config, HostEngine)
    counted = (report.requests_finished, report.tokens_prefix_hit, report.tokens_prompt)
    assert counted == (300, hits, 258_691)
    assert hits == 20_448
