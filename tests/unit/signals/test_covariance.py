"""The chosen tokens of the fakes' minibatches are those of a plain count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.signals.covariance import CovariantTokens


def minibatches(build, *overrides: str):
    """Of the one step: the trainer, its scored rollout, and of each minibatch its rows and what the
    signal has chosen."""
    trainer = build(method=overrides[0], method_overrides=list(overrides[1:]))
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.source.next(1)
    learner = trainer.learner
    learner.policy.logits[:] = torch.tensor([1.5, 0.5, 0.0, -1.0])
    scored = learner.score(experience)
    found = []
    for rows in learner.plan.minibatches(1, scored):
        placed = learner.placement.rebalanced_for(scored, rows)
        columns = learner.signals.before_minibatch(learner.view(scored, placed, rows))
        found.append((rows, columns["chosen_places"].tolist()))
    return trainer, scored, found


def plain_covariances(trainer, scored, rows: list[int]) -> dict[int, float]:
    """By the place of the token in the step."""
    logprobs = trainer.learner.policy.logits.double().log_softmax(0)
    tokens, place = [], 0
    for row, ids in enumerate(scored.responses.tokens.views("token_ids")):
        advantage = scored.credit.advantages[row].item()
        tokens += [
            (row, place + at, logprobs[token].item(), advantage) for at, token in enumerate(ids)
        ]
        place += len(ids)
    own = [each[1:] for each in tokens if each[0] in rows]
    mean = [sum(each[part] for each in own) / len(own) for part in (1, 2)]
    return {place: (logp - mean[0]) * (a - mean[1]) for place, logp, a in own}


def test_the_largest_covariances_are_chosen(build) -> None:
    trainer, scored, found = minibatches(build, "kl_cov", "policy_loss.share=0.1")
    for rows, chosen in found:
        plain = plain_covariances(trainer, scored, rows)
        # In the order of size, of equal ones the first.
        wanted = sorted(plain, key=lambda place: (-round(plain[place], 5), place))
        assert chosen == [-1, *sorted(wanted[: int(0.1 * len(plain))])]
        assert len(chosen) > 2


def test_draws_follow_from_seed_and_step(build) -> None:
    """Again the same of a new signal, as after a resume; others of the same minibatch once more, as
    in a second epoch, of another seed and of another step."""
    trainer, scored, ((rows, _), *_) = minibatches(build, "clip_cov")
    learner = trainer.learner
    placed = learner.placement.rebalanced_for(scored, rows)

    def draws(seed: int, step: int = 1) -> list[list[int]]:
        signal = CovariantTokens(share=0.1, seed=seed, cov_low=0.0, cov_high=9.0)
        view = learner.view(replace(scored, step=step), placed, rows)
        return [signal.before_minibatch(view)["chosen_places"].tolist() for _ in range(2)]

    first, second = draws(0)
    assert draws(0) == [first, second] and len(first) == len(second) > 2
    assert len({tuple(each) for each in (first, second, *draws(1), *draws(0, step=2))}) == 6


@pytest.mark.parametrize(("share", "moves"), [(0.0, True), (1.0, False)])
def test_what_is_chosen_reaches_the_loss(build, share: float, moves: bool) -> None:
    """Where every token is chosen nothing is learned."""
    knobs = [f"policy_loss.share={share}", "policy_loss.cov_low=-9", "policy_loss.cov_high=9"]
    trainer, scored, _ = minibatches(build, "clip_cov", *knobs)
    before = trainer.learner.policy.logits.clone()
    metrics = trainer.learner.update(1, scored)
    assert (metrics["loss/policy"] != 0) is moves
    assert bool((trainer.learner.policy.logits != before).any()) is moves


def test_tokens_are_drawn_between_the_bounds(build) -> None:
    knobs = ["policy_loss.share=0.1", "policy_loss.cov_low=0.05", "policy_loss.cov_high=2"]
    trainer, scored, found = minibatches(build, "clip_cov", *knobs)
    for rows, chosen in found:
        plain = plain_covariances(trainer, scored, rows)
        inside = [place for place, value in plain.items() if 0.05 <= value <= 2]
        assert len(inside) > len(chosen) > 2
        assert len(chosen) - 1 == int(0.1 * len(plain))
        assert set(chosen[1:]) < set(inside) and chosen == sorted(chosen)
