"""Computes one optimizer step again, from a bundle in run_dir/nonfinite, and shows where numbers
stop being finite.

    torchrun --nproc-per-node N tools/replay_step.py BUNDLE
    python tools/replay_step.py BUNDLE

The first needs as many processes as the run had: loss and gradient norm are then those of the run,
bit for bit. The second computes the same in one process, rounded otherwise. Shown are the inputs
(logprobs, advantages, weights), loss and gradient norm of each micro-batch, and the gradient of
each tensor. ``nonfinite.bundle_step=N`` writes a bundle of any step of a run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.vision import vision_of
from megatron_rl.loss import Method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.reporting.report import table
from megatron_rl.runtime.launch import World, configure_logging, exit_process, report, start
from megatron_rl.trainer.bundle import Bundle, read_bundle
from megatron_rl.trainer.masked_images import mask_seed
from megatron_rl.trainer.objective import MinibatchLoss, token_settings, tokens_per_microbatch
from megatron_rl.types import Share

ONE_PROCESS = dict(
    tensor=1,
    pipeline=1,
    virtual_pipeline=None,
    context=1,
    expert=1,
    expert_tensor=1,
    sequence=False,
    first_stage_layers=None,
    last_stage_layers=None,
)


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in two numbers: ``norm`` of all its values, and how many are NaN or infinite."""

    name: str
    norm: float
    not_finite: int


@dataclass(frozen=True)
class Part:
    """Some micro-batches (one, but for interleaved pipelines) of every data-parallel rank."""

    rows: list[int]
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Replay:
    """What was computed; ``whole`` is the minibatch as the run has it."""

    inputs: list[TensorFacts]
    weights: list[TensorFacts]
    parts: list[Part]
    whole: Part
    gradients: list[TensorFacts]


def layout(bundle: Bundle, world_size: int) -> ParallelConfig:
    """The run's layout, or that of one process.

    Raises:
        ValueError: neither is possible with ``world_size`` processes.
    """
    if world_size == bundle.world_size:
        return bundle.config.parallel
    if world_size != 1:
        raise ValueError(
            f"the run had {bundle.world_size} processes and this is {world_size}; start as many,"
            " or one"
        )
    return bundle.config.parallel.model_copy(update=ONE_PROCESS)


def build_policy(bundle: Bundle, parallel: ParallelConfig) -> MegatronPolicy:
    """The policy with the weights of the bundle, which may be NaN."""
    config = bundle.config
    method = Method(config.method)
    limit = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    limit += method.needs.end_token is not None
    return MegatronPolicy(
        config.model,
        parallel,
        config.precision,
        config.optim,
        PolicySettings(
            temperature=config.rollout.temperature,
            keep_reference=False,
            total_optimizer_steps=1,
            max_sequence_tokens=limit,
            tokens_per_microbatch=tokens_per_microbatch(config.batch, method),
            share_prompts=config.batch.share_prompts,
            **token_settings(method),
            require_finite=False,
            image_processor=vision_of(config.model.path, config.data),
        ),
    )


def replay(
    bundle: Bundle, policy: MegatronPolicy, splits: Sequence[Sequence[Sequence[int]]]
) -> Replay:
    """Collective. ``splits``: the micro-batches of each data-parallel rank."""
    config = bundle.config
    at_once = policy.microbatch_multiple
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    experience = replace(bundle.experience, mask_seed=mask_seed(config.seed, bundle.step))
    assert experience.share is not None
    batch = experience.share.batch
    loss = MinibatchLoss(method, experience, bundle.rows, experience.scored_tokens)

    def compute(begin: int, end: int) -> Part:
        own = splits[policy.data_parallel_rank][begin:end]
        share = loss.share(Share(batch, own))
        totals = policy.backward(share.batch, share.microbatches, loss)
        rows = [row for split in splits for microbatch in split[begin:end] for row in microbatch]
        return Part(rows, totals.loss, policy.gradient_norm())

    count = len(splits[0])
    parts = [compute(begin, begin + at_once) for begin in range(0, count, at_once)]
    whole = compute(0, count)
    return Replay(
        inputs=_inputs(bundle),
        weights=[_facts(name, tensor) for name, tensor in policy.gathered_weights()],
        parts=parts,
        whole=whole,
        gradients=[_facts(name, tensor) for name, tensor in policy.gathered_gradients()],
    )


