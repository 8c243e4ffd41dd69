"""One process: an engine that returns experts, and a policy that takes them. 8 experts, 2 taken."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.models.experts import NOT_GIVEN
from megatron_rl.passes import LocalBatch
from megatron_rl.rollouts.store import joined
from megatron_rl.runtime import launch
from megatron_rl.types import Completion, Prompt, SequenceBatch
from tests import zoo
from tests.numerics import rollout_models as small
from tests.numerics.policy_reference import TEMPERATURE, relative_error
from tests.numerics.test_annealed_policy import RELATIVE, ROWS, cuts, differentiated, of_cuts
from tests.numerics.test_router_replay import LAYERS, K, frozen, plain_scores

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
# Heads for vLLM's kernel of CPUs; experts near ties, of which noise chooses others.
zoo.FAMILIES["qwen3_moe"] |= dict(head_dim=32, num_experts=8)
MODEL = zoo.tiny_model("qwen3_moe")
with torch.no_grad():
    for layer in MODEL.model.layers:
        layer.mlp.gate.weight.mul_(0.1)
MODEL.config.architectures = [type(MODEL).__name__]
MODEL.save_pretrained(FOLDER)
SETTINGS = small.engine_config(router_replay="rollout", max_prompt_tokens=180)
ENGINE = VllmEngine(str(FOLDER), SETTINGS, seed=0, launch_id=WORLD.launch_id)
sampling = partial(small.sampling, expert_width=LAYERS * K, temperature=TEMPERATURE)


def chosen(prompt: Prompt, one: Completion) -> Tensor:
    """By transformers: ``[tokens, layers * k]``, without an order within a choice."""
    tokens = torch.tensor([[*prompt.token_ids, *one.token_ids]])
    with frozen(MODEL, None) as taken, torch.no_grad():
        MODEL(tokens)
    return torch.stack(taken, 1).sort(-1).values.flatten(1)


def num_right(prompt: Prompt, one: Completion) -> int:
    """Of how many tokens from the first there are experts: those of transformers, at their token
    and layer."""
    assert one.experts is not None
    is_given = (one.experts != NOT_GIVEN).any(1)
    count = int(is_given.sum())
    assert is_given[:count].all()
    found = torch.from_numpy(one.experts[:count]).view(-1, LAYERS, K).sort(-1).values.flatten(1)
    wanted = chosen(prompt, one)
    assert torch.equal(found.long(), wanted[:count])
    # What this would notice.
    assert not count or not torch.equal(found.long(), wanted[1 : count + 1])
    assert not count or not torch.equal(found.long(), wanted.roll(K, 1)[:count])
    return count


def check(prompt: Prompt, one: Completion) -> None:
    """All but the last token have them."""
    assert num_right(prompt, one) == len(prompt.token_ids) + len(one.token_ids) - 1


def they_are_those_of_transformers() -> None:
    """Also of prompts that the engine has in its cache: they fill a block, which has 128 tokens."""
    prompts = small.make_prompts(3, length=140)
    for _ in range(2):
        groups = ENGINE.generate(prompts, sampling(num_responses=3, max_response_tokens=12))
        for prompt, group in zip(prompts, groups, strict=True):
            for one in group:
                check(prompt, one)
    (without, *_) = ENGINE.generate(prompts[:1], sampling(expert_width=0, max_response_tokens=3))
    assert without[0].experts is None


def a_response_that_continues_has_all() -> None:
    (prompt,) = small.make_prompts(1)
    limits = sampling(num_responses=2, max_response_tokens=30)
    ids = ENGINE.submit(prompt, range(2), limits)
    assert ENGINE.poll() == []
    parts = dict(enumerate(ENGINE.pause(ids)))
    for one in parts.values():
        check(prompt, one)
    ids = ENGINE.submit(prompt, range(2), limits, {n: one.token_ids for n, one in parts.items()})
    ended: dict[int, Completion] = {}
    while len(ended) < 2:
        ended |= dict(ENGINE.poll())
    for number, request_id in enumerate(ids):
        assert len(parts[number].token_ids) > 0
        check(prompt, joined(parts[number], ended[request_id]))


def a_prompt_that_waits_has_none() -> None:
    """8970 tokens of prompts, of which one step of the engine takes 8192; paused after it."""
    prompts = small.make_prompts(60, length=180 - 60, seed=2)
    limits = sampling(num_responses=1)
    of_id = {ENGINE.submit(prompt, range(1), limits)[0]: prompt for prompt in prompts}
    for output in ENGINE._llm.llm_engine.step():
        if output.finished:  # with its first token
            ENGINE.abort([int(output.request_id)])
            del of_id[int(output.request_id)]
    num_waiting = 0
    for prompt, one in zip(of_id.values(), ENGINE.pause(list(of_id)), strict=True):
        if one.token_ids:
            check(prompt, one)
        else:
            num_waiting += 1
            assert num_right(prompt, one) == 0
    assert 0 < num_waiting < len(of_id)


def sampled() -> tuple[SequenceBatch, Tensor]:
    """Two prompts with three responses each, with their experts; and the engine's logprobs."""
    prompts = small.make_prompts(2)
    groups = ENGINE.generate(prompts, sampling(num_responses=3, max_response_tokens=16))
    rows = [(prompt, one) for prompt, of in zip(prompts, groups, strict=True) for one in of]
    batch = sequence_batch(
        [(prompt.token_ids, np.asarray(one.token_ids)) for prompt, one in rows],
        torch.arange(ROWS) // 3,
    )
    given = np.concatenate([one.experts for _, one in rows])
    logprobs = torch.cat([torch.tensor(list(one.sampler_logprobs)) for _, one in rows])
    return replace(batch, experts=torch.from_numpy(given)), logprobs


