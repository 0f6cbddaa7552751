"""Table: proofs for people, for programs and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version as version_of
from itertools import groupby

from blockstep.conformance.prove.law import Claim, Law
from blockstep.conformance.prove.runner import Proof, TwinProof, Verdict

SOLVERS = ("crosshair-tool", "z3-solver")


def list_rows(proofs: Sequence[Proof]) -> list[dict[str, object]]:
    """One row for each law."""
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
                "twins": f"{refuted} of {len(proof.twins)} refuted",
            }
        )
    return rows


def list_their_rows(proofs: Sequence[Proof]) -> list[dict[str, object]]:
    """Rules of vLLM 0.19.1 beside the laws that they break, with the smallest integers."""
    return [
        {
            "vLLM 0.19.1's rule, in our words": twin.name,
            "upstream": twin.theirs,
            "verdict": twin.answer.verdict,
            "broken by": show_break(twin),
        }
        for _, twin in list_theirs(proofs)
    ]


def list_theirs(proofs: Sequence[Proof]) -> list[tuple[Proof, TwinProof]]:
    """Each twin that is vLLM 0.19.1's own rule, with its law."""
    return [(proof, twin) for proof in proofs for twin in proof.twins if twin.theirs]


def show_break(twin: TwinProof) -> str:
    """The arguments that break the law with this twin."""
    return twin.answer.detail.removeprefix("broken by ")


def summarize(proofs: Sequence[Proof], wall_seconds: float) -> str:
    """One line for all."""
    confirmed = sum(proof.answer.verdict is Verdict.CONFIRMED for proof in proofs)
    twins = [twin for proof in proofs for twin in proof.twins]
    refuted = sum(twin.answer.verdict is Verdict.REFUTED for twin in twins)
    cpu_seconds = sum(proof.seconds for proof in proofs)
    return (
        f"{confirmed} of {len(proofs)} laws confirmed, {refuted} of {len(twins)} twins refuted; "
        f"{cpu_seconds:.0f} s of CPU, {wall_seconds:.0f} s in all"
    )


def proofs_to_json(proofs: Sequence[Proof], exit_code: int, wall_seconds: float) -> object:
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
        "twins": [
            {
                "name": twin.name,
                "upstream": twin.theirs or None,
                "verdict": str(twin.answer.verdict),
                "broken_by": list(twin.answer.arguments),
                "seconds": round(twin.answer.seconds, 2),
                "paths": twin.answer.num_paths,
            }
            for twin in proof.twins
        ],
    }


def laws_page(proofs: Sequence[Proof], laws: Mapping[str, Law], command: str) -> str:
    """The table as a page of the documentation."""
    solvers = ", ".join(f"{name} {version_of(name)}" for name in SOLVERS)
    lines = [
        "# Laws",
        "",
        "Sentences about the specification, proved for all integers that satisfy their",
        "assumptions. [What is proved](../explanation/proofs.md) says how to read them. Each",
        "mistake stands behind the law that it breaks, with the smallest numbers that show it.",
        "",
        f"Made by `{command} --markdown FILE` with {solvers}. Seconds are CPU time for a law and",
        "its mistakes.",
        "",
        "## Rules of vLLM 0.19.1",
        "",
        "In our words, put in the place of ours: each breaks a law.",
        "",
        "| rule | upstream | the law that it breaks | broken by |",
        "|---|---|---|---|",
    ]
    for proof, twin in list_theirs(proofs):
        lines.append(
            f"| {twin.name} | {twin.theirs} | {proof.sentence} | {_code(show_break(twin))} |"
        )
    for room, proofs_of_room in groupby(proofs, key=lambda proof: laws[proof.name].room):
        lines += [
            "",
            f"## {room}",
            "",
            "| law | property | verdict | witness | mistakes that break it | paths | seconds |",
            "|---|---|---|---|---|---|---|",
            *(_page_row(proof, laws[proof.name].check) for proof in proofs_of_room),
        ]
    return "\n".join(lines) + "\n"


def _page_row(proof: Proof, check: Claim) -> str:
    why = " ".join((check.__doc__ or "").split())
    twins = "<br>".join(f"{twin.name}: {_code(show_break(twin))}" for twin in proof.twins)
    cells = (
        f"**{proof.sentence}.** {why}",
        " ".join(proof.property_ids),
        str(proof.answer.verdict),
        _code(proof.witness),
        twins,
        f"{proof.answer.num_paths:,}",
        f"{proof.seconds:.1f}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