def _facts(name: str, tensor: Tensor) -> TensorFacts:
    values = tensor.detach().double()
    return TensorFacts(name, values.norm().item(), int((~values.isfinite()).sum()))


def _inputs(bundle: Bundle) -> list[TensorFacts]:
    experience = bundle.experience
    tensors = {
        "sampler logprobs": experience.sampler_logprobs,
        "old logprobs": None if experience.old is None else experience.old.logprobs,
        "reference logprobs": None if experience.ref is None else experience.ref.logprobs,
        "rewards": experience.rewards,
        "advantages": bundle.credit.advantages,
    }
    return [_facts(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def describe(bundle: Bundle, result: Replay, top: int) -> str:
    """The replay as text: the tensors with values that are not finite first, then those with the
    largest gradients."""
    whole = result.whole
    lines = [f"step {bundle.step}, minibatch {bundle.number}: {len(whole.rows)} responses"]
    lines.append(f"loss {whole.loss!r}, gradient norm {whole.grad_norm!r}")
    if bundle.loss is not None and bundle.grad_norm is not None:
        same = _same(bundle.loss, whole.loss) and _same(bundle.grad_norm, whole.grad_norm)
        verdict = "equal" if same else "not equal"
        lines.append(
            f"in the run: loss {bundle.loss!r}, gradient norm {bundle.grad_norm!r} ({verdict})"
        )
    bad_weights = [facts for facts in result.weights if facts.not_finite]
    lines += [
        "",
        table([("input", "norm", "not finite"), *map(_row, [*result.inputs, *bad_weights])]),
    ]
    if not bad_weights:
        lines.append(f"weights: all {len(result.weights)} tensors are finite")
    parts = [
        (
            str(number),
            str(len(part.rows)),
            f"{part.loss:g}",
            f"{part.grad_norm:g}",
            _prompts(bundle, part),
        )
        for number, part in enumerate(result.parts)
    ]
    lines += ["", table([("micro-batch", "responses", "loss", "gradient norm", "prompts"), *parts])]
    ordered = sorted(result.gradients, key=lambda facts: (-facts.not_finite, -facts.norm))
    lines += ["", table([("gradient of", "norm", "not finite"), *map(_row, ordered[:top])])]
    if len(ordered) > top:
        lines.append(f"and {len(ordered) - top} more (--top)")
    return "\n".join(lines)


def _row(facts: TensorFacts) -> tuple[str, str, str]:
    return facts.name, f"{facts.norm:g}", str(facts.not_finite)


def _prompts(bundle: Bundle, part: Part) -> str:
    uids = list(dict.fromkeys(bundle.uids[row] for row in part.rows))
    return ", ".join(uids[:2]) + (", ..." if len(uids) > 2 else "")


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def run(options: argparse.Namespace, world: World) -> None:
    bundle = read_bundle(options.bundle)
    parallel = layout(bundle, world.size)
    splits = bundle.splits
    if world.size != bundle.world_size:
        splits = [[microbatch for split in bundle.splits for microbatch in split]]
    result = replay(bundle, build_policy(bundle, parallel), splits)
    if world.is_main:
        print(describe(bundle, result, options.top), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(result)) + "\n", encoding="ascii")


def main() -> None:
    """Ends the process: 0, or 1 on any error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="a folder run_dir/nonfinite/step_NNNNNN")
    parser.add_argument("--top", type=int, default=20, help="gradients shown")
    parser.add_argument("--json", type=Path, help="a file for all the numbers")
    options = parser.parse_args()
    world = start()
    configure_logging(world.rank)
    try:
        run(options, world)
    except BaseException as error:  # noqa: BLE001 (reported, then the process ends with code 1)
        report(error, world.rank)
        exit_process(1)
    exit_process(0)


if __name__ == "__main__":
    main()