def noise_in_the_routers_is_no_gap_with_them() -> None:
    batch, sampler = sampled()
    policy = zoo.tiny_policy(FOLDER, {})
    (rows, _) = cuts(policy)

    def gap(one: SequenceBatch) -> float:
        scores = policy.score(LocalBatch(one, rows))
        return (scores.logprobs - sampler).abs().mean().item()

    free = replace(batch, experts=None)
    assert max(gap(batch), gap(free)) <= 1e-5
    draw = torch.Generator().manual_seed(1)
    for held in policy.held:
        if "router" in held.name:
            noise = torch.randn(held.tensor.shape, generator=draw)
            held.tensor.data += 0.002 * noise
    with_them, without = gap(batch), gap(free)
    small.say(f"gap {without:.2e} without, {with_them:.2e} with: {without / with_them:.1f}")
    assert without >= 10 * with_them
    policy.close()


def gradients_are_those_of_frozen_experts() -> None:
    """With routers that would choose others."""
    batch, _ = sampled()
    model: Any = zoo.tiny_model("qwen3_moe")
    model.load_state_dict(MODEL.state_dict())
    for each in model.model.layers:
        each.mlp.gate.weight.data.neg_()
    logprobs, entropy, _ = plain_scores(model, batch)
    wanted = differentiated(model, batch, logprobs, entropy)
    policy = zoo.tiny_policy(FOLDER, {})
    for held in policy.held:
        if "router" in held.name:
            held.tensor.data.neg_()
    for loss, gradient in of_cuts(policy, batch, wanted["logprobs"]):
        assert abs(loss - wanted["loss"]) <= 1e-6
        assert relative_error(gradient, wanted["gradient"]) <= RELATIVE
    policy.close()


def an_engine_that_records_nothing_is_noticed() -> None:
    worker = ENGINE._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    for module in worker.model_runner.model.modules():
        if hasattr(module, "router"):
            module.router.set_capture_fn(None)
    worker.slot_experts._experts.zero_()
    with pytest.raises(RuntimeError, match="prompt p0: vLLM returned zeros"):
        ENGINE.generate(small.make_prompts(1), sampling(max_response_tokens=3))


CASES = (
    they_are_those_of_transformers,
    a_response_that_continues_has_all,
    a_prompt_that_waits_has_none,
    noise_in_the_routers_is_no_gap_with_them,
    gradients_are_those_of_frozen_experts,
    an_engine_that_records_nothing_is_noticed,  # the last: it breaks the record
)

if __name__ == "__main__":
    small.run_cases(CASES)
