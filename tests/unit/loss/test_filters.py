"""Filters and reward penalties by hand."""

import torch

from megatron_rl.loss.per_response import filters
from megatron_rl.loss.segments import segments_of
from tests.unit.loss.groups import flags, same, vector


def test_one_demonstration_by_hand() -> None:
    """The surer of two, the sampled ones whatever their entropy, the first of two that are alike;
    groups that lie among each other."""
    groups = segments_of(torch.tensor([0, 2, 0, 1, 2, 0, 1, 2]))
    given = flags(1, 1, 1, 0, 1, 0, 0, 1)
    entropy = vector(2, 3, 1, 0, 1, 0.5, 9, 1)
    kept = filters.ChosenDemonstrations().rows(given, entropy, groups)
    assert kept.tolist() == [False, False, True, True, True, True, True, False]


def test_demonstrations_by_the_answer_by_hand() -> None:
    """Of group 0 two of three, of equals the first; of group 1 its one, whatever its value; the
    sampled ones whatever theirs."""
    groups = segments_of(torch.tensor([0, 0, 1, 0, 0, 1, 0]))
    given = flags(1, 0, 0, 1, 0, 1, 1)
    values = vector(0.1, 0.9, 0.9, 0.3, 0.0, 0.0, 0.1)
    chosen = filters.ChosenDemonstrations(count=2, by="answer_probability")
    kept = chosen.rows(given, values, groups)
    assert kept.tolist() == [True] * 6 + [False]


def test_overlong_penalty_by_hand() -> None:
    """Lmax 10, buffer 4: nothing up to 6, -1/4 a token from there, -1 at 10 and above."""
    lengths = torch.tensor([1, 6, 7, 9, 10, 500])
    found = filters.Overlong(max_tokens=10, buffer_share=0.4).penalty(lengths, torch.float64)
    same(found, 0, 0, -0.25, -0.75, -1, -1)


def test_repeated_tail_by_hand() -> None:
    """abab; xabcabc; abac (no block twice); aa (one-token block); a; not a candidate."""
    responses = [[1, 2, 1, 2], [9, 1, 2, 3, 1, 2, 3], [1, 2, 1, 3], [1, 1], [1], [4, 4]]
    tokens = torch.tensor([token for response in responses for token in response])
    lengths = torch.tensor([len(response) for response in responses])
    candidates = flags(1, 1, 1, 1, 1, 0)
    for shortest, longest, expected in (
        (1, 8, [True, True, False, True, False, False]),
        (2, 8, [True, True, False, False, False, False]),
        (1, 2, [True, False, False, True, False, False]),
    ):
        blocks = {"min_block_tokens": shortest, "max_block_tokens": longest}
        found = filters.Repetition(penalty=1.0, **blocks).of(
            tokens, lengths, candidates, torch.float64
        )
        assert (found == -1).tolist() == expected


def test_repetition_penalty_needs_truncation() -> None:
    tokens = torch.tensor([1, 1, 1, 1, 1, 2])
    lengths = torch.tensor([2, 2, 2])
    for truncated, penalty, expected in (
        (flags(1, 0, 1), 0.1, (-0.1, 0, 0)),
        (flags(1, 1, 1), 0.5, (-0.5, -0.5, 0)),
    ):
        chosen = filters.Repetition(penalty=penalty)
        same(chosen.of(tokens, lengths, truncated, torch.float64), *expected)


def test_curiosity_bonus_by_hand() -> None:
    """A quarter of the way from 1 to 0.2: w = 0.8. |r| / 3 = 0.3, 0, 0.1, 0.3 against
    alpha B = 0.1, 0.6, 0.4, 1."""
    rewards = vector(0.9, 0, -0.3, 0.9)
    logprobs = vector(-0.05, -0.3, -0.2, -0.5)
    found = filters.Curiosity(alpha=2.0, end=0.2).bonus(rewards, logprobs, 0.25)
    same(found, 0.08, 0, 0.08, 0.24)
    same(filters.Curiosity(alpha=2.0).bonus(rewards, logprobs, 1.0), 0, 0, 0, 0)
