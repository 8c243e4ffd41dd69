"""One process: an engine as on a GPU, with vLLM's V2 model runner and asynchronous scheduling.

Run by triton_interpreter.py with VLLM_USE_V2_MODEL_RUNNER=1 and a folder as argument. The
interpreter is slow: few prompts, short responses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.side_effects import prepare_import
from megatron_rl.runtime import launch
from tests.numerics import annealed_cases as cases
from tests.numerics import rollout_models as small

PROMPTS = small.make_prompts(3)
# More than two blocks of the sampling kernel, and no multiple of one.
VOCAB = 2500


def keep_asynchronous() -> None:
    """vLLM turns asynchronous scheduling off on a CPU, where it gains nothing."""
    prepare_import(batch_invariant=False)
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config.__func__

    def decide_and_turn_on(platform: type, config: Any) -> None:
        decide(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(decide_and_turn_on)


WORLD = launch.start()
PATH = small.write("qwen3", 0, Path(sys.argv[1]))
MODEL = small.build("qwen3", 0)
keep_asynchronous()
ENGINE = VllmEngine(str(PATH), small.engine_config(), seed=0, launch_id=WORLD.launch_id)
# Of GPUs: imported once the engine has set its environment.
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402
from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split  # noqa: E402
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample  # noqa: E402

CORE = ENGINE._llm.llm_engine.engine_core.engine_core


def sampling(**changes: object) -> Any:
    return small.sampling(**{"num_responses": 2, "max_response_tokens": 8, **changes})


def gap(change: Callable[[Tensor], Tensor], **changes: object) -> float:
    groups = ENGINE.generate(PROMPTS, sampling(**changes))
    return small.logprob_gap(MODEL, PROMPTS, groups, change)


def is_what_gpus_run() -> None:
    runner = type(CORE.model_executor.driver_worker.worker.model_runner)
    assert "vllm.v1.worker.gpu.model_runner" in {base.__module__ for base in runner.__mro__}
    assert CORE.async_scheduling and CORE.batch_queue_size == 2


def logprobs_are_of_the_sampled_distribution() -> None:
    for temperature in (1.0, 0.7):
        assert gap(lambda x, t=temperature: x / t, temperature=temperature) <= 1e-4


def truncation_renormalises() -> None:
    def largest(logits: Tensor) -> Tensor:
        logits = logits / 0.7
        smallest_kept = logits.topk(5).values[:, -1:]
        return logits.masked_fill(logits < smallest_kept, -torch.inf)

    assert gap(largest, temperature=0.7, top_k=5) <= 1e-4


def greedy() -> None:
    groups = ENGINE.generate(PROMPTS, sampling(temperature=0.0, num_responses=1, seed=None))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        best = small.reference_logits(MODEL, prompt, completion).argmax(-1).tolist()
        assert best == list(completion.token_ids)


def samples_depend_on_seed_prompt_and_index_only() -> None:
    groups = small.tokens(ENGINE.generate(PROMPTS, sampling()))
    assert small.tokens(ENGINE.generate(PROMPTS[::-1], sampling())) == groups[::-1]
    one = small.tokens(ENGINE.generate(PROMPTS[1:2], sampling(num_responses=1)))
    assert one == [groups[1][:1]]
    other = small.tokens(ENGINE.generate([replace(PROMPTS[0], uid="other")], sampling()))[0]
    reseeded = small.tokens(ENGINE.generate(PROMPTS[:1], sampling(seed=12)))[0]
    assert len({tuple(row) for row in (*groups[0], *other, *reseeded)}) == 6


def scores_are_those_of_generation() -> None:
    groups = ENGINE.generate(PROMPTS, sampling(num_responses=1))
    scores = ENGINE.score(
        [
            (*prompt.token_ids, *one.token_ids)
            for prompt, (one,) in zip(PROMPTS, groups, strict=True)
        ]
    )
    for prompt, (one,), row in zip(PROMPTS, groups, scores, strict=True):
        of_response = torch.tensor(row[len(prompt.token_ids) - 1 :])
        assert (of_response - torch.tensor(one.sampler_logprobs)).abs().max() <= 1e-4


def the_cache_is_dropped_behind_a_step_too_many() -> None:
    """Asynchronously, a step is queued before it is known that all responses are done. It holds no
    block of the cache, and what it computes is nobody's."""
    before = small.tokens(ENGINE.generate(PROMPTS, sampling()))
    assert len(CORE.batch_queue) == 1, "else this shows nothing"
    assert ENGINE._llm.reset_prefix_cache()
    assert small.tokens(ENGINE.generate(PROMPTS, sampling())) == before


