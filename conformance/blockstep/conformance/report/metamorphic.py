"""Reports of metamorphic pairs: configs that must give the same tokens, as text and JSON."""

from __future__ import annotations

import shlex
import textwrap

from blockstep.conformance.protocol.program import WIDTH, describe_config, describe_request
from blockstep.conformance.report.failure import show_path
from blockstep.conformance.search.metamorphic import (
    ARMS,
    Answer,
    Contrast,
    Fault,
    MetamorphicResult,
)
from blockstep.conformance.search.options import CheckOptions

MESSAGE_CHARS_MAX = 1000


def render_arms(result: MetamorphicResult, options: CheckOptions, seconds: float) -> str:
    """Return the counts of compared answers, or the request that differs between two configs."""
    lines = []
    for arm in ARMS:
        if arm.name in result.not_tried:
            lines.append(f"{arm.name:<9} not tried: the engine lacks it")
        elif arm.name in result.alike:
            lines.append(
                f"{arm.name:<9} not tried: the change has no effect on this engine's config"
            )
        else:
            count = result.num_compared[arm.name]
            lines.append(f"{arm.name:<9} {count:>8,} answers compared   {arm.summary}")
    if result.num_endless:
        lines.append(
            f"endless   {result.num_endless:>8,} answers, under both configs: see blockstep check"
        )
    where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
    if result.fault is not None:
        return "\n".join(_render_fault(result.fault, where, options)) + "\n"
    if result.contrast is None:
        if not any(result.num_compared.values()):
            return "\n".join([*lines, f"NO VERDICT (nothing compared): {where}"]) + "\n"
        episodes = f"{result.num_episodes:,} workloads, {seconds:.1f} s"
        return "\n".join([*lines, f"alike: {where}: {episodes}"]) + "\n"
    return "\n".join(_render_contrast(result.contrast, where, options)) + "\n"


def _render_contrast(contrast: Contrast, where: str, options: CheckOptions) -> list[str]:
    lines = [
        f"blockstep arms: {contrast.request_id} IS ANSWERED DIFFERENTLY ({where})",
        "",
        f"  arm       {contrast.arm}: "
        + next(arm.summary for arm in ARMS if arm.name == contrast.arm),
        f"  config    {describe_config(contrast.config)}",
        f"  changed   {describe_config(contrast.changed)}",
        "  requests  submitted one before each step",
    ]
    lines += [f"    {describe_request(request)}" for request in contrast.requests]
    lines += [
        "",
        f"  answer    {_format_answer(contrast.plain)}",
        f"  changed   {_format_answer(contrast.other)}",
        "",
        f"  reproduce  {reproduce_arms(options, contrast.episode)}",
    ]
    return lines


def _render_fault(fault: Fault, where: str, options: CheckOptions) -> list[str]:
    summary = next((arm.summary for arm in ARMS if arm.name == fault.arm), "none yet")
    return [
        f"blockstep arms: FAULT ({where})",
        "",
        *textwrap.wrap(
            fault.message[:MESSAGE_CHARS_MAX], WIDTH, initial_indent="  ", subsequent_indent="  "
        ),
        *(f"  raised in {frame}" for frame in fault.frames[-1:]),
        *(f"  called by {frame}" for frame in reversed(fault.frames[:-1])),
        "",
        f"  arm       {fault.arm or 'none'}: {summary}",
        f"  config    {describe_config(fault.config)}",
        "  requests  submitted one before each step",
        *(f"    {describe_request(request)}" for request in fault.requests),
        "",
        f"  reproduce  {reproduce_arms(options, fault.episode)}",
    ]


def describe_difference(contrast: Contrast) -> str:
    """Return the answers under the two configs, in a line."""
    return f"answer {_format_answer(contrast.plain)}, changed {_format_answer(contrast.other)}"


def reproduce_arms(options: CheckOptions, episode: int) -> str:
    """Return the command line that reproduces the result."""
    return (
        f"blockstep arms --engine {shlex.quote(options.engine)}{show_path(options)}"
        f" --preset {options.preset} --seed {options.seed} --workloads {episode + 1}"
    )


def _format_answer(answer: Answer) -> str:
    ending = f"ends: {answer.reason}" if answer.reason else "never ends"
    return f"{list(answer.token_ids)} {ending}"


def arms_to_json(result: MetamorphicResult, options: CheckOptions) -> dict[str, object]:
    """Return the verdict as JSON types (docs/reference/json.md)."""
    contrast, fault = result.contrast, result.fault
    return {
        "format": "blockstep-arms",
        "version": 1,
        "engine": options.engine,
        "preset": options.preset,
        "seed": options.seed,
        "num_workloads": result.num_episodes,
        "num_compared": result.num_compared,
        "num_endless": result.num_endless,
        "not_tried": list(result.not_tried),
        "alike": list(result.alike),
        "fault": None
        if fault is None
        else {
            "arm": fault.arm,
            "workload": fault.episode,
            "config": describe_config(fault.config),
            "requests": [describe_request(request) for request in fault.requests],
            "message": fault.message,
            "frames": list(fault.frames),
        },
        "contrast": None
        if contrast is None
        else {
            "arm": contrast.arm,
            "workload": contrast.episode,
            "config": describe_config(contrast.config),
            "changed": describe_config(contrast.changed),
            "requests": [describe_request(request) for request in contrast.requests],
            "request_id": contrast.request_id,
            "answer": _format_answer(contrast.plain),
            "answer_changed": _format_answer(contrast.other),
        },
    }
