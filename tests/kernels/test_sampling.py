"""Sampling: the distribution of drawn tokens, top-k, top-p and min-p, and batch invariance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import NO_TOKEN, sample_tokens, use_backend
from blockstep.kernels.noise import CHOOSE, compute_exponential, compute_keys, compute_uniform
from blockstep.kernels.sampling import compute_log_weights

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHI_SQUARE_MAX = {9: 27.88, 15: 37.70, 255: 330.52}
"""Chi-square values exceeded by chance once in 1,000 times, by degrees of freedom."""
Row = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""


def make(rows: list[Row], vocab_size: int, device: str, seed: int = 0, scale: float = 2) -> Any:
    draw = torch.Generator().manual_seed(seed)
    temperature, top_k, top_p, min_p = zip(*rows, strict=True) if rows else ((), (), (), ())
    call = {
        "logits": torch.randn(len(rows), vocab_size, generator=draw) * scale,
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p, dtype=torch.float32),
        "min_p": torch.tensor(min_p, dtype=torch.float32),
        "seeds": torch.randint(-(2**62), 2**62, (len(rows),), generator=draw),
        "indices": torch.randint(0, 1000, (len(rows),), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in call.items()}


def draw_rows(num_rows: int, vocab_size: int, seed: int) -> list[Row]:
    """Return random parameters of all kinds, each turned off in some rows."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.rand(num_rows, 8, generator=draw).tolist()
    return [
        (
            0.0 if a < 0.15 else 2 * b,
            0 if c < 0.5 else 1 + int(d * d * vocab_size),
            1.0 if e < 0.4 else f,
            0.0 if g < 0.6 else h * 0.2,
        )
        for a, b, c, d, e, f, g, h in numbers
    ]


def get_law(call: Any) -> Tensor:
    names = ("logits", "temperature", "top_k", "top_p", "min_p")
    return compute_log_weights(*(call[name] for name in names)).softmax(-1)


def cut_by_loop(logits: Tensor, row: Row) -> list[bool]:
    """Return which tokens of a row are kept, following the docstring in a loop."""
    temperature, top_k, top_p, min_p = row
    probs: list[float] = (logits.double() / temperature).softmax(-1).tolist()
    values = logits.tolist()
    kept = [p > 0 and p >= min_p * max(probs) * (1 - 1e-6) for p in probs]
    if top_k:
        left = sorted((value for value, k in zip(values, kept, strict=True) if k), reverse=True)
        least = left[min(top_k, len(left)) - 1]
        kept = [k and value >= least for k, value in zip(kept, values, strict=True)]
    total = sum(p for p, k in zip(probs, kept, strict=True) if k)

    def sum_above(value: float) -> float:
        return sum(p for p, k, v in zip(probs, kept, values, strict=True) if k and v > value)

    if top_p < 1:
        kept = [k and sum_above(v) < top_p * total for k, v in zip(kept, values, strict=True)]
    return kept


# The cuts.


@pytest.mark.parametrize("seed", range(4))
def test_the_distribution_keeps_the_tokens_that_the_cuts_keep(seed: int) -> None:
    rows = [row for row in draw_rows(40, 64, seed) if row[0] > 0]
    call = make(rows, 64, "cpu", seed)
    law = get_law(call)
    for logits, row, probs in zip(call["logits"], rows, law, strict=True):
        kept = torch.tensor(cut_by_loop(logits, row))
        assert (probs > 0).tolist() == kept.tolist()
        expected = (logits.double() / row[0]).masked_fill(~kept, -torch.inf).softmax(-1)
        torch.testing.assert_close(probs.double(), expected, rtol=1e-4, atol=1e-7)


