"""Random rollouts with every kind of group, as rows for the plain reference and as batches for the
methods."""

import math
import random

import torch

from megatron_rl.loss import Credit, ResponseBatch, TokenBatch
from megatron_rl.loss.segments import group_accuracy
from tests.unit.loss.named import PROGRESS
from tests.unit.loss.reference import Row
from tests.unit.loss.token_reference import CHOSEN, END_START, peaks

LIMIT = 12  # longest response, tokens
# correct responses of each group: mixed, all right, all wrong, 1 of 8, 7 of 8, small ones
CASES = (
    (1, 0, 0, 1),
    (1,) * 4,
    (0,) * 5,
    (1, *(0,) * 7),
    (*(1,) * 7, 0),
    (0, 1, 1, 0, 1),
    (1, 0, 0, 0),
    (0, 0, 1, 0, 1, 1),
)


def rollout(seed: int) -> list[Row]:
    """Rewards 0.9 accuracy + 0.1 format, in [0, 1]; no two prompts share an entropy or a
    confidence."""
    source = random.Random(seed)
    rows = []
    for group, correct in enumerate(CASES):
        for right in correct:
            form = group in (1, 6) or source.random() < 0.7
            length = source.choice([1, 2, 3, 5, LIMIT])
            rows.append(
                Row(
                    0.9 * right + 0.1 * form,
                    bool(right),
                    group,
                    length,
                    -source.random(),
                    float(group * 1.7 % 3 + 0.1 * group),
                )
            )
    return rows


def response_batch(rows: list[Row], dtype: torch.dtype = torch.float64) -> ResponseBatch:
    return ResponseBatch(
        rewards=torch.tensor([row.reward for row in rows], dtype=dtype),
        correct=torch.tensor([row.correct for row in rows]),
        group_ids=torch.tensor([row.group for row in rows]),
        response_tokens=torch.tensor([row.length for row in rows]),
        columns=response_columns(rows, dtype),
    )


def response_columns(rows: list[Row], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All that signals can give of these rows."""

    def column(values: list[float], dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return {
        "mean_logprobs": column([row.mean_logprob for row in rows]),
        "sum_logprobs": column([row.mean_logprob * row.length for row in rows]),
        "visual_entropy": column([row.visual_entropy for row in rows]),
        "kl": column([0.01 * row.length for row in rows]),
        "progress": torch.tensor(PROGRESS, dtype=torch.float64),
        "prompt_confidence": column([row.prompt_confidence for row in rows]),
        "response_confidence": column([row.response_confidence for row in rows]),
        "visits": torch.tensor([row.visits for row in rows]),
        "history_mean": column([row.history_mean for row in rows], torch.float64),
        "history_var": column([0.2 for row in rows], torch.float64),
        "is_demonstration": torch.tensor([row.given for row in rows]),
        "mean_entropy": column([row.mean_entropy for row in rows]),
        "answer_probability": column([math.exp(2 * row.mean_logprob) for row in rows]),
    }


def token_batch(
    rows: list[Row],
    credit: Credit,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.4,
) -> TokenBatch:
    """Old, current and reference logprobs about ``scale`` apart, so that clips bind."""
    lengths = torch.tensor([row.length for row in rows])
    ids = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    noise = torch.randn(
        4, ids.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    old = -1.5 + 0.3 * noise[0]
    source = torch.Generator().manual_seed(seed + 100)
    others = torch.rand(ids.numel(), 4, generator=source, dtype=torch.float64)
    moved = torch.zeros(len(rows), dtype=torch.float64).index_add(0, ids, scale * noise[1])
    correct = torch.tensor([row.correct for row in rows])
    groups = torch.tensor([row.group for row in rows])
    return TokenBatch(
        logprobs=(old + scale * noise[1]).to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        response_index=ids,
        loss_mask=torch.ones(ids.numel(), dtype=torch.bool),
        advantages=credit.advantages,
        kl_weights=credit.kl_weights,
        ref_logprobs=(old + scale * noise[2]).to(dtype),
        sampler_logprobs=(old + 0.1 * noise[3]).to(dtype),
        correct=correct,
        group_ids=groups,
        token_columns={
            "entropy": (1 + 0.1 * noise[3].abs()).to(dtype),
            "topk_logprobs": -others[:, :3].sort(1).values.to(dtype),
            # Three tokens of at most a third each.
            "likely_logprobs": -1.1 - others[:, :3].to(dtype),
            "sampler_likely_logprobs": -1.1 - others[:, 1:].to(dtype),
            "teacher_likely_logprobs": -1.1 - others[:, [3, 0, 2]].to(dtype),
            "teacher_logprobs": (old - 2 * others[:, 2]).to(dtype),
            "later_turns": torch.arange(ids.numel()) % 3,
            "relative_place": torch.cat([torch.arange(n).to(dtype) / n for n in lengths]),
            "turn_advantages": (others[:, 1] - 0.5).to(dtype),
            "is_argmax": others[:, 3] > 0.5,
            "masked_logprobs": (old - 3 * others[:, 1]).to(dtype).requires_grad_(),
            "nucleus_entropy": others[:, 0].to(dtype),
            "token_place": torch.arange(ids.numel()),
        },
        columns={
            "log_ratio_sums": moved,
            "is_demonstration": torch.tensor([row.given for row in rows]),
            "end_logprobs": torch.tensor([row.end_logprob for row in rows], dtype=dtype),
            "end_index": torch.arange(len(rows)),
            "end_start": torch.tensor(END_START, dtype=torch.float64),
            "was_cut": torch.tensor([row.was_cut for row in rows]),
            "peaks": torch.tensor(peaks(others[:, 0].to(dtype).tolist()), dtype=torch.float64),
            "group_accuracy": group_accuracy(correct, groups),
            "chosen_places": torch.tensor([-1, *CHOSEN]),
        },
    )


def per_response(values: torch.Tensor, rows: list[Row]) -> list[list[float]]:
    return [part.tolist() for part in values.detach().split([row.length for row in rows])]
