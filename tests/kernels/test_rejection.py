"""Rejection sampling: greedy and drawn tokens, their distribution, and batch invariance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import rejection_sample, use_backend
from blockstep.kernels.noise import compute_mix, compute_uniform, to_int64


def make(
    num_drafts: list[int], vocab_size: int, device: str, temperature: list[float], seed: int = 0
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    total = sum(num_drafts)
    logits = torch.randn(total + len(num_drafts), vocab_size, generator=draw) * 2
    call = {
        "target_logits": logits,
        "draft_token_ids": torch.randint(0, vocab_size, (total,), generator=draw),
        "cu_num_drafts": torch.tensor([0, *num_drafts]).cumsum(0).int(),
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "seeds": torch.randint(-(2**62), 2**62, (len(num_drafts),), generator=draw),
        "positions": torch.randint(0, 1000, (len(num_drafts),), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in call.items()}


def sample(call: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each sequence, after checking and cutting the padding."""
    token_ids, num_sampled = rejection_sample(**call)
    assert (token_ids.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
    rows = [
        row[:count] for row, count in zip(token_ids.tolist(), num_sampled.tolist(), strict=True)
    ]
    padded = [row + [-1] * (token_ids.shape[1] - len(row)) for row in rows]
    assert token_ids.tolist() == padded
    return rows


@pytest.mark.parametrize("vocab_size", [1, 7, 3000])
def test_greedy_keeps_the_drafts_that_are_argmax(
    backend: str, device: str, vocab_size: int
) -> None:
    num_drafts = [0, 3, 1, 2, 0, 4]
    call = make(num_drafts, vocab_size, device, [0.0] * 6)
    best = call["target_logits"].argmax(-1).tolist()
    drafts, first = call["draft_token_ids"], 0
    expected = []
    for s, count in enumerate(num_drafts):
        start = first + s
        keep = (s * 7) % (count + 1)
        for index in range(count):
            right = best[start + index]
            wrong = (right + 1) % vocab_size
            drafts[first + index] = right if index != keep else wrong
        stop = keep if vocab_size > 1 else count
        expected.append(best[start : start + stop + 1])
        first += count
    assert sample(call) == expected


def test_the_lowest_id_wins_a_tie(backend: str, device: str) -> None:
    call = make([1, 0], 2500, device, [0.0, 0.0])
    call["target_logits"][:] = 0
    call["target_logits"][:, [1, 4, 2400]] = 1.0
    call["draft_token_ids"][:] = 1
    assert sample(call) == [[1, 1], [1]]


def test_the_lowest_id_wins_a_tie_across_programs(backend: str, device: str) -> None:
    call = make([1], 40_000, device, [0.0])
    call["target_logits"][:, [39_999, 20_000, 17_000]] = 50.0
    call["draft_token_ids"][:] = 17_000
    assert sample(call) == [[17_000, 17_000]]
    call["target_logits"][1] = -torch.inf
    call["target_logits"][0, 16_383] = 50.0
    assert sample(call) == [[16_383]]
    call["draft_token_ids"][:] = 16_383
    assert sample(call) == [[16_383, 0]]


def test_a_batch_without_sequences_gives_no_tokens(backend: str, device: str) -> None:
    assert sample(make([], 5, device, [])) == []


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_both_implementations_draw_the_same(
    device: str, with_probs: bool, dtype: torch.dtype
) -> None:
    """Greedy and drawn rows are mixed, with masked tokens; equal seeds give equal tokens."""
    pytest.importorskip("triton")
    call = make([2, 0, 3, 1, 0, 2], 1100, device, [0.0, 0.7, 1.0, 2.0, 0.0, 0.3], seed=4)
    call["target_logits"][:, ::3] = float("-inf")
    call["target_logits"] = call["target_logits"].to(dtype)
    call["draft_token_ids"][2:5] = call["target_logits"].argmax(-1)[4:7]
    if with_probs:
        draw = torch.Generator().manual_seed(5)
        call["draft_probs"] = torch.randn(8, 1100, generator=draw).softmax(-1).to(device)
    drawn = []
    for backend in ("torch", "triton"):
        with use_backend(backend):
            drawn.append(sample(call))
    assert drawn[0] == drawn[1]


def test_a_row_does_not_depend_on_its_batch(backend: str, device: str) -> None:
    num_drafts, temperature = [2, 0, 3, 1], [0.8, 1.0, 0.0, 1.5]
    call = make(num_drafts, 40, device, temperature, seed=3)
    together = sample(call)
    starts = call["cu_num_drafts"].tolist()
    for s, count in enumerate(num_drafts):
        first = starts[s] + s
        alone = {
            "target_logits": call["target_logits"][first : first + count + 1],
            "draft_token_ids": call["draft_token_ids"][starts[s] : starts[s] + count],
            "cu_num_drafts": torch.tensor([0, count], dtype=torch.int32, device=device),
            **{name: call[name][s : s + 1] for name in ("temperature", "seeds", "positions")},
        }
        assert sample(alone) == [together[s]]


def test_tokens_depend_on_seed_and_position(device: str) -> None:
    call = make([0, 0, 0], 1000, device, [1.0] * 3)
    call["target_logits"][:] = 0
    call["seeds"][:] = torch.tensor([5, 5, 6])
    call["positions"][:] = torch.tensor([9, 9, 9])
    first = sample(call)
    assert first[0] == first[1] != first[2]
    call["positions"][:] = 10
    assert sample(call)[0] != first[0]


# The law.

NUM_DRAWS = 1_000_000
CHI_SQUARE_MAX = {3: 16.27, 4: 18.47, 19: 43.82}
"""Chi-square values exceeded by chance once in 1,000 times, by degrees of freedom."""
TARGET = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.1, 0.3, 0.1, 0.4]], dtype=torch.float64)
DRAFT = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.4], dtype=torch.float64)


