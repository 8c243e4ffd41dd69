"""An engine that waits now and then, and what judges its responses: for workers of streaming."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import Completion, Prompt, Score
from tests.numerics import rollout_models as small


class Interrupted(VllmEngine):
    """Other requests of a replica are under way when something is begun or asked for; its ranks
    wait alike."""

    draw: random.Random | None = None  # None: never

    def poll(self) -> list[tuple[int, Completion]]:
        if self.draw is not None and self.draw.random() < 0.3:
            time.sleep(self.draw.random() / 20)
        return super().poll()


class OddLength:
    """Right where the number of tokens is odd; slower for long ones where there are ``delays``."""

    def __init__(self, delays: bool) -> None:
        self.delays = delays

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        lengths = [len(text.split()) for text in texts]
        if self.delays:
            time.sleep(max(lengths) / 500)
        return [Score(float(length % 5), length % 2 == 1, {}) for length in lengths]


def sampler_of(
    model: str, tensor: int, delays: bool, world: World
) -> tuple[Interrupted, LaunchSampler]:
    """Engines of ``tensor`` ranks, and what samples with them."""
    config = small.engine_config(tensor=tensor, max_num_seqs=16)
    engine = Interrupted(model, config, seed=0, launch_id=world.launch_id)
    if delays:
        engine.draw = random.Random(engine.replica)
    display = Display(shown=False)
    sampler = LaunchSampler(
        engine, OddLength(delays), lambda ids: " ".join(map(str, ids)), world, display
    )
    return engine, sampler
