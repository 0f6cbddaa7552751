"""Command: `blockstep generate` serves a local model, and checks each step with `--check`.

The model engine is loaded by its path when the command runs, as every engine is: without torch all
other commands work.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from blockstep.conformance.command import console, options
from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.conformance.engines.sync_points import SyncPointChecker
from blockstep.conformance.report.failure import render_served
from blockstep.conformance.search.options import ExitCode, exit_code_of
from blockstep.spec.vocabulary import SpecMethod

Checker: TypeAlias = SyncPointChecker | ServingChecker
ENGINE = "blockstep.impl.engine"
"""The module of the model engine."""
ADAPTER = "lora"
"""The name that requests use for the adapter of `--lora`."""
BYTES_PER_GIB = 1 << 30
Regex = Annotated[str | None, typer.Option(help="The output matches this regular expression.")]
JsonSchema = Annotated[str | None, typer.Option(help="The output is JSON that follows this.")]
Choice = Annotated[
    list[str] | None, typer.Option(help="The output is one of these choices; repeatable.")
]
Lora = Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter, as peft saves it.")]
Scheduler = Annotated[str, typer.Option(help="host, or device, whose steps are checked at fences.")]
Check = Annotated[
    bool, typer.Option("--check", help="Hold every step to the specification while serving.")
]

Depth = Annotated[
    int | None,
    typer.Option(min=1, help="Plans in flight; 2: asynchronous. Default: 2 on a GPU, else 1."),
]


def generate_command(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts to continue.")] = None,
    model: Annotated[
        Path, typer.Option(help="Folder of a Llama, Qwen2 or Qwen3 model, as from Hugging Face.")
    ] = ...,  # type: ignore[assignment]
    token_ids: Annotated[
        list[str] | None,
        typer.Option(help="A prompt of token ids: 1,15043,29892. May be given several times."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each output, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the N likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among tokens of this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw among tokens this near the best.")] = 0.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the output.")] = None,
    regex: Regex = None,
    json_schema: JsonSchema = None,
    choice: Choice = None,
    lora: Lora = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past the end.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Report N logprobs per token in --json.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    cache_gib: Annotated[float | None, typer.Option(help="Memory for the KV cache.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks, instead of memory.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output, at most.")] = None,
    speculate: Annotated[
        SpecMethod, typer.Option(help="Source of drafts: none, ngram or draft_model.")
    ] = SpecMethod.NONE,
    num_drafts: Annotated[int, typer.Option(help="Drafts of a step, with --speculate.")] = 4,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft model.")] = None,
    depth: Depth = None,
    scheduler: Scheduler = "host",
    check: Check = False,
    json_path: options.Json = None,
) -> None:
    """Continue prompts with a local model; the output of a single prompt is streamed.

    Needs pip install 'blockstep[engine]'; a regex, a schema or a choice 'blockstep[grammars]'.

    Example: blockstep generate --model path/to/model "Once upon a time" --check
    """
    given = _all_prompts(prompts or [], token_ids or [])
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "min_p": min_p, "stop": tuple(stop or ()), "ignore_eos": ignore_eos, "logprobs": logprobs,
        "regex": regex, "json_schema": json_schema, "choice": tuple(choice or ()),
    }  # fmt: skip
    settings = {
        "device": device,
        "dtype": dtype,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "spec_method": speculate,
        "draft_model": draft_model,
        "max_frames_in_flight": depth,
        "scheduler": scheduler,
        "seed": seed,
        "kv_cache_bytes": None if cache_gib is None else _cache_bytes(cache_gib),
        "num_speculative_tokens": 0 if speculate is SpecMethod.NONE else num_drafts,
        **_adapter_settings(lora),
    }
    run_generate(model, given, sampling, settings, check, json_path)


def run_generate(
    model: Path,
    prompts: list[str | list[int]],
    sampling: dict[str, Any],
    settings: dict[str, Any],
    check: bool,
    json_path: Path | None,
) -> None:
    """Load the model, serve the prompts, and report."""
    engine = _load_engine()
    make_checker = SyncPointChecker if settings["scheduler"] == "device" else ServingChecker
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a model outputs characters that some terminals cannot show
    with _engine_errors(engine):
        params = engine.SamplingParams(**sampling)
        llm = engine.LLM(model, check=make_checker if check else None, **settings)
        if llm.model_config.unused_sampling and not sampling["temperature"]:
            unused = ", ".join(llm.model_config.unused_sampling)
            note = f"generation_config.json has {unused}: not used, outputs are greedy"
            typer.echo(f"blockstep: {note}; give --temperature and others to sample", err=True)
        start = time.monotonic()
        completions = _serve(llm, prompts, params, quiet=json_path == Path("-"))
    seconds = time.monotonic() - start
    num_tokens = sum(len(one.token_ids) for one in completions)
    checker: Checker | None = llm.observer
    typer.echo(f"{num_tokens} tokens in {seconds:.2f} s", err=True)
    if checker is not None:
        typer.echo(f"check: nothing found; {checker.describe()}", err=True)
    console.write_json(json_path, completions_to_json(model, completions, seconds, checker))


def completions_to_json(
    model: Path, completions: list[Any], seconds: float, checker: Checker | None
) -> dict[str, object]:
    """Return the result as JSON (docs/reference/json.md)."""
    return {
        "format": "blockstep-generate",
        "version": 1,
        "model": str(model),
        "seconds": seconds,
        "num_tokens": sum(len(one.token_ids) for one in completions),
        "check": None if checker is None else checker.counts(),
        "completions": [
            {
                "prompt_token_ids": list(one.prompt_token_ids),
                "token_ids": list(one.token_ids),
                "text": one.text,
                "finish_reason": str(one.finish_reason),
                "num_cached_tokens": one.num_cached_tokens,
                "logprobs": one.logprobs,
            }
            for one in completions
        ],
    }


def _serve(llm: Any, prompts: list[Any], params: Any, quiet: bool) -> list[Any]:
    """Stream one prompt; serve several together and print them when all are done."""
    adapter = next(iter(llm.settings.lora_modules), None)
    names = [llm.add_request(prompt, params, adapter=adapter) for prompt in prompts]
    is_text = llm.tokenizer is not None
    if len(names) == 1 and not quiet:
        while llm.has_unfinished_requests:
            for chunk in llm.step():
                sys.stdout.write(chunk.text if is_text else _shown(chunk.token_ids))
                sys.stdout.flush()
        sys.stdout.write("\n")
        return [llm.pop_completion(names[0])]
    with console.progress(Console(stderr=True), "generating") as advance:
        num_most, num_tokens = len(names) * params.max_tokens, 0
        while llm.has_unfinished_requests:
            num_tokens += sum(len(chunk.token_ids) for chunk in llm.step())
            advance(num_tokens / num_most, f"{num_tokens:,} tokens")
    completions = [llm.pop_completion(name) for name in names]
    if not quiet:
        for number, one in enumerate(completions, 1):
            text = one.text if is_text else _shown(one.token_ids)
            typer.echo(f"--- {number} ({one.finish_reason})\n{text.strip()}")
    return completions


def _shown(token_ids: tuple[int, ...]) -> str:
    return "".join(f"{token} " for token in token_ids)


def _all_prompts(texts: list[str], token_ids: list[str]) -> list[str | list[int]]:
    given: list[str | list[int]] = [*texts, *map(_token_ids, token_ids)]
    if not given:
        console.usage("generate: nothing to continue; give a text, or --token-ids 1,2,3")
    return given


def _adapter_settings(folder: Path | None) -> dict[str, Any]:
    """Return the settings for an adapter, of any rank."""
    return {} if folder is None else {"lora_modules": {ADAPTER: folder}, "max_lora_rank": 1 << 20}


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        console.usage(f"--token-ids {text!r}: must be ids with commas between them: 1,15043,29892")


def _cache_bytes(gib: float) -> int:
    if not 0 < gib < math.inf:
        console.usage(f"--cache-gib {gib}: must be a number above 0")
    return int(gib * BYTES_PER_GIB)


def _load_engine() -> Any:
    try:
        return importlib.import_module(ENGINE)
    except ModuleNotFoundError as error:
        console.usage(f"generate: {error.name} is not installed; pip install 'blockstep[engine]'")


@contextmanager
def _engine_errors(engine: Any) -> Iterator[None]:
    """Turn bad input into a message and exit code 2, and a finding into its report."""
    try:
        yield
    except CheckFailedError as error:
        typer.echo(render_served(error.findings, error.num_events), err=True)
        raise typer.Exit(exit_code_of(error.findings[0])) from None
    except (engine.CheckpointError, engine.SettingsError, engine.RequestError) as error:
        console.usage(str(error))
    except engine.EngineError as error:
        console.end(ExitCode.FAILED, str(error))