def compute_chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law * counts.sum()
    assert int(counts[law == 0].sum()) == 0
    used = law > 0
    return float(((counts - expected)[used] ** 2 / expected[used]).sum())


def draw_two(drafts: Tensor, draft_probs: Tensor | None, device: str) -> Tensor:
    """Return first and second tokens of `NUM_DRAWS` sequences with one draft each."""
    logits = TARGET.log().float().repeat(len(drafts), 1)
    call = {
        "target_logits": logits, "draft_token_ids": drafts,
        "cu_num_drafts": torch.arange(len(drafts) + 1, dtype=torch.int32),
        "temperature": torch.ones(len(drafts)),
        "seeds": torch.arange(len(drafts)), "positions": torch.full((len(drafts),), 17),
        "draft_probs": None if draft_probs is None else draft_probs.repeat(len(drafts), 1),
    }  # fmt: skip
    moved = {name: None if x is None else x.to(device) for name, x in call.items()}
    return rejection_sample(**moved).token_ids.cpu()


@pytest.mark.parametrize("drafter", ["drawn", "always 2"])
def test_a_million_draws_have_the_target_distribution(device: str, drafter: str) -> None:
    """First tokens follow the first row; second ones, after an accepted draft, the second row."""
    if drafter == "drawn":
        draw = torch.Generator().manual_seed(11)
        drafts = DRAFT.multinomial(NUM_DRAWS, replacement=True, generator=draw)
        tokens = draw_two(drafts, DRAFT.float()[None], device)
        accepted = float(torch.minimum(TARGET[0], DRAFT).sum())
    else:
        tokens = draw_two(torch.full((NUM_DRAWS,), 2), None, device)
        accepted = float(TARGET[0, 2])
    counts = torch.bincount(tokens[:, 0], minlength=5).double()
    assert compute_chi_square(counts, TARGET[0]) < CHI_SQUARE_MAX[3]
    kept = tokens[tokens[:, 1] >= 0, 1]
    assert (
        compute_chi_square(torch.bincount(kept, minlength=5).double(), TARGET[1])
        < CHI_SQUARE_MAX[4]
    )
    assert abs(len(kept) / NUM_DRAWS - accepted) < 4 * (0.25 / NUM_DRAWS) ** 0.5


def test_pairs_of_draws_are_independent(device: str) -> None:
    """First and second tokens fill 4 x 5 cells, so correlated streams would show."""
    draw = torch.Generator().manual_seed(12)
    drafts = TARGET[0].multinomial(NUM_DRAWS, replacement=True, generator=draw)
    tokens = draw_two(drafts, TARGET[0].float()[None], device)
    kept = tokens[tokens[:, 1] >= 0]
    assert len(kept) > 0.999 * NUM_DRAWS  # p equals q up to rounding
    cells = torch.bincount(kept[:, 0] * 5 + kept[:, 1], minlength=25).double()
    law = (TARGET[0][:, None] * TARGET[1]).view(-1)
    assert compute_chi_square(cells, law) < CHI_SQUARE_MAX[19]


def test_a_wrong_distribution_is_noticed(device: str) -> None:
    """A negative control: drafts are drawn from another distribution than `draft_probs`."""
    draw = torch.Generator().manual_seed(11)
    drafts = DRAFT.multinomial(NUM_DRAWS, replacement=True, generator=draw)
    tokens = draw_two(drafts, TARGET[0].float()[None], device)
    counts = torch.bincount(tokens[:, 0], minlength=5).double()
    assert compute_chi_square(counts, TARGET[0]) > 100 * CHI_SQUARE_MAX[3]


# The numbers.


def test_noise_is_splitmix64() -> None:
    """The expected words are the first outputs of the authors' program, started at 0."""
    state = torch.tensor([to_int64(0x9E3779B97F4A7C15 * k % 2**64) for k in (1, 2, 3)])
    words = [word % 2**64 for word in compute_mix(state).tolist()]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_is_uniform_and_never_0_or_1() -> None:
    seeds = torch.arange(100)[:, None]
    uniform = compute_uniform(seeds, seeds * 7, 1, torch.arange(10_000))
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1
    counts = torch.histc(uniform.float(), bins=20, min=0, max=1).double()
    assert compute_chi_square(counts, torch.full((20,), 0.05).double()) < CHI_SQUARE_MAX[19]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": (
        {"target_logits": torch.zeros(4, 9)}, ValueError,
        r"target_logits: must be \[num_drafts \+ num_seqs, vocab_size\] = \[3 \+ 2, 1 or more\]",
    ),
    "offsets": (
        {"cu_num_drafts": torch.tensor([0, 1, 2], dtype=torch.int32)}, ValueError,
        "cu_num_drafts: must ascend from 0 to 3",
    ),
    "token": (
        {"draft_token_ids": torch.tensor([1, 9, 0])}, ValueError,
        "draft_token_ids: must hold token ids in 0 <= x < 9, but holds 9",
    ),
    "temperature": ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "temperature: must be"),
    "NaN": ({"temperature": torch.tensor([1.0, float("nan")])}, ValueError, "temperature: must be"),
    "seeds": ({"seeds": torch.zeros(2)}, TypeError, "seeds: must be int64, but is float32"),
    "probs": ({"draft_probs": torch.zeros(3, 8)}, ValueError, "draft_probs: dimension 1"),
    "width": ({"max_num_drafts": 1}, ValueError, "max_num_drafts: must be at least 2"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rejection_sample(**{**make([2, 1], 9, "cpu", [1.0, 0.0]), **change})
