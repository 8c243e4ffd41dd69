"""The plain program that asynchronous training in lockstep must equal, bit for bit: one step after
the other, with the engine in the same process, sampling with weights that are K updates old.

Usage: ``delayed_program.py K OUT key=value ...``: a run's overrides. Writes rewards, losses and
gradient norms of each step, and at the end all weights, to OUT.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.reading import training_stream
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.rows.exchange import token_rows
from megatron_rl.rollouts.rows.experience import Responses, experience_of
from megatron_rl.rollouts.sampling import rollout_sampling, sampling_seed, stop_token_ids
from megatron_rl.runtime import launch
from megatron_rl.trainer.build import build_engine, build_learner, build_method, build_policy

DELAY = int(sys.argv[1])
OUT = Path(sys.argv[2])


def main() -> None:
    world = launch.start()
    config = validate(Config, compose("config", sys.argv[3:]), "the configuration")
    tokenizer = load_tokenizer(config.model.path)
    data = shared_data(config, world, tokenizer, None)
    reward = build_reward(config.reward, lambda prompt: prompt.text)
    method, signals = build_method(config, data)
    policy = build_policy(config, signals)
    engine, _ = build_engine(config, world, policy)
    learner = build_learner(config, world, policy, method, signals)
    loader = training_stream(data, config)
    sampling = rollout_sampling(config, stop_token_ids(tokenizer.eos_token_id))

    def weights() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in policy.gathered_weights()}

    versions = [weights()]
    steps = []
    for step in range(1, config.trainer.num_steps + 1):
        version = max(0, step - 1 - DELAY)
        engine.load_weights(iter(versions[version].items()), version)
        prompts = loader.take(config.batch.prompts_per_step)
        seed = sampling_seed(config.seed, step)
        groups = engine.generate(prompts, replace(sampling, seed=seed))
        rows = [(p, one) for p, group in zip(prompts, groups, strict=True) for one in group]
        texts = [tokenizer.decode(list(one.token_ids), skip_special_tokens=True) for _, one in rows]
        truncated = [one.truncated for _, one in rows]
        scores = reward.score([prompt for prompt, _ in rows], texts, truncated)
        # Both engines have sampled all of it: the rows of rank 0 count.
        completions = [one for _, one in rows] if world.is_main else []
        responses = Responses(
            prompts=[prompt for prompt, _ in rows],
            group_ids=np.repeat(np.arange(len(prompts)), sampling.num_responses),
            lengths=np.array([len(one.token_ids) for _, one in rows]),
            truncated=np.array(truncated),
            weight_versions=np.full(len(rows), version),
            scores=scores,
            tokens=token_rows(range(len(completions)), completions),
            holders=np.zeros(len(rows), dtype=np.int64),
        )
        experience = learner.score(experience_of(responses))
        metrics = learner.update(step, experience)
        steps.append({"step": step, "reward/mean": experience.rewards.mean().item(), **metrics})
        versions.append(weights())
    if world.is_main:
        OUT.mkdir()
        (OUT / "steps.json").write_text(json.dumps(steps))
        torch.save(versions[-1], OUT / "weights.pt")


if __name__ == "__main__":
    with launch.reported():
        main()
    launch.exit_process(0)