TIES = [0.0, 2.0, 1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((1.0, 2, 1.0, 0.0), {1, 2, 3, 4}),  # as likely as the second
        ((1.0, 1, 1.0, 0.0), {1}),
        ((1.0, 0, 0.5, 0.0), {1, 2, 3, 4}),  # the three are cut or kept together
        ((1.0, 0, 0.4, 0.0), {1}),
        ((1.0, 0, 0.0, 0.0), {1}),
        ((1.0, 0, 1.0, 0.3), {1, 2, 3, 4}),
        ((1.0, 0, 1.0, 1.0), {1}),
        ((1.0, 6, 1.0, 0.0), {0, 1, 2, 3, 4, 5}),
    ],
)
def test_equal_tokens_are_cut_or_kept_together(
    backend: str, device: str, row: Row, kept: set[int]
) -> None:
    call = make([row] * 30, 6, device)
    call["logits"][:] = torch.tensor(TIES)
    assert set(sample_tokens(**call).tolist()) <= kept
    assert {*(get_law(call)[0] > 0).nonzero()[:, 0].tolist()} == kept


@pytest.mark.parametrize("signs", [(-0.0, 0.0), (0.0, -0.0)], ids=str)
@pytest.mark.parametrize("least", [-1.0, 0.0])
@pytest.mark.parametrize(
    "row", [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.4, 0.0), (1.0, 0, 1.0, 1.0), (1.0, 1, 0.9, 0.9)]
)
def test_both_zeros_are_equal(
    backend: str, device: str, row: Row, least: float, signs: tuple[float, float]
) -> None:
    call = make([row] * 12, 3, device)
    call["logits"][:] = torch.tensor([signs[0], least, signs[1]])
    assert set(sample_tokens(**call).tolist()) == ({0, 2} if least else {0, 1, 2})


def test_top_p_applies_to_the_tokens_left_by_earlier_cuts(backend: str, device: str) -> None:
    """top_k leaves 0.4 and 0.35, of which the first has a share of 0.53."""
    call = make([(1.0, 2, 0.6, 0.0)] * 30, 4, device)
    call["logits"][:] = torch.tensor([0.4, 0.35, 0.15, 0.1]).log()
    assert set(sample_tokens(**call).tolist()) == {0, 1}
    call["top_p"][:] = 0.5
    assert set(sample_tokens(**call).tolist()) == {0}


# Both implementations.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 9000])
def test_both_implementations_draw_the_same(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    """Greedy, drawn and cut rows are mixed, and a third of the tokens are masked."""
    pytest.importorskip("triton")
    call = make(draw_rows(16, vocab_size, vocab_size), vocab_size, device, seed=4)
    call["logits"][:, 1::3] = float("-inf")
    call["logits"] = call["logits"].to(dtype)
    drawn = []
    for backend in ("torch", "triton"):
        with use_backend(backend):
            drawn.append(sample_tokens(**call).tolist())
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= set(range(0, vocab_size, 3)) | set(range(2, vocab_size, 3))


@pytest.mark.parametrize("num_copied_max", [4, 64])
def test_a_cut_may_keep_more_tokens_than_are_copied_out(
    monkeypatch: pytest.MonkeyPatch, device: str, num_copied_max: int
) -> None:
    pytest.importorskip("triton")
    from blockstep.kernels import sampling_triton

    monkeypatch.setattr(sampling_triton, "NUM_COPIED_MAX", num_copied_max)
    call = make(draw_rows(24, 1500, 3), 1500, device, seed=5)
    with use_backend("triton"):
        found = sample_tokens(**call)
    with use_backend("torch"):
        assert found.tolist() == sample_tokens(**call).tolist()


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e30])
def test_the_threshold_is_found_at_any_scale(backend: str, device: str, scale: float) -> None:
    call = make([(scale, 5, 1.0, 0.0)] * 20, 300, device, scale=scale)
    best = call["logits"].topk(5).indices
    tokens = sample_tokens(**call)
    assert bool((best == tokens[:, None]).any(1).all())
    assert len(set((best == tokens[:, None]).int().argmax(1).tolist())) > 1


