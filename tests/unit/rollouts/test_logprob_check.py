"""The logprob check with a bandit on both sides; what it finds in real engines is in
tests/numerics/both_engines_worker.py."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.errors import WeightSyncError
from megatron_rl.rollouts.logprob_check import (
    MAX_TOKENS,
    NUM_SEQUENCES,
    CheckSequence,
    LogprobCheck,
    check_sequences,
)
from megatron_rl.runtime.launch import World
from megatron_rl.types import Image, Prompt, SyncReport
from tests.unit.trainer.fakes import BanditEngine, BanditPolicy

WORLD = World(rank=0, size=1, local_rank=0, launch_id="test")
SEQUENCES = [CheckSequence((0, 1, 2)), CheckSequence((3, 3))]


@pytest.fixture
def sides():
    policy, engine = BanditPolicy(), BanditEngine()
    policy.logits = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    engine.logits = policy.logits.clone()
    return policy, engine


def logprob_check(sides, every=1, tolerance=0.5) -> LogprobCheck:
    policy, engine = sides
    return LogprobCheck(
        policy.score_alone, engine, WORLD, SEQUENCES, every=every, tolerance=tolerance
    )


def differences(check: LogprobCheck, version: int) -> tuple[float | None, float | None]:
    report = check.check(SyncReport(version, 1, 0, 8, 0.0), check.expected(version))
    return report.logprob_check_diff, report.logprob_check_diff_max


def test_equal_weights_differ_by_nothing(sides):
    check = logprob_check(sides)
    assert differences(check, 0) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_the_mean_is_raised_with_its_step_and_the_worst_token(sides):
    _, engine = sides
    # The second of the three tokens scored: from 1 - logsumexp(0..3) to
    # -4 - logsumexp(0, -4, 2, 3).
    engine.logits[1] = -4.0
    check = logprob_check(sides)
    words = (
        r"step 7: .*differ by 1\.7 nats .*on average, by 4\.91 at most \(-7\.35 and -2\.44\),"
        r" .*logprob_check_tolerance is 0\.5"
    )
    with pytest.raises(WeightSyncError, match=words):
        differences(check, 7)


@pytest.mark.parametrize("tolerance", [None, 1.8])
def test_one_token_alone_is_only_reported(sides, tolerance):
    """4.91, -0.09 and -0.09 nats: 1.70 on average."""
    sides[1].logits[1] = -4.0
    check = logprob_check(sides, tolerance=tolerance)
    scores = [torch.log_softmax(side.logits, -1) for side in sides]
    want = [abs(float(scores[0][token] - scores[1][token])) for token in (1, 2, 3)]
    assert differences(check, 7) == pytest.approx((sum(want) / 3, max(want)), rel=1e-6)
    assert max(want) > 4


@pytest.mark.parametrize(("token", "value"), [(slice(None), float("nan")), (1, -float("inf"))])
def test_no_number_is_no_agreement(sides, token, value):
    sides[1].logits[token] = value
    check = logprob_check(sides)
    with pytest.raises(WeightSyncError, match="inf nats"):
        differences(check, 1)


@pytest.mark.parametrize(
    ("versions", "due"), [(range(4), [0, 1, 3]), (range(4, 14), [4, 6, 9, 12])]
)
def test_due_at_the_first_sync_after_an_update_and_at_every_nth_version(sides, versions, due):
    check = logprob_check(sides, every=3)
    assert [version for version in versions if check.expected(version) is not None] == due


def prompt(*tokens: int, images=()) -> Prompt:
    return Prompt(uid="p", token_ids=tokens, answer="", data_source="", images=images)


def test_sequences_are_the_ends_of_the_first_prompts():
    long = tuple(range(MAX_TOKENS + 9))
    prompts = [prompt(5), prompt(*long), *[prompt(7, n) for n in range(9)]]
    assert [one.token_ids for one in check_sequences(prompts)] == [
        long[9:],
        *[(7, n) for n in range(NUM_SEQUENCES - 1)],
    ]
    with pytest.raises(
        ValueError, match=r"weight_sync\.logprob_check_every: none of the 2 training prompts"
    ):
        check_sequences(prompts[:1] * 2)


def test_half_of_the_sequences_are_whole_prompts_with_images():
    """Without one a stale tower in the engine is never seen."""
    image = (Image("digest", 28, 28, b""),)
    pad = 9
    texts = [prompt(7, n) for n in range(9)]
    seeing = [prompt(1, pad, pad, 2, 3, n, images=image) for n in range(3)]
    found = check_sequences([*texts, *seeing, prompt(1, pad, images=image)], pad)
    assert [(one.token_ids, one.num_context) for one in found] == [
        ((1, pad, pad, 2, 3, 0), 3),
        ((1, pad, pad, 2, 3, 1), 3),
        ((7, 0), 1),
        ((7, 1), 1),
    ]
    assert [one.images for one in found] == [image, image, (), ()]
    assert len(check_sequences(seeing, pad)) == NUM_SEQUENCES // 2
