"""Arms: the verdict on configs that must not make a difference, for people and for machines."""

from __future__ import annotations

from blockstep.conformance.protocol.program import describe_config, describe_request
from blockstep.conformance.search.arms import ARMS, Answer, ArmsResult, Contrast
from blockstep.conformance.search.options import CheckOptions


def render_arms(result: ArmsResult, options: CheckOptions, seconds: float) -> str:
    """What was compared, or the request that two configs answer differently."""
    lines = []
    for arm in ARMS:
        if arm.name in result.not_tried:
            lines.append(f"{arm.name:<9} not tried: the engine lacks it")
        else:
            count = result.num_compared[arm.name]
            lines.append(f"{arm.name:<9} {count:>8,} answers compared   {arm.summary}")
    where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
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
        f"  answer    {_say(contrast.plain)}",
        f"  changed   {_say(contrast.other)}",
        "",
        (
            f"  reproduce  blockstep arms --engine {options.engine} --preset {options.preset} "
            f"--seed {options.seed} --workloads {contrast.episode + 1}"
        ),
    ]
    return lines


def _say(answer: Answer) -> str:
    ending = f"ends: {answer.reason}" if answer.reason else "never ends"
    return f"{list(answer.token_ids)} {ending}"


def arms_to_json(result: ArmsResult, options: CheckOptions) -> dict[str, object]:
    """The verdict for machines (docs/reference/json.md)."""
    contrast = result.contrast
    return {
        "format": "blockstep-arms",
        "version": 1,
        "engine": options.engine,
        "preset": options.preset,
        "seed": options.seed,
        "num_workloads": result.num_episodes,
        "num_compared": result.num_compared,
        "not_tried": list(result.not_tried),
        "contrast": None
        if contrast is None
        else {
            "arm": contrast.arm,
            "workload": contrast.episode,
            "config": describe_config(contrast.config),
            "changed": describe_config(contrast.changed),
            "requests": [describe_request(request) for request in contrast.requests],
            "request_id": contrast.request_id,
            "answer": _say(contrast.plain),
            "answer_changed": _say(contrast.other),
        },
    }
