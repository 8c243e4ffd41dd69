"""Steps of rollouts by real engines, as many replicas as processes by tensor ranks: rank 0 prints
what a trainer would learn from.

    streaming_worker.py FOLDER TENSOR DELAYS

``DELAYS``: 1 where each rank works now and then for a while on something else.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.exchange import gathered_on_main
from megatron_rl.runtime import launch
from tests.numerics import rollout_models as small
from tests.numerics.held_up import sampler_of
from tests.rollout_sources import rollouts_of, training_job

FOLDER, TENSOR, DELAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
WORLD = launch.start()


def step(rollouts: Rollouts, number: int) -> dict[str, Any] | None:
    experience = rollouts.collect(number)
    responses = experience.responses
    tokens = gathered_on_main(responses.tokens, responses, WORLD)
    if not WORLD.is_main:
        return None
    return {
        "uids": [prompt.uid for prompt in responses.prompts],
        "lengths": responses.lengths.tolist(),
        "rewards": [score.reward for score in responses.scores],
        "refused": experience.discarded_groups,
        "token_ids": sha256(tokens.columns["token_ids"].tobytes()).hexdigest(),
        "sampler_logprobs": sha256(tokens.columns["sampler_logprobs"].tobytes()).hexdigest(),
    }


def main() -> None:
    if WORLD.is_main:
        small.write("qwen3", 0, FOLDER / WORLD.launch_id)
    WORLD.barrier()
    model = FOLDER / WORLD.launch_id / "qwen3_0"
    _, sampler = sampler_of(str(model), TENSOR, DELAYS, WORLD)
    found = {}
    for method in ("grpo", "dapo"):
        job = training_job(
            PromptLoader(small.make_prompts(24), seed=1, shuffle=True),
            small.sampling(num_responses=2, stop_token_ids=tuple(range(3, 12))),
            seed=5,
            prompts_per_step=8,
            method=load_method(method),
        )
        rollouts = rollouts_of(sampler, job)
        found[method] = [step(rollouts, number) for number in range(1, 4)]
    if WORLD.is_main:
        small.say(f"FOUND {json.dumps(found)}")
    small.run_cases({})


if __name__ == "__main__":
    main()
