"""`blockstep generate`: output, checks and exit codes."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_support.adapters import ADAPTERS
from engine_support.models import build_model, save_model, save_tokenizer
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.impl.engine.input_batch import Batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(build_model("llama", vocab_size=260), tmp_path_factory.mktemp("model"))
    save_tokenizer(folder)
    return folder


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, args)], env={"COLUMNS": "100"})


def test_one_prompt_is_streamed(model: Path) -> None:
    result = blockstep("--model", model, "What is a block?", "--max-tokens", 12)
    assert result.exit_code == 0
    assert "12 tokens in" in result.stderr
    assert result.stdout.strip()


def test_sampling_defaults_of_a_model_that_are_not_used_are_named(
    model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "min_p": None}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    asked = ("--model", folder, "What is a block?", "--max-tokens", 12)
    right, result = blockstep("--model", model, *asked[2:]), blockstep(*asked)
    assert "generation_config.json has temperature=0.6, top_p=0.95: not used" in result.stderr
    assert right.stdout.splitlines()[0] == result.stdout.splitlines()[0]
    assert "generation_config.json" not in right.output
    assert "not used" not in blockstep(*asked, "--temperature", 0.6).output


def test_a_character_that_the_terminal_lacks_is_a_question_mark(model: Path) -> None:
    result = CliRunner(charset="ascii").invoke(
        app, ["generate", "--model", str(model), "abc", "--max-tokens", "40", "--ignore-eos"]
    )
    assert result.exit_code == 0
    assert "?" in result.stdout


def test_several_prompts_are_labelled(model: Path) -> None:
    result = blockstep("--model", model, "one", "two", "--max-tokens", 3, "--ignore-eos")
    assert result.exit_code == 0
    assert "--- 1 (length)" in result.stdout
    assert "--- 2 (length)" in result.stdout


def test_an_adapter_changes_the_output(model: Path, tmp_path: Path) -> None:
    lora = ADAPTERS["some"].save(build_model("llama", vocab_size=260), tmp_path / "lora")
    args = ("--model", model, "one", "--max-tokens", 9, "--ignore-eos", "--num-blocks", 9)
    adapted = blockstep(*args, "--lora", lora, "--check")
    assert adapted.exit_code == 0
    assert adapted.stdout.strip() != blockstep(*args).stdout.strip()
    wrong = blockstep(*args, "--lora", tmp_path / "nothing")
    assert wrong.exit_code == 2
    assert "no such folder; name one that peft has saved" in wrong.stderr.replace("\n", " ")


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs the extra [grammars]")
def test_an_output_follows_its_grammar(model: Path) -> None:
    one = blockstep("--model", model, "one", "--choice", "yes", "--choice", "no", "--check")
    assert one.exit_code == 0
    assert one.stdout.strip() in ("yes", "no")
    assert "check: nothing found" in one.stderr
    wrong = blockstep("--model", model, "one", "--regex", "a(")
    assert wrong.exit_code == 2
    assert "unclosed group" in wrong.stderr


def test_json_is_complete_and_alone_on_standard_output(model: Path) -> None:
    result = blockstep(
        *("--model", model, "one", "--token-ids", "5,6", "--max-tokens", 4, "--ignore-eos"),
        *("--logprobs", 2, "--check", "--json", "-"),
    )
    assert result.exit_code == 0
    made = json.loads(result.stdout)
    assert (made["format"], made["version"]) == ("blockstep-generate", 1)
    assert made["num_tokens"] == 8
    assert made["check"]["num_slots_read"] > 0
    first, second = made["completions"]
    assert second["prompt_token_ids"] == [5, 6]
    assert first["finish_reason"] == "length"
    assert [len(row) >= 2 for row in first["logprobs"]] == [True] * 4


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--speculate", "ngram"),
        ("--speculate", "draft_model", "--draft-model", "{model}"),
        ("--depth", 2, "--block-size", 4, "--num-blocks", 30, "--max-model-len", 64),
    ],
)
def test_a_checked_run_prints_what_was_checked(model: Path, options: tuple[object, ...]) -> None:
    given = [str(option).format(model=model) for option in options]
    result = blockstep("--model", model, "abc", "--max-tokens", 8, "--check", *given)
    assert result.exit_code == 0
    assert "check: nothing found; " in result.stderr


def test_the_scheduler_of_the_device_is_checked_at_fences(model: Path) -> None:
    options = ("--model", model, "abc", "--max-tokens", 20)
    result = blockstep(*options, "--scheduler", "device", "--check")
    assert result.exit_code == 0, result.output
    assert result.stdout == blockstep(*options).stdout
    assert re.search(r"check: nothing found; \d+ events, [2-9] fences", result.stderr)


def test_the_same_seed_generates_the_same_text(model: Path) -> None:
    options = ("--model", model, "abc", "--temperature", 1.2, "--top-p", 0.9, "--max-tokens", 20)
    first, again, other = (blockstep(*options, "--seed", seed) for seed in (3, 3, 4))
    assert first.stdout == again.stdout != other.stdout


def test_a_finding_ends_with_its_report_and_code_1(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Any = Batch._append_blocks
    monkeypatch.setattr(
        Batch, "_append_blocks", lambda self, row, tables: start(self, row, (tables[0][::-1],))
    )
    result = blockstep("--model", model, "a longer prompt than a block", "--check")
    assert result.exit_code == 1
    assert "blockstep generate: VIOLATION at event 2" in result.stderr
    assert "P3 token_is_written_to_its_slot" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to continue"),
        (("--token-ids", "1;2"), "--token-ids '1;2': must be ids"),
        (("abc", "--temperature", -1), "temperature = -1.0: must be from 0"),
        (("abc", "--num-blocks", 1), "num_blocks = 1: must be an int from 2"),
        (("abc", "--cache-gib", "0.0000001"), "kv_cache_bytes = 107: a block takes"),
        (("abc", "--cache-gib", "nan"), "--cache-gib nan: must be a number above 0"),
        (("abc", "--cache-gib", "inf"), "--cache-gib inf: must be a number above 0"),
        (("abc", "--cache-gib", 1, "--num-blocks", 9), "num_blocks and kv_cache_bytes: each sets"),
        (("abc", "--num-blocks", 2, "--max-model-len", 200), "blocks, and the pool has 1"),
        (("abc", "--speculate", "draft_model"), "draft_model: must be given if and only if"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_code_2(
    model: Path, options: tuple[object, ...], message: str
) -> None:
    result = blockstep("--model", model, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_model_is_bad_input(tmp_path: Path) -> None:
    result = blockstep("--model", tmp_path, "abc")
    assert result.exit_code == 2
    assert "config.json: cannot be read" in result.stderr


def test_a_missing_torch_is_named_with_the_command_that_installs_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", fail)
    result = blockstep("--model", model, "abc")
    assert result.exit_code == 2
    assert "torch is not installed; pip install 'blockstep[engine]'" in result.stderr
