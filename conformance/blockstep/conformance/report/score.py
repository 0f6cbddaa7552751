"""Report of a score: a table, then the first difference of each kind as a program."""

from __future__ import annotations

import shlex
from html import escape
from typing import Any

from blockstep.conformance.lockstep.score import Aspect
from blockstep.conformance.protocol.program import describe, describe_config
from blockstep.conformance.report.failure import NOT_AGAIN, show_options, show_path
from blockstep.conformance.report.jsonform import difference_to_json, finding_to_json
from blockstep.conformance.report.view import fill_page
from blockstep.conformance.search.options import CheckOptions, ExitCode, exit_code_of
from blockstep.conformance.search.score import CONTRACT, FirstDifference, ScoreResult


def render_score(result: ScoreResult, least: float = 0.0) -> str:
    """Return the whole report, with a trailing newline."""
    options = result.options
    engine = f"{options.engine} {result.engine_version}".strip()
    played = (
        f"{result.num_events:,} events in {result.num_episodes:,} episodes, {result.seconds:.1f} s"
    )
    lines = [
        f"blockstep score: engine {engine}, against {result.against}",
        f"  preset {options.preset}, seed {options.seed}: {played}",
        "",
        f"  {'':<12}{'agree':>10}{'of':>10}{'share':>10}   first difference",
        *(_row(result, aspect) for aspect in Aspect),
    ]
    lines += _list_left_out(result)
    if result.nearest:
        lines += ["", *_list_nearest(result)]
    for first in result.list_firsts():
        lines += ["", *_describe_first(first, options, first in result.others)]
    lines += _describe_stop(result)
    less = [
        aspect for aspect in Aspect if (share := result.share(aspect)) is not None and share < least
    ]
    if less:
        lines += ["", f"  less than {least:.2%} agree: {', '.join(less)}"]
    return "\n".join(lines) + "\n"


def _row(result: ScoreResult, aspect: Aspect) -> str:
    share, first = result.share(aspect), result.firsts.get(aspect)
    percent = "none" if share is None else f"{_floor(share):.2f} %"
    where = "" if first is None else f"   episode {first.episode}"
    counts = f"{result.agreed[aspect]:>10,}{result.total[aspect]:>10,}"
    return f"  {aspect:<12}{counts}{percent:>10}{where}"


def _list_left_out(result: ScoreResult) -> list[str]:
    return [
        f"  left out    {name}: {count} times" for name, count in sorted(result.skipped.items())
    ]


def _describe_stop(result: ScoreResult) -> list[str]:
    """Return lines about episodes that ended before their program, and a lost engine."""
    lines = []
    if result.stuck is not None and result.stuck_episode is not None:
        is_ours = exit_code_of(result.stuck) is ExitCode.HARNESS
        side = "Blockstep" if is_ours else "the engine"
        lines += ["", f"  in {result.num_stuck} episodes {side} could not continue; the first:"]
        lines += [f"    {result.stuck.message}"]
        lines += [f"  reproduce  {reproduce(result.options, result.stuck_episode)}"]
    if result.loss is not None:
        lines += ["", f"  the score ends early: {result.loss.message}"]
    return lines


def _floor(share: float) -> float:
    """Return per cent, rounded down, so that only complete agreement is shown as 100."""
    return int(share * 10_000) / 100


def rank_profiles(result: ScoreResult) -> list[tuple[str, float]]:
    """Return the share of steps that agree, and the compared profiles that have it, the nearest
    first."""
    names: dict[float, list[str]] = {}
    for name, (total, agreed) in result.nearest.items():
        if total:
            names.setdefault(agreed / total, []).append(name)
    ranked = sorted(names.items(), reverse=True)
    return [(", ".join(alike), share) for share, alike in ranked]


def _list_nearest(result: ScoreResult) -> list[str]:
    lines = [f"{names}: {_floor(share):.2f} % of steps" for names, share in rank_profiles(result)]
    return [f"  {'' if number else 'nearest':<12}{line}" for number, line in enumerate(lines)]


def _describe_first(
    first: FirstDifference, options: CheckOptions, is_other: bool = False
) -> list[str]:
    aspect, which = first.kind.aspect, "another" if is_other else "first"
    shrunk, again = first.shrunk, f"  reproduce  {reproduce(options, first.episode)}"
    if shrunk is None:
        return [f"  {aspect}: {which} in episode {first.episode}; {NOT_AGAIN}", again]
    actions = shrunk.program.actions
    width = len(str(len(actions)))
    note = f"shrunk from {first.num_actions} actions to {len(actions)}"
    return [
        f"  {aspect}: {which} in episode {first.episode} ({note})",
        f"  config    {describe_config(shrunk.program.config)}",
        "  program",
        *(f"    {number:>{width}}  {describe(it)}" for number, it in enumerate(actions, 1)),
        *(
            f"  {line}"
            for found in shrunk.findings
            for each in found.differences
            for line in (each.field, f"  spec    {each.expected}", f"  engine  {each.seen}")
        ),
        again,
    ]


