"""Steps of partial rollouts by real engines, whose weights are others in every step: rank 0 prints
what a trainer would learn from, and how far its logprobs are from those of transformers.

    partial_worker.py FOLDER TENSOR DELAYS

``DELAYS``: 1 where each rank works now and then for a while on something else.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_rl.data.loader import PromptLoader
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.runtime import launch
from megatron_rl.runtime.display import Display
from megatron_rl.scheduling.partial import PartialRules
from megatron_rl.trainer.exchange import gathered_on_main
from megatron_rl.trainer.partial_groups import PartialGroups
from megatron_rl.trainer.partial_rollouts import PartialRollouts
from megatron_rl.trainer.rollouts import Sampler
from megatron_rl.trainer.step_end import StepEnd
from megatron_rl.types import Completion, Prompt, Score
from tests.numerics import rollout_models as small

FOLDER, TENSOR, DELAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
STEPS = 5
WORLD = launch.start()
HOME = FOLDER / WORLD.launch_id


class Interrupted(VllmEngine):
    """Waits now and then; the ranks of a replica wait alike."""

    def poll(self) -> list[tuple[int, Completion]]:
        if DELAYS and self._draw.random() < 0.3:
            time.sleep(self._draw.random() / 20)
        return super().poll()


class OddLength:
    """Right where the number of tokens is odd."""

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        lengths = [len(text.split()) for text in texts]
        return [Score(float(length % 5), length % 2 == 1, {}) for length in lengths]


def step(rollouts: PartialRollouts, number: int) -> dict[str, Any] | None:
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
    config = small.engine_config(tensor=TENSOR, max_num_seqs=16)
    engine = Interrupted(str(HOME / "qwen3_0"), config, seed=0, launch_id=WORLD.launch_id)
    engine._draw = random.Random(engine.replica)
    words = " ".join
    sampler = Sampler(
        engine, OddLength(), lambda ids: words(map(str, ids)), WORLD, Display(shown=False)
    )
    rollouts = PartialRollouts(
        sampler=sampler,
        groups=PartialGroups(
            PromptLoader(small.make_prompts(24), seed=1, shuffle=True),
            PartialRules(6, responses_per_group=2, groups_in_flight=12, max_age=2),
        ),
        sampling=small.sampling(num_responses=2, max_response_tokens=64, stop_token_ids=(3, 4)),
        seed=5,
        end=StepEnd(sampler.shown),
    )
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
