"""One process: an engine that anneals the temperature, with the model runner of CPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.runtime import launch
from tests.numerics import annealed_cases as cases
from tests.numerics import rollout_models as small

WORLD = launch.start()
PATH = small.write("qwen3", 0, Path(sys.argv[1]))
MODEL = small.build("qwen3", 0)
ENGINE = VllmEngine(str(PATH), cases.engine_config(), seed=0, launch_id=WORLD.launch_id)
PROMPTS = small.make_prompts(9)
MAX_TOKENS = 32


def each_request_has_its_own() -> None:
    cases.each_request_has_its_own(ENGINE, MODEL, PROMPTS, MAX_TOKENS)


def a_response_goes_on_where_it_was() -> None:
    cases.a_response_goes_on_where_it_was(ENGINE, MODEL, PROMPTS[0], MAX_TOKENS)


def one_temperature_is_the_plain_one() -> None:
    cases.one_temperature_is_the_plain_one(ENGINE, PROMPTS, MAX_TOKENS)


def largest(count: int) -> Callable[[Tensor], Tensor]:
    def change(logits: Tensor) -> Tensor:
        positions = torch.arange(len(logits))
        logits = logits / cases.ANNEALING.of_positions(positions)[:, None].double()
        smallest_kept = logits.topk(count).values[:, -1:]
        return logits.masked_fill(logits < smallest_kept, -torch.inf)

    return change


def truncation_renormalizes() -> None:
    wanted = small.sampling(annealing=cases.ANNEALING, top_k=5)
    groups = ENGINE.generate(PROMPTS, wanted)
    off = small.logprob_gap(MODEL, PROMPTS, groups, largest(5))
    assert off <= cases.BOUND, off


def a_small_cache_changes_nothing() -> None:
    """Responses that outgrow the cache are computed again, from the tokens that they had. With 290
    tokens of prompt and temperatures of 0.5 more is rounded."""
    prompts = small.make_prompts(45, length=250)
    wanted = small.sampling(num_responses=2, max_response_tokens=64, annealing=cases.ANNEALING)
    tight = small.engine_config(
        anneal=cases.engine_config().anneal, kv_cache_gib=12 * 128 * 1024 / 2**30
    )
    engine = VllmEngine(str(PATH), tight, seed=0, launch_id=WORLD.launch_id)
    groups = engine.generate(prompts, wanted)
    assert small.tokens(groups) == small.tokens(ENGINE.generate(prompts, wanted))
    for prompt, group in zip(prompts, groups, strict=True):
        off = cases.gap(MODEL, prompt, group, cases.ANNEALING)
        assert off <= 3 * cases.BOUND, off


def errors() -> None:
    plain = VllmEngine(str(PATH), small.engine_config(), seed=0, launch_id=WORLD.launch_id)
    annealed = small.sampling(annealing=cases.ANNEALING)
    both = small.sampling(annealing=cases.ANNEALING, temperature=0.7)
    for engine, wanted, message in (
        (plain, annealed, "an annealed temperature needs rollout.anneal.start"),
        (ENGINE, both, "the temperature is annealed, and the constant one is 0.7"),
    ):
        try:
            engine.generate(PROMPTS, wanted)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")


CASES = (
    each_request_has_its_own,
    a_response_goes_on_where_it_was,
    one_temperature_is_the_plain_one,
    truncation_renormalizes,
    a_small_cache_changes_nothing,
    errors,
)

if __name__ == "__main__":
    small.run_cases(CASES)
