"""The bridge from the trainer to a method: what it needs is looked at before anything is built, and
what it is given is that of the minibatch."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.loss import Method, TokenBatch, load_method
from megatron_rl.trainer.objective import MinibatchLoss, check_visual_entropy, token_settings
from megatron_rl.types import Prompt, TokenView
from tests.unit.trainer.runs import rows


def prompt(uid: str, **extra: float) -> Prompt:
    return Prompt(uid, (1,), "1", "toy", extra)


def test_a_prompt_without_the_visual_entropy_that_the_method_needs_is_named():
    prompts = [prompt("p:1", visual_entropy=0.5), prompt("p:2")]
    with pytest.raises(
        ValueError, match=r"prompt p:2: .*tools/visual_entropy\.py.*method=durian_reasoning"
    ):
        check_visual_entropy(prompts, load_method("durian"))
    check_visual_entropy(prompts[:1], load_method("durian"))
    check_visual_entropy(prompts, load_method("durian_reasoning"))
    check_visual_entropy(prompts, load_method("grpo"))


@pytest.mark.parametrize(
    ("name", "overrides", "entropy", "in_loss", "top_k"),
    [
        ("grpo", [], "value", False, 0),
        ("grpo", ["entropy.metric=false"], "none", False, 0),
        ("grpo", ["entropy.coef=0.1"], "grad", True, 0),
        ("archer", [], "value", True, 0),
        ("simko", ["policy_loss.top_k=5"], "value", True, 5),
        ("pacs", ["entropy.metric=false"], "none", False, 0),
        ("siren", ["entropy.metric=false", "entropy_anchor.top_p=0.7"], "none", False, 0),
    ],
)
def test_the_policy_computes_of_tokens_what_the_method_reads(
    name: str, overrides: list[str], entropy: str, in_loss: bool, top_k: int
):
    found = token_settings(load_method(name, overrides))
    wanted = {"entropy": entropy, "entropy_in_loss": in_loss, "top_k": top_k}
    assert found == wanted | {"nucleus": 0.7 if name == "siren" else 0.0}


def test_a_loss_is_given_lengths_and_groups_of_its_minibatch(build, monkeypatch):
    """Lengths of the responses in it, 0 of the others; the accuracy of prompts is that of the whole
    step."""
    trainer = build(method="rl_zvp")
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.learner.score(trainer.source.next(1))
    assert experience.num_groups == 4 and len(experience.responses) == 32
    chosen = list(range(8, 24))
    given: list[TokenBatch] = []
    plain = Method.loss

    def recorded(self, batch, **over_ranks):
        given.append(batch)
        return plain(self, batch, **over_ranks)

    monkeypatch.setattr(Method, "loss", recorded)
    placed = trainer.learner.placement.lent(experience, chosen)
    loss = MinibatchLoss(trainer.learner.method, experience, chosen, placed.tokens)
    tokens = torch.zeros(3)
    loss(TokenView(torch.arange(3), tokens, tokens + 1, lambda sums: sums))
    (batch,) = given
    assert batch.response_loss_tokens is not None and batch.group_accuracy is not None
    assert batch.response_loss_tokens.tolist() == [0] * 8 + [3] * 16 + [0] * 8
    assert (batch.num_responses, batch.num_tokens) == (16, 48)
    by_group = experience.correct.reshape(4, 8).float().mean(1)
    assert torch.equal(batch.group_accuracy.reshape(4, 8), by_group[:, None].expand(4, 8))
    assert batch.entropy is not None and batch.entropy.tolist() == [1, 1, 1]


def test_the_trainer_says_how_far_the_run_is(build):
    """CDE over three steps, its bonus from 3 to 0: two thirds, a third and none of the same
    rewards and logprobs are left."""
    trainer = build(
        "optim.learning_rate=1e-9",
        method="cde",
        method_overrides=["reward_shaping.curiosity.start=3", "std_ddof=0"],
    )
    trainer.run()
    found = {row["step"]: row for row in rows(trainer) if row["step"]}
    # Every token has probability 1/4 at the start, so B = log 4 is above |r| / 3.
    first = found[1]["credit/curiosity_bonus_mean"]
    assert first == pytest.approx(2 * found[1]["reward/mean"] / 3)
    assert found[2]["credit/curiosity_bonus_mean"] > 0
    assert found[3]["credit/curiosity_bonus_mean"] == 0
    assert found[3]["reward/mean"] > 0