# Greedy rows, and rows without a token.


def test_the_lowest_id_wins_a_tie(backend: str, device: str) -> None:
    call = make([(0.0, 3, 0.5, 0.5)] * 2, 10_000, device)
    call["logits"][0] = 0
    call["logits"][1, [9_000, 4_000]] = 50.0
    assert sample_tokens(**call).tolist() == [0, 4_000]


@pytest.mark.parametrize("row", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.1)])
def test_rows_that_overflowed_have_no_token(backend: str, device: str, row: Row) -> None:
    call = make([row] * 5, 50, device)
    for index, value in enumerate([float("nan"), torch.inf, -torch.inf]):
        call["logits"][index, 7] = value
    call["logits"][3] = -torch.inf
    call["logits"][4, :49] = -torch.inf
    tokens = sample_tokens(**call).tolist()
    assert tokens[:2] == [NO_TOKEN, NO_TOKEN]
    assert tokens[2] not in (7, NO_TOKEN)
    assert tokens[3:] == [NO_TOKEN, 49]


def test_a_batch_without_rows_gives_no_tokens(backend: str, device: str) -> None:
    assert sample_tokens(**make([], 5, device)).tolist() == []


def test_logits_are_not_changed_and_may_be_strided(backend: str, device: str) -> None:
    call = make(draw_rows(6, 100, 1), 100, device)
    wide = torch.full((6, 130), 99.0, device=device)
    wide[:, :100] = call["logits"]
    expected = sample_tokens(**call)
    before = wide.clone()
    assert torch.equal(sample_tokens(**{**call, "logits": wide[:, :100]}), expected)
    assert torch.equal(wide, before)


def test_a_row_does_not_depend_on_its_batch(backend: str, device: str) -> None:
    call = make(draw_rows(12, 90, 2), 90, device, seed=3)
    together = sample_tokens(**call).tolist()
    for row, token in enumerate(together):
        alone = {name: tensor[row : row + 1] for name, tensor in call.items()}
        assert sample_tokens(**alone).tolist() == [token]


def test_tokens_depend_on_seed_and_index(backend: str, device: str) -> None:
    call = make([(1.0, 0, 1.0, 0.0)] * 3, 1000, device)
    call["logits"][:] = 0
    call["seeds"][:] = torch.tensor([5, 5, 6])
    call["indices"][:] = 9
    first = sample_tokens(**call).tolist()
    assert first[0] == first[1] != first[2]
    call["indices"][:] = 10
    assert sample_tokens(**call).tolist()[0] != first[0]


def test_cuts_that_cut_nothing_change_nothing(backend: str, device: str) -> None:
    """Rows with and without cuts use different code, but the same clocks."""
    call = make([(0.7, 0, 1.0, 0.0)] * 20, 300, device)
    plain = sample_tokens(**call).tolist()
    call["min_p"][:] = 1e-30
    assert sample_tokens(**call).tolist() == plain


# The law.


def compute_chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law * counts.sum()
    assert int(counts[law == 0].sum()) == 0
    used = law > 0
    return float(((counts - expected)[used] ** 2 / expected[used]).sum())


def count_tokens(row: Row, num_draws: int, device: str, *, by_index: bool) -> tuple[Tensor, Tensor]:
    """Return how often each of 16 tokens is drawn, and its probability."""
    call = make([row], 16, device, seed=8, scale=1.5)
    law = get_law(call)[0].cpu().double()
    many = {name: tensor.expand(num_draws, *tensor.shape[1:]) for name, tensor in call.items()}
    # Columns must be contiguous, and one of them counts.
    many = {name: x if name == "logits" else x.contiguous() for name, x in many.items()}
    many["indices" if by_index else "seeds"] = torch.arange(num_draws, device=device)
    return torch.bincount(sample_tokens(**many).cpu(), minlength=16).double(), law