def reproduce(options: CheckOptions, episode: int) -> str:
    """Return the command line that plays one episode again."""
    policy = f" --policy {options.policy}" if options.policy else ""
    return (
        f"blockstep score --engine {shlex.quote(options.engine)}{show_path(options)}"
        f" --preset {options.preset}{policy}{show_options(options)}"
        f" --seed {options.seed} --episode {episode}"
    )


def score_to_json(result: ScoreResult, least: float = 0.0) -> dict[str, Any]:
    """Return the score as docs/reference/json.md has it."""
    options = result.options
    return {
        "format": "blockstep-score",
        "version": 1,
        "contract": CONTRACT,
        "against": result.against,
        "profile": options.profile,
        "engine": options.engine,
        "engine_version": result.engine_version,
        "preset": options.preset,
        "policy": None if options.policy is None else str(options.policy),
        "depth": options.max_depth,
        "with": list(options.with_features),
        "without": list(options.without_features),
        "seed": options.seed,
        "episode": options.episode,
        "exit_code": int(result.exit_code(least)),
        "num_events": result.num_events,
        "num_episodes": result.num_episodes,
        "seconds": round(result.seconds, 3),
        "scores": {str(aspect): _score_to_json(result, aspect) for aspect in Aspect},
        "left_out": dict(sorted(result.skipped.items())),
        "nearest": dict(rank_profiles(result)),
        "num_stuck": result.num_stuck,
        "stuck": None if result.stuck is None else finding_to_json(result.stuck),
        "lost": None if result.loss is None else result.loss.message,
    }


def _score_to_json(result: ScoreResult, aspect: Aspect) -> dict[str, Any]:
    found = [
        _first_to_json(it, result.options)
        for it in result.list_firsts()
        if it.kind.aspect is aspect
    ]
    return {
        "total": result.total[aspect],
        "agreed": result.agreed[aspect],
        "share": result.share(aspect),
        "first": found[0] if found else None,
        "others": found[1:],
    }


def _first_to_json(first: FirstDifference, options: CheckOptions) -> dict[str, Any]:
    shrunk = first.shrunk
    findings = () if shrunk is None else shrunk.findings
    return {
        "episode": first.episode,
        "config": shrunk and describe_config(shrunk.program.config),
        "program": shrunk and [describe(action) for action in shrunk.program.actions],
        "differences": [
            difference_to_json(each) for found in findings for each in found.differences
        ],
        "num_shrink_runs": 0 if shrunk is None else shrunk.num_runs,
        "reproduce": reproduce(options, first.episode),
    }


def _make_text(lines: list[str]) -> str:
    """Return lines as HTML; "" if there are none."""
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


BARS = """
.bar { width: 12rem; padding: 0; text-align: left }
.bar i { display: block; height: 1.1rem; background: hsl(210 60% 55%) }
td.n { text-align: right }
"""


def make_score_page(result: ScoreResult) -> str:
    """Return the score as one page of HTML: shares with bars, what was left out, why the engine
    could not continue, the nearest release, and the first differences as programs."""
    options = result.options
    engine = f"{options.engine} {result.engine_version}".strip()
    rows = []
    for aspect in Aspect:
        share = result.share(aspect)
        percent = "none" if share is None else f"{_floor(share):.2f} %"
        bar = f'<i style="width:{100 * (share or 0):.1f}%"></i>'
        counts = (
            f'<td class="n">{result.agreed[aspect]:,}</td><td class="n">{result.total[aspect]:,}'
        )
        rows.append(
            f'<tr><th>{aspect}</th>{counts}</td><td class="n">{percent}</td>'
            f'<td class="bar">{bar}</td></tr>'
        )
    nearest = "".join(
        f'<tr><th>{escape(name)}</th><td class="n">{_floor(share):.2f} %</td></tr>'
        for name, share in rank_profiles(result)
    )
    parts = [
        "<table><thead><tr><th></th><th>agree</th><th>of</th><th>share</th><th></th></tr></thead>",
        f"<tbody>{''.join(rows)}</tbody></table>",
        _make_text([*_list_left_out(result), *_describe_stop(result)]),
        f"<h2>Steps that agree, by release</h2><table>{nearest}</table>" if nearest else "",
        "<h2>First differences</h2>" if result.firsts else "",
        *(
            _make_text(_describe_first(it, options, it in result.others))
            for it in result.list_firsts()
        ),
    ]
    summary = f"{result.num_events:,} events in {result.num_episodes:,} programs"
    return fill_page(
        f"{engine}, against {result.against}",
        f"<p>{summary}, preset {options.preset}, seed {options.seed}</p>{''.join(parts)}",
        BARS,
    )
