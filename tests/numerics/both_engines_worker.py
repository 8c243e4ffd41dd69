"""Two processes: policy and rollout engine side by side. Sampler logprobs equal those of the policy
and of transformers after every update and sync, for policies split by tensor, by layer and by
data."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.weights import worker
from megatron_rl.errors import WeightSyncError
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rollouts.logprob_check import LogprobCheck, check_sequences
from megatron_rl.runtime import launch
from megatron_rl.weight_sync.gather import GatherSync
from tests import zoo
from tests.numerics import rollout_models as small
from tests.numerics.policy_cases import optim

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
ROOT = FOLDER / WORLD.launch_id
PROMPTS = small.make_prompts(8)
TEMPERATURE = 0.7
OPTIM = optim(learning_rate=5e-3, weight_decay=0.0, beta2=0.95, eps=1e-8, clip_grad=1.0)
ENGINES: dict[str, VllmEngine] = {}


def odd_tokens_are_good(batch):
    """A loss with a gradient in every weight: minus the mean logprob of odd tokens plus that of
    even ones."""
    responses = [
        batch.token_ids[end - n : end]
        for end, n in zip(batch.offsets[1:].tolist(), batch.response_lengths.tolist(), strict=True)
    ]
    sign = (torch.cat(responses) % 2) * 2.0 - 1.0

    def loss(view: TokenView) -> LossOutput:
        return LossOutput(loss=-(view.logprobs * sign[view.index]).sum() / sign.numel(), metrics={})

    return loss


def agree(arch: str, layout: dict, **more: Any) -> None:
    path = ROOT / f"{arch}_1"
    if WORLD.rank == 0:
        small.write(arch, 1, ROOT)
    WORLD.barrier()
    policy = zoo.build_policy(path, layout, optim=OPTIM, temperature=TEMPERATURE, **more)
    if arch not in ENGINES:
        ENGINES[arch] = VllmEngine(
            str(path), small.engine_config(tensor=2), seed=0, launch_id=WORLD.launch_id
        )
    engine, model = ENGINES[arch], small.build(arch, 1)
    sync = GatherSync(policy, engine, verify=True)
    # One sequence for two data-parallel ranks: one of them has nothing to score.
    score = partial(policy.score_alone, temperature=1.0)
    sequences = check_sequences(PROMPTS[:1])
    logprob_check = LogprobCheck(score, engine, WORLD, sequences, every=1, tolerance=1e-4)
    before = scores = None
    for version in range(3):
        report = sync.sync(version)
        assert report.version == version == engine.weight_version
        held = 4 * sum(
            item.tensor.numel() for item in policy.view.served
        )  # the other rank wants all of it, or has it already
        assert report.bytes_sent == (held if layout.keys() & {"tensor", "pipeline"} else 0)
        expected = logprob_check.expected(version)
        assert logprob_check.check(report, expected).logprob_check_diff_max <= 1e-4
        if before is not None:
            assert (expected - scores).abs().max() > 0.05, "the update changed them"
        scores = expected
        groups = engine.generate(PROMPTS, small.sampling(temperature=TEMPERATURE))
        if before is not None:
            assert small.logprob_gap(model, PROMPTS, groups, lambda x: x / TEMPERATURE) > 0.05, (
                "the update changed the weights"
            )
        model.load_state_dict(
            dict(policy.gathered_weights()), strict=not model.config.tie_word_embeddings
        )
        assert small.logprob_gap(model, PROMPTS, groups, lambda x: x / TEMPERATURE) <= 1e-4
        rows = [
            (prompt.token_ids, one.token_ids)
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for one in group
        ]
        batch = sequence_batch(rows)
        ranks, rank = policy.ranks.data, policy.ranks.data_rank
        split = [
            list(range(rank, len(rows), 2 * ranks)),
            list(range(rank + ranks, len(rows), 2 * ranks)),
        ]
        scored = zoo.of_all_rows(policy.score(LocalBatch(batch, split))).logprobs
        assert (scored.double() - small.logprobs(groups)).abs().max() <= 1e-4, "sampler and policy"
        before = policy.update(LocalBatch(batch, split), odd_tokens_are_good(batch))
        assert before.grad_norm > 0 and not before.skipped
    if arch == "qwen2_tied":
        stale_head_is_noticed(sync, logprob_check)
    if policy.view.adapters:
        base_is_noticed(policy, sync, logprob_check)
    policy.close()


def base_is_noticed(policy: MegatronPolicy, sync: GatherSync, logprob_check: LogprobCheck) -> None:
    """The weights leave without their adapters: the bytes arrive, and only the numbers tell."""
    adapters, policy.view.adapters = policy.view.adapters, {}
    stale = sync.sync(9)
    policy.view.adapters = adapters
    try:
        logprob_check.check(stale, logprob_check.expected(9))
    except WeightSyncError as error:
        assert "step 9" in str(error) and "nats" in str(error), error
    else:
        raise AssertionError("the base passed")


def stale_head_is_noticed(sync: GatherSync, logprob_check: LogprobCheck) -> None:
    """The head of a tied model is not packed again: every byte arrives, the digests agree, and only
    the numbers tell, on every rank."""
    repack, worker.repack_cpu = worker.repack_cpu, lambda model: None
    try:
        stale = sync.sync(9)
    finally:
        worker.repack_cpu = repack
    try:
        logprob_check.check(stale, logprob_check.expected(9))
    except WeightSyncError as error:
        assert "step 9" in str(error) and "nats" in str(error), error
        assert len(set(WORLD.all_gather(str(error)))) == 1
    else:
        raise AssertionError("a stale head passed")
    report = logprob_check.check(sync.sync(10), logprob_check.expected(10))
    assert report.logprob_check_diff_max <= 1e-4


def random_state_after_both() -> None:
    """The global generators of the ranks are where the program left them: both draw what they would
    without any engine."""
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    ENGINES["qwen2_tied"].generate(PROMPTS, small.sampling())
    assert torch.equal(torch.rand(3), want)


if __name__ == "__main__":
    small.run_cases(
        {
            "agree tensor": partial(agree, "qwen2_tied", {"tensor": 2}),
            "agree pipeline": partial(agree, "qwen3", {"pipeline": 2}),
            "agree data": partial(agree, "qwen3", {"distributed_optimizer": True}),
            "agree adapters": partial(agree, "qwen3", {"tensor": 2}, lora={"rank": 4}),
            "random_state_after_both": random_state_after_both,
        }
    )
