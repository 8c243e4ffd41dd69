"""torchrun program (1 process, 1 GPU): every number format that the machine has, against bfloat16;
the memory that offloading frees.

Argument: a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from megatron.core.optimizer import Adam

from megatron_rl.config.rules.hardware import machine_problems
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from tests import zoo

FOLDER = Path(sys.argv[1])
PRECISIONS = ("bf16", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8")
# Lengths that divide by nothing: FP8 needs the padding.
LENGTHS = ((5, 20), (17, 33), (2, 7), (31, 64))


def write_model() -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(FOLDER / "model")
    return FOLDER / "model"


def build(path: Path, *overrides: str, keep_reference: bool = False) -> MegatronPolicy | str:
    """The policy, or why this machine has none."""
    config = zoo.configured(path, *overrides)
    sizes = json.loads((path / "config.json").read_text())
    problems = list(machine_problems(config, this_machine(), sizes))
    return problems[0] if problems else zoo.configured_policy(config, keep_reference=keep_reference)


def make_batch():
    draw = torch.Generator().manual_seed(1)
    return sequence_batch(
        [
            tuple(torch.randint(3, 512, (size,), generator=draw).tolist() for size in lengths)
            for lengths in LENGTHS
        ]
    )


BATCH, MICROBATCHES = make_batch(), [[0, 1], [2, 3]]


def loss(view: TokenView) -> LossOutput:
    return LossOutput(
        -(view.logprobs * torch.cos(view.index.to(view.logprobs.device).float())).sum() / 100, {}
    )


def formats(path: Path) -> None:
    expected = None
    for name in PRECISIONS:
        for logprobs in ("same", "bfloat16") if name != "bf16" else ("",):
            policy = build(
                path,
                f"precision={name}",
                *([f"precision.fp8.logprobs={logprobs}"] if logprobs else []),
            )
            if isinstance(policy, str):
                print(f"REFUSED {name}: {policy}", flush=True)
                break
            scores = policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs
            assert torch.isfinite(scores).all(), name
            expected = scores if expected is None else expected
            difference = (scores - expected).abs()
            if logprobs == "same":  # FP8 is coarse, and it is really used
                assert 1e-4 < difference.mean() < 0.1, f"{name}: {difference.mean()}"
            else:
                assert difference.max() < 1e-2, f"{name} without FP8: {difference.max()}"
            result = policy.update(LocalBatch(BATCH, MICROBATCHES), loss)
            assert not result.skipped and 0 < result.grad_norm < 1e3, f"{name}: {result}"
            assert not torch.equal(
                policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs, scores
            ), f"{name}: the update changed nothing"
            policy.close()
            print(
                f"OK {name} {logprobs}: mean difference {difference.mean().item():.2e}", flush=True
            )


def fused_adam() -> None:
    if this_machine().adam != "torch":
        assert Adam.__module__.startswith(this_machine().adam), (
            f"megatron took Adam of {Adam.__module__}"
        )
    print(f"OK adam {Adam.__module__}", flush=True)


def memory(path: Path) -> None:
    policy = build(path, "precision=bf16")
    assert not isinstance(policy, str)
    policy.update(LocalBatch(BATCH, MICROBATCHES), loss)
    before_weights = [item.tensor.detach().clone().cpu() for item in policy.held]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    count = sum(item.tensor.numel() for item in policy.held)
    # bfloat16 weights, float32 gradients, float32 copies and two moments
    for parts, num_bytes in ((("optimizer", "gradients"), 16 * count), (("weights",), 18 * count)):
        policy.offload(parts)
        freed = before - torch.cuda.memory_allocated()
        assert freed > 0.95 * num_bytes, f"{parts}: {freed} of {num_bytes} bytes freed"
    policy.reload()
    assert abs(torch.cuda.memory_allocated() - before) < 0.05 * 18 * count
    assert all(
        torch.equal(item.tensor.cpu(), want)
        for item, want in zip(policy.held, before_weights, strict=True)
    )
    policy.update(LocalBatch(BATCH, MICROBATCHES), loss)
    policy.close()
    print("OK memory", flush=True)


def starting_weights(path: Path) -> None:
    """A pass with them takes no more device memory, and no bit of them or of the trained weights
    changes."""
    policy = build(path, "precision=bf16", keep_reference=True)
    assert isinstance(policy, MegatronPolicy) and policy.reference is not None
    start = policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs
    for _ in range(2):
        policy.update(LocalBatch(BATCH, MICROBATCHES), loss)
        trained = policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs
        torch.cuda.reset_peak_memory_stats()
        policy.score(LocalBatch(BATCH, MICROBATCHES))
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        again = policy.score(LocalBatch(BATCH, MICROBATCHES), reference=True).logprobs
        assert torch.cuda.max_memory_allocated() <= peak + 2**20
        assert torch.equal(again, start) and not torch.equal(trained, start)
        assert torch.equal(policy.score(LocalBatch(BATCH, MICROBATCHES)).logprobs, trained)
    policy.close()
    print("OK reference", flush=True)


if __name__ == "__main__":
    launch.start()
    model = write_model()
    formats(model)
    fused_adam()
    memory(model)
    starting_weights(model)
    dist.destroy_process_group()
