"""Steps of partial rollouts by real engines, whose weights are others in every step: rank 0 prints
what a trainer would learn from, and how far its logprobs are from those of transformers.

    partial_worker.py FOLDER TENSOR DELAYS

``DELAYS``: 1 where each rank works now and then for a while on something else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.exchange import gathered_on_main
from megatron_rl.runtime import launch
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Completion
from tests.numerics import rollout_models as small
from tests.numerics.held_up import sampler_of
from tests.rollout_sources import rollouts_of, training_job

FOLDER, TENSOR, DELAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
STEPS = 5
WORLD = launch.start()
HOME = FOLDER / WORLD.launch_id


def step(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    experience = rollouts.collect(number)
    responses = experience.responses
    tokens = gathered_on_main(responses.tokens, responses, WORLD)
    if not WORLD.is_main:
        return None
    columns = {name: values.tolist() for name, values in tokens.columns.items()}
    gap = 0.0
    models = [small.build("qwen3", version) for version in range(number)]
    views = [tokens.views(name) for name in ("token_ids", "sampler_logprobs", "weight_versions")]
    for prompt, ids, logprobs, versions in zip(responses.prompts, *views, strict=True):
        completion = Completion(ids.tolist(), logprobs.tolist(), False, 0)
        for version in np.unique(versions):
            logits = small.reference_logits(models[version], prompt, completion)
            want = logits.log_softmax(-1)[torch.arange(len(ids)), torch.from_numpy(ids).long()]
            off = (torch.from_numpy(logprobs) - want).abs()[torch.from_numpy(versions == version)]
            gap = max(gap, off.max().item())
    return {
        "uids": [prompt.uid for prompt in responses.prompts],
        "lengths": responses.lengths.tolist(),
        "rewards": [score.reward for score in responses.scores],
        "gap": gap,
        "metrics": dict(experience.source_metrics),
        **columns,
    }


def main() -> None:
    if WORLD.is_main:
        for version in range(STEPS):
            small.write("qwen3", version, HOME)
    WORLD.barrier()
    engine, sampler = sampler_of(str(HOME / "qwen3_0"), TENSOR, DELAYS, WORLD)
    job = training_job(
        PromptLoader(small.make_prompts(24), seed=1, shuffle=True),
        small.sampling(num_responses=2, max_response_tokens=64, stop_token_ids=(3, 4)),
        seed=5,
        rules=StepRules(6, responses_per_group=2, groups_in_flight=12, max_age=2),
    )
    rollouts = rollouts_of(sampler, job)
    found = []
    for number in range(1, STEPS + 1):
        if number > 1:
            weights = load_file(HOME / f"qwen3_{number - 1}" / "model.safetensors")
            engine.load_weights(iter(weights.items()), number - 1)
        found.append(step(rollouts, number))
    if WORLD.is_main:
        small.say(f"FOUND {json.dumps(found)}")
    small.run_cases({})


if __name__ == "__main__":
    main()
