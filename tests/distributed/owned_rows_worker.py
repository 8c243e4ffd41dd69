"""A step of the trainer's own classes with the real policy; an engine and a reward in their roles.

``test_owned_rows.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.config.method import load_method
from megatron_rl.config.sections import MismatchLimits, NonFiniteConfig
from megatron_rl.data.loader import PromptLoader
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.exchange import gathered_on_main
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.rollouts.rows.metrics import rollout_metrics
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.signals import signals_of
from megatron_rl.trainer.health import Health
from megatron_rl.trainer.learner import Learner, MinibatchPlan
from megatron_rl.trainer.placement import Placement
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.distributed.fake_world import Answers, Kind, Record
from tests.engines import Answering
from tests.rollout_sources import rollouts_of, training_job
from tests.zoo import tiny_policy

PROMPTS = [Prompt(f"p{n}", tuple(range(5, 8 + n)), str(n), "toy") for n in range(8)]
SAMPLING = Sampling(num_responses=4, max_response_tokens=44)
# The credit reads token ids, old and reference logprobs; the shortest two sequences together have
# more tokens than a micro-batch may have, so that every row is computed alone in every layout.
OVERRIDES = [
    "kl.placement=reward",
    "kl.coef=0.1",
    "entropy.metric=true",
    "reward_shaping.repetition={penalty: 0.5, min_block_tokens: 1, max_block_tokens: 4}",
]
SHORTEST = 27
LONGEST = 44
ONE_ROW = 54


class SeededEngine(Answering):
    """Response j to a prompt is a function of both. ``scale`` times as long as they would be."""

    def __init__(self, replica: int, num_replicas: int, scale: int = 1) -> None:
        super().__init__()
        self.replica = replica
        self.num_replicas = num_replicas
        self.scale = scale

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        return self._response(prompt, number)

    def _response(self, prompt: Prompt, j: int) -> Completion:
        draw = np.random.default_rng((int(prompt.uid[1:]), j))
        length = int(draw.integers(SHORTEST, LONGEST)) * self.scale
        ids = draw.integers(3, 90, length)
        if j == 3:
            ids[-20:] = 7  # truncated, and its tail repeats itself
        return Completion(ids.tolist(), (-draw.exponential(1, length)).tolist(), j == 3, 0)


class LengthIsReward:
    """Correct when the text is short; no two responses alike."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        lengths = [len(response.split()) for response in responses]
        return [Score(length / 100, length % 2 == 0, {"length": length}) for length in lengths]


def world_of_all() -> World:
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), "test", dist.group.WORLD)


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def parts(
    path: Path, layout: dict[str, Any], scale: int, budget: int
) -> tuple[Rollouts, Learner, MegatronPolicy]:
    world = world_of_all()
    limits = {"max_sequence_tokens": 250, "tokens_per_microbatch": budget}
    policy = tiny_policy(path, layout, **limits)
    num_replicas = policy.ranks.data
    engine = SeededEngine(dist.get_rank() * num_replicas // world.size, num_replicas, scale)
    sampler = LaunchSampler(engine, LengthIsReward(), text_of, world, Display(shown=False))
    method = load_method("grpo", OVERRIDES)
    loader = PromptLoader(PROMPTS, seed=1, shuffle=False)
    job = training_job(loader, SAMPLING, seed=1, prompts_per_step=8, method=method)
    rollouts = rollouts_of(sampler, job)
    health = Health(
        NonFiniteConfig(stop_after=1, bundle_step=None),
        MismatchLimits(warn_above=None, abort_above=None),
        lambda *_: Path(),
    )
    plan = MinibatchPlan(prompts_per_minibatch=3, epochs_per_rollout=2, seed=3)
    placement = Placement(policy.batching, world)
    return (
        rollouts,
        Learner(policy, method, signals_of(method), health, plan, placement, True),
        policy,
    )


def check_tokens(experience: Experience, engine: SeededEngine) -> None:
    """What lies here is what was sampled, and the batch has it behind the prompts."""
    tokens = experience.responses.tokens
    batch = experience.local.batch
    for place, (row, ids) in enumerate(zip(tokens.rows, tokens.views("token_ids"), strict=True)):
        prompt = PROMPTS[row // SAMPLING.num_responses]
        sampled = engine._response(prompt, row % SAMPLING.num_responses)
        assert ids.tolist() == list(sampled.token_ids)
        sequence = batch.token_ids[batch.offsets[place] : batch.offsets[place + 1]]
        assert sequence.tolist() == [*prompt.token_ids, *sampled.token_ids]


def on_rank_0(rollouts: Rollouts, learner: Learner, experience: Experience) -> dict[str, Any]:
    """What comes to rank 0 for a hook, a log or a bundle; nothing on the others."""
    responses = experience.responses
    shown = rollouts.post.shown(responses, [31, 0, 9])
    tokens = gathered_on_main(experience.scored_tokens, responses, learner.placement.world)
    if dist.get_rank() > 0:
        assert shown is None and len(tokens.rows) == 0
        return {}
    digests = {
        name: sha256(values.tobytes()).hexdigest() for name, values in tokens.columns.items()
    }
    return {"texts": [response.text for response in shown], "digests": digests}


def num_lent(learner: Learner, experience: Experience) -> int:
    """Rows of the minibatches that do not lie where the update wants them."""
    plan = learner.placement.sharding.plan
    moved = 0
    for rows in learner.plan.minibatches(1, experience):
        route = learner.placement._route(experience, plan(experience.sequences, rows), rows)
        moved += int((route.source != route.target).sum())
    return moved


def step(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The metrics of one step, and where its rows lay."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    experience = learner.score(rollouts.collect(1))
    check_tokens(experience, SeededEngine(0, 1))
    metrics = rollout_metrics(experience) | learner.update(1, experience)
    report = {
        "metrics": metrics,
        "rows": len(experience.responses.tokens.rows),
        "owned": int((experience.responses.holders == dist.get_rank()).sum()),
        "lent": num_lent(learner, experience),
        "advantages": experience.credit.advantages.tolist(),
        "on_rank_0": on_rank_0(rollouts, learner, experience),
    }
    policy.close()
    return report


def messages(path: Path, layout: dict[str, Any], scale: int) -> dict[Kind, int]:
    """Bytes that this rank gives to every collective in a step."""
    rollouts, learner, policy = parts(path, layout, scale, 250)
    with Record(Answers()) as record:
        learner.update(1, learner.score(rollouts.collect(1)))
    policy.close()
    return dict(record.bytes)