@pytest.mark.parametrize("by_index", [False, True], ids=["seeds", "indices"])
@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.3, 10, 1.0, 0.0)])
def test_many_draws_have_the_distribution(device: str, row: Row, by_index: bool) -> None:
    counts, law = count_tokens(row, 300_000, device, by_index=by_index)
    degrees = int((law > 0).sum()) - 1
    assert compute_chi_square(counts, law) < CHI_SQUARE_MAX[degrees]


def test_a_wrong_distribution_is_noticed(device: str) -> None:
    """A negative control: the distribution of another temperature."""
    counts, _ = count_tokens((1.0, 0, 1.0, 0.0), 300_000, device, by_index=False)
    _, law = count_tokens((1.05, 0, 1.0, 0.0), 1, device, by_index=False)
    assert compute_chi_square(counts, law) > 10 * CHI_SQUARE_MAX[15]


def test_clocks_are_exponential_down_to_the_smallest() -> None:
    keys = compute_keys(torch.arange(1_000)[:, None], torch.tensor(3), CHOOSE)
    clocks = compute_exponential(keys, torch.arange(2_000))
    assert float(clocks.min()) > 0
    uniform = 1 - (-clocks.double()).exp()
    counts = torch.histc(uniform.float(), bins=256, min=0, max=1).double()
    assert compute_chi_square(counts, torch.full((256,), 1 / 256).double()) < CHI_SQUARE_MAX[255]
    small = clocks[clocks < 256e-6].double() * 1e6
    counts = torch.histc(small.float(), bins=256, min=0, max=256).double()
    assert len(small) > 400
    expected = torch.full((16,), 1 / 16).double()
    assert compute_chi_square(counts.view(16, 16).sum(1), expected) < CHI_SQUARE_MAX[15]


def test_neighbouring_seeds_and_places_are_independent() -> None:
    size = 10_000
    one, seeds = torch.ones((), dtype=torch.int64), torch.arange(size)
    here = compute_uniform(seeds, 3 * one, CHOOSE, one)
    for there in (
        compute_uniform(seeds + 1, 3 * one, CHOOSE, one),
        compute_uniform(seeds, 4 * one, CHOOSE, one),
        compute_uniform(seeds, 3 * one, CHOOSE, 2 * one),
    ):
        cells = (here * 16).long() * 16 + (there * 16).long()
        counts = torch.bincount(cells, minlength=256).double()
        law = torch.full((256,), 1 / 256).double()
        assert compute_chi_square(counts, law) < CHI_SQUARE_MAX[255]


# Refusals.


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": ({"top_k": torch.zeros(2).int()}, ValueError, "top_k: dimension 0"),
    "vocabulary": ({"logits": torch.zeros(3, 0)}, ValueError, "logits: must have a token"),
    "logits": ({"logits": torch.zeros(3, 9).double()}, TypeError, "logits: must be float32 or"),
    "columns": ({"logits": torch.zeros(9, 3).T}, ValueError, "logits: its last dimension"),
    "top_k": ({"top_k": torch.tensor([0, -1, 0]).int()}, ValueError, "top_k: must hold numbers"),
    "top_p": ({"top_p": torch.tensor([1.0, 1.5, 1.0])}, ValueError, "top_p: must be from 0 to 1"),
    "min_p": ({"min_p": torch.tensor([0, -0.1, 0])}, ValueError, "min_p: must be from 0 to 1"),
    "temperature": (
        {"temperature": torch.tensor([1.0, -1.0, 0.0])}, ValueError, "temperature: must be finite",
    ),
    "NaN": (
        {"temperature": torch.tensor([1.0, float("nan"), 0.0])}, ValueError, "temperature: must",
    ),
    "seeds": ({"seeds": torch.zeros(3)}, TypeError, "seeds: must be int64, but is float32"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sample_tokens(**{**make([(1.0, 0, 1.0, 0.0)] * 3, 9, "cpu"), **change})