def annealed_temperatures() -> None:
    engine = VllmEngine(str(PATH), cases.engine_config(), seed=0, launch_id=WORLD.launch_id)
    cases.each_request_has_its_own(engine, MODEL, PROMPTS, 8)
    cases.a_response_goes_on_where_it_was(engine, MODEL, PROMPTS[0], 8)
    cases.one_temperature_is_the_plain_one(engine, PROMPTS[:1], 4)


def shares_of_the_samples() -> None:
    """Of the kernel: chi-squared of 800 samples of 4 tokens over positions, and over the seeds of
    responses to a prompt."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 800
    logits = probabilities.log().expand(count, 4).contiguous()
    numbers = torch.arange(count)
    one, zero = torch.ones(count), torch.zeros(count, dtype=torch.int64)
    states, seeds = torch.zeros(count, dtype=torch.int32), torch.full((count,), 12345)
    flags = {"apply_temperature": False, "is_drafting": False}
    by_position = gumbel_sample(logits, states, one, seeds, numbers, **flags)
    by_seed = gumbel_sample(logits, numbers.int(), one, numbers + 2**61, zero, **flags)
    for drawn in (by_position, by_seed):
        counts = np.bincount(drawn.tolist(), minlength=4)
        wanted = probabilities.numpy() * count
        # 99.9 % of all samples are below, with 3 degrees of freedom.
        assert ((counts - wanted) ** 2 / wanted).sum() < 16.27, counts


def smallest_sets(logits: Tensor, shares: list[float]) -> Tensor:
    """Which tokens of each row are in the smallest set whose probability reaches the share, [rows,
    vocabulary]."""
    ordered, index = logits.double().softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = before < torch.tensor(shares)[:, None]
    return torch.zeros_like(kept).scatter(-1, index, kept)


def check_truncated(found: Tensor, logits: Tensor, kept: Tensor) -> None:
    assert torch.equal(found > -torch.inf, kept), (found > -torch.inf).sum(-1)
    assert torch.equal(found[kept], logits[kept])


def truncation() -> None:
    """The 7 largest; the smallest set that reaches 0.6; both, first the largest; neither."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    largest = torch.tensor([7, VOCAB, 9, VOCAB], dtype=torch.int32)
    found = apply_top_k_top_p(logits.clone(), largest, torch.tensor([1.0, 0.6, 0.8, 1.0]))
    left = logits.clone()
    for row, count in ((0, 7), (2, 9)):
        left[row, left[row] < left[row].topk(count).values[-1]] = -torch.inf
    kept = smallest_sets(left, [2.0, 0.6, 0.8, 2.0]) & (left > -torch.inf)
    assert kept[0].sum() == 7 and 0 < kept[2].sum() < 9 and kept[3].all()
    check_truncated(found, logits, kept)


def truncation_of_small_batches() -> None:
    """Where a GPU has more processors than the batch has rows, each row is shared out over
    several."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    found = logits.clone()
    _apply_topp_split(found, None, torch.tensor([0.9, 0.6, 1.0]), -torch.inf, 4)
    check_truncated(found, logits, smallest_sets(logits, [0.9, 0.6, 2.0]))


def updated_weights_are_used() -> None:
    """Last: the engine has other weights from then on."""
    model = small.build("qwen3", 1)
    ENGINE.load_weights(iter(model.state_dict().items()), 1)
    groups = ENGINE.generate(PROMPTS, sampling())
    assert small.logprob_gap(model, PROMPTS, groups, lambda x: x) <= 1e-4
    assert all(completion.weight_version == 1 for group in groups for completion in group)


CASES = (
    is_what_gpus_run,
    logprobs_are_of_the_sampled_distribution,
    truncation_renormalises,
    greedy,
    samples_depend_on_seed_prompt_and_index_only,
    scores_are_those_of_generation,
    the_cache_is_dropped_behind_a_step_too_many,
    annealed_temperatures,
    shares_of_the_samples,
    truncation,
    truncation_of_small_batches,
    updated_weights_are_used,
)

if __name__ == "__main__":
    small.run_cases(CASES)
