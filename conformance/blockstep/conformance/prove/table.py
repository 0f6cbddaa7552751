"""Proofs as a table, as JSON and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version as version_of
from itertools import groupby
from typing import Any

from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.runner import Proof, Verdict, WrongRuleProof, show_call

SOLVERS = ("crosshair-tool", "z3-solver")


def list_rows(proofs: Sequence[Proof]) -> list[dict[str, object]]:
    """Return one row for each law."""
    rows: list[dict[str, object]] = []
    for proof in proofs:
        refuted = sum(twin.answer.verdict is Verdict.REFUTED for twin in proof.twins)
        rows.append(
            {
                "law": proof.name,
                "property": proof.property_ids,
                "verdict": proof.answer.verdict,
                "seconds": f"{proof.seconds:.1f}",
                "paths": f"{proof.answer.num_paths:,}",
                "witness": proof.witness,
                "mutants": f"{proof.mutants.num_refuted} of {proof.mutants.num_tried} refuted",
                "mistakes": f"{refuted} of {len(proof.twins)} refuted" if proof.twins else "",
            }
        )
    return rows


def list_their_rows(proofs: Sequence[Proof]) -> list[dict[str, object]]:
    """Return rows for the rules of vLLM 0.19.1, with the smallest integers that break the law."""
    return [
        {
            "vLLM 0.19.1's rule, in our words": twin.name,
            "upstream": twin.theirs,
            "verdict": twin.answer.verdict,
            "broken by": show_break(twin),
        }
        for _, twin in list_theirs(proofs)
    ]


def list_theirs(proofs: Sequence[Proof]) -> list[tuple[Proof, WrongRuleProof]]:
    """Return each mutant that is a rule of vLLM 0.19.1, with its law."""
    return [(proof, twin) for proof in proofs for twin in proof.twins if twin.theirs]


def show_break(twin: WrongRuleProof) -> str:
    """Return the arguments that break the law with this mutant."""
    return twin.answer.detail.removeprefix("broken by ")


def summarize(proofs: Sequence[Proof], wall_seconds: float) -> str:
    """Return one line for all proofs."""
    confirmed = sum(proof.answer.verdict is Verdict.CONFIRMED for proof in proofs)
    twins = [twin for proof in proofs for twin in proof.twins]
    refuted = sum(twin.answer.verdict is Verdict.REFUTED for twin in twins)
    broken = sum(proof.mutants.num_refuted for proof in proofs)
    tried = sum(proof.mutants.num_tried for proof in proofs)
    cpu_seconds = sum(proof.seconds for proof in proofs)
    return (
        f"{confirmed} of {len(proofs)} laws confirmed, {refuted} of {len(twins)} mistakes and "
        f"{broken} of {tried} mutants refuted; "
        f"{cpu_seconds:.0f} s of CPU, {wall_seconds:.0f} s in all"
    )


def proofs_to_json(proofs: Sequence[Proof], exit_code: int, wall_seconds: float) -> dict[str, Any]:
    """The same for programs."""
    return {
        "format": "blockstep-prove",
        "version": 1,
        "exit_code": exit_code,
        "solvers": {name: version_of(name) for name in SOLVERS},
        "seconds": round(wall_seconds, 1),
        "laws": [_law_to_json(proof) for proof in proofs],
    }


def _law_to_json(proof: Proof) -> dict[str, object]:
    return {
        "name": proof.name,
        "sentence": proof.sentence,
        "properties": list(proof.property_ids),
        "verdict": str(proof.answer.verdict),
        "problem": proof.problem or None,
        "seconds": round(proof.seconds, 2),
        "paths": proof.answer.num_paths,
        "witness": proof.witness,
        "mutants": {
            "tried": proof.mutants.num_tried,
            "refuted": proof.mutants.num_refuted,
            "first": None if proof.mutants.first is None else _wrong_to_json(proof.mutants.first),
        },
        "twins": [_wrong_to_json(twin) for twin in proof.twins],
    }


def _wrong_to_json(wrong: WrongRuleProof) -> dict[str, object]:
    return {
        "name": wrong.name,
        "upstream": wrong.theirs or None,
        "verdict": str(wrong.answer.verdict),
        "broken_by": list(wrong.answer.arguments),
        "seconds": round(wrong.answer.seconds, 2),
        "paths": wrong.answer.num_paths,
    }


def laws_page(result: Mapping[str, Any], laws: Mapping[str, Law]) -> str:
    """Return Markdown tables of the results of a run: what `proofs_to_json` returns.

    They are in the order of `laws`. A law that is gone since the run is left out; one that is newer
    is named at the end.
    """
    by_name = {proof["name"]: proof for proof in result["laws"]}
    proofs = [by_name[name] for name in laws if name in by_name]
    lines = [
        "## Rules of vLLM 0.19.1",
        "",
        "Each of these rules, put in the place of ours, breaks a law.",
        "",
        "| rule | upstream | the law that it breaks | broken by |",
        "|---|---|---|---|",
    ]
    for proof in proofs:
        law = laws[proof["name"]]
        lines += [
            f"| {twin['name']} | {twin['upstream']} | {law.sentence} | "
            f"{_code(show_call(law.check, twin['broken_by']))} |"
            for twin in proof["twins"]
            if twin["upstream"]
        ]
    for room, proofs_of_room in groupby(proofs, key=lambda proof: laws[proof["name"]].room):
        lines += [
            "",
            f"## {room}",
            "",
            "| law | property | verdict | witness | broken by | paths | seconds |",
            "|---|---|---|---|---|---|---|",
            *(_page_row(proof, laws[proof["name"]]) for proof in proofs_of_room),
        ]
    if newer := [name for name in laws if name not in {proof["name"] for proof in proofs}]:
        lines += ["", f"Not in this run: {', '.join(newer)}."]
    return "\n".join(lines) + "\n"


def _page_row(proof: Mapping[str, Any], law: Law) -> str:
    why = " ".join((law.check.__doc__ or "").split())
    mutants = proof.get("mutants", {"first": None})  # older runs tried none
    first = [] if mutants["first"] is None else [mutants["first"]]
    parts = [f"{mutants['refuted']} of {mutants['tried']} mutants"] if first else []
    parts += [
        f"{wrong['name']}: {_code(show_call(law.check, wrong['broken_by']))}"
        for wrong in (*first, *proof["twins"])
    ]
    cells = (
        f"**{law.sentence}.** {why}",
        " ".join(proof["properties"]),
        proof["verdict"],
        _code(proof["witness"]),
        "<br>".join(parts),
        f"{proof['paths']:,}",
        f"{proof['seconds']:.1f}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
