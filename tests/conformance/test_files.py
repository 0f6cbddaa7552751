"""Files: a made sample of each published format, with numbers that were counted by hand."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.draw.workloads import Follows, Workload, WorkloadFormat, load
from blockstep.conformance.protocol.lines import TraceError
from blockstep.conformance.recorded.pace import REPLAY_PRESETS
from blockstep.conformance.recorded.replay import replay
from blockstep.impl.host import HostEngine

REPO = Path(__file__).resolve().parents[2]
CONFIG = REPLAY_PRESETS[WorkloadFormat.AZURE].config


def jsonl(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


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
            lengths(1536, 2, session_id="a", hash_ids=[0, 1, 2], delay=500),
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


def read(folder: Path, text: str, **options: Any) -> Workload:
    path = folder / "w"
    path.write_text(text)
    return load(path, tokenize=words, **options)


def count(workload: Workload) -> tuple[int, int, int, int]:
    """Requests, prompt tokens, output tokens and prompt tokens hit, of a replay."""
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


def test_every_format_has_a_sample() -> None:
    sampled = {expected for expected, _, _ in SAMPLES.values()}
    assert {*WorkloadFormat} - sampled == {WorkloadFormat.TIMED_TRACE}  # it has to be named


def test_a_timed_trace_of_vllm_is_read_where_it_is_named(tmp_path: Path) -> None:
    text = jsonl(
        lengths(33, 4, timestamp=0.5, hash_ids=[1, 2, 3]),
        lengths(33, 4, timestamp=2, hash_ids=[1, 2, 3]),
    )
    workload = read(tmp_path, text, as_format=WorkloadFormat.TIMED_TRACE)
    assert [row.arrival_time for row in workload.rows] == [0, 1500]
    assert count(workload) == (2, 66, 8, 32)


def test_rows_without_ids_are_unique_where_their_format_is_named(tmp_path: Path) -> None:
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


def test_the_agentic_rows_of_dynamo_wait_for_others(tmp_path: Path) -> None:
    workload = read(tmp_path, AGENTIC, id_block_size=16)
    assert workload.follows == {"r1": Follows(("r0",), 30), "r2": Follows(("r0", "r1"), 0)}
    assert [row.priority for row in workload.rows] == [-5, 0, 0]
    # Id 2 names 8 tokens of the first prompt: no block of 16 that the third one could hit.
    assert count(workload) == (3, 152, 4, 64)


def test_the_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
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
def test_a_row_that_cannot_be_used_is_told(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "name", ["mooncake of AIPerf: texts", "dynamo", "sharegpt, indented", "aiperf: turns"]
)
def test_a_damaged_file_is_a_workload_or_a_trace_error(tmp_path: Path, name: str) -> None:
    rng = random.Random(7)
    path, whole = tmp_path / "w", SAMPLES[name][1].encode()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randint(1, 2 * len(data))])
        try:
            assert len(load(path, tokenize=words)) >= 1
        except TraceError:
            continue


def test_brackets_in_strings_are_no_brackets(tmp_path: Path) -> None:
    text = (
        '[ {"prompt": "a }] \\" {[", "output_tokens": 1},\n{"prompt": "b",\n"output_tokens": 2} ]'
    )
    assert count(read(tmp_path, text)) == (2, 5, 3, 0)


def test_a_default_stands_in_for_output_lengths(tmp_path: Path) -> None:
    text = jsonl({"prompt": "a b"}, {"prompt": "c", "output_tokens": 2})
    assert count(read(tmp_path, text, output_length=7)) == (2, 3, 9, 0)


# The command.


def run(*given: str) -> Result:
    return CliRunner().invoke(app, ["replay", *given, "--no-spec", "--json", "-"])


def test_texts_are_replayed_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(f"{TEN} a b c what now".split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "sharegpt.json"
    path.write_text(SAMPLES["sharegpt"][1])
    told = run(str(path))
    assert told.exit_code == 2
    assert "name the tokenizer.json of the model with --tokenizer" in " ".join(told.output.split())
    told = run(str(path), "--tokenizer", str(tmp_path))
    numbers = json.loads(told.stdout)
    assert (numbers["tokens_prompt"], numbers["tokens_prefix_hit"]) == (45, 16)
    told = run(str(path), "--tokenizer", str(path))
    assert told.exit_code == 2
    assert "give a tokenizer.json" in " ".join(told.output.split())


# A published file, read where it is: 20,448 of 258,691 prompt tokens are hits at blocks of 16.


def test_a_published_file_of_sharegpt_hits_as_counted_by_ids_alone() -> None:
    name = "sharegpt-qwen3-32b-300-sps10.jsonl"
    folder = Path(os.environ.get("BLOCKSTEP_TRACES", REPO.parent / "shared" / "traces"))
    path = folder / name
    if not path.is_file():
        pytest.skip(f"{path} is absent: it is in the workloads of LLMServingSim")
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
