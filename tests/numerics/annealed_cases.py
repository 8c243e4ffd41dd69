"""An engine that anneals the temperature, against transformers: what holds with either of vLLM's
model runners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_rl.annealing import AnnealConfig, Annealing
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.types import Completion, Prompt
from tests.numerics import rollout_models as small

ANNEALING = Annealing(1.2, 0.5, decay_tokens=6.0, plain_tokens=2)
OTHER = Annealing(1.5, 0.8, decay_tokens=3.0, plain_tokens=0)
BOUND = 1e-5  # nats of one token; both sides compute in float32


def engine_config() -> RolloutConfig:
    return small.engine_config(anneal=AnnealConfig(**small.ANNEAL))


def gap(
    model: PreTrainedModel,
    prompt: Prompt,
    completions: Sequence[Completion],
    annealing: Annealing | None,
) -> float:
    def divided(logits: Tensor) -> Tensor:
        if annealing is None:
            return logits
        return logits / annealing.of_positions(torch.arange(len(logits)))[:, None].double()

    return small.logprob_gap(model, [prompt], [completions], divided)


def ended(engine: VllmEngine, num_tickets: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < num_tickets:
        found.update(engine.poll())
    return found


def each_request_has_its_own(
    engine: VllmEngine, model: PreTrainedModel, prompts: Sequence[Prompt], max_tokens: int
) -> None:
    """Plain, annealed and otherwise annealed ones, in one batch; and the same again, when rows and
    slots are used anew."""
    for _ in range(2):
        asked = {}
        for number, prompt in enumerate(prompts):
            annealing = (None, ANNEALING, OTHER)[number % 3]
            length = max_tokens - number % 4  # rows of the batch move when one ends
            wanted = small.sampling(annealing=annealing, max_response_tokens=length)
            for request_id in engine.submit(prompt, range(2), wanted):
                asked[request_id] = (prompt, annealing)
        changes = []
        for request_id, completion in ended(engine, len(asked)).items():
            prompt, annealing = asked[request_id]
            off = gap(model, prompt, [completion], annealing)
            assert off <= BOUND, off
            if annealing is not None:
                changes.append(gap(model, prompt, [completion], None))
        assert max(changes) > 0.1, "the temperature changes them"


def a_response_goes_on_where_it_was(
    engine: VllmEngine, model: PreTrainedModel, prompt: Prompt, max_tokens: int
) -> None:
    """Positions count the tokens that are there."""
    wanted = small.sampling(annealing=ANNEALING, num_responses=1, max_response_tokens=max_tokens)
    (whole,) = engine.generate([prompt], wanted)[0]
    first = len(whole.token_ids) // 2
    (request_id,) = engine.submit(prompt, [0], wanted, {0: whole.token_ids[:first]})
    rest = ended(engine, 1)[request_id]
    together = Completion(
        [*whole.token_ids[:first], *rest.token_ids],
        [*whole.sampler_logprobs[:first], *rest.sampler_logprobs],
        truncated=rest.truncated,
        weight_version=0,
    )
    assert len(rest.token_ids) > 1
    off = gap(model, prompt, [together], ANNEALING)
    assert off <= BOUND, off


def one_temperature_is_the_plain_one(
    engine: VllmEngine, prompts: Sequence[Prompt], max_tokens: int
) -> None:
    """The same tokens, and logprobs to rounding."""
    constant = Annealing(0.7, 0.7, decay_tokens=float("inf"), plain_tokens=0)
    wanted = small.sampling(num_responses=2, max_response_tokens=max_tokens, annealing=constant)
    annealed = engine.generate(prompts, wanted)
    wanted = small.sampling(num_responses=2, max_response_tokens=max_tokens, temperature=0.7)
    plain = engine.generate(prompts, wanted)
    assert small.tokens(annealed) == small.tokens(plain)
    assert (small.logprobs(annealed) - small.logprobs(plain)).abs().max() <= 1e-7
