"""Computes steps again: one optimizer step from a bundle in run_dir/nonfinite, which shows where
numbers stop being finite, or any recorded step of a run with source.schedule=free.

    torchrun --nproc-per-node N tools/replay_step.py BUNDLE
    python tools/replay_step.py BUNDLE
    torchrun --nproc-per-node N tools/replay_step.py RUN --step 7

With as many processes as the run had loss and gradient norm are those of the run, bit for bit; one
process computes the same, rounded otherwise. Of a bundle it shows the inputs (logprobs, advantages,
weights), loss and gradient norm of each micro-batch, and the gradient of each tensor.
nonfinite.bundle_step=N writes a bundle of any step of a run.

Of a RUN (its run_dir) it begins with the newest checkpoint before the step, else with the model of
the start, and does the updates up to the step on the responses that run_dir/record has. It compares
all metrics with those of the run, and the weights with checkpoints on the way; where something
differs in the layout of the run it ends with code 1. --bundle writes the step as a bundle.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.data.multimodal.vision import vision_of
from megatron_rl.loss import Method
from megatron_rl.plugins import add_plugin_option, load_plugins
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.reporting.report import table
from megatron_rl.runtime.device import make_deterministic
from megatron_rl.runtime.launch import World, exit_process, reported, start
from megatron_rl.signals import signals_of
from megatron_rl.trainer.build import policy_settings
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from tools.replay.gradients import gathered_gradients, gradient_norm
from tools.replay.read_bundle import Bundle, read_bundle
from tools.replay.recorded_run import Again, ReplayedRun, config_of, find_route

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


def layout(config: Config, num_processes: int, world_size: int) -> ParallelConfig:
    """The run's layout, of ``num_processes``, or that of one process.

    Raises:
        ValueError: neither is possible with ``world_size`` processes.
    """
    if world_size == num_processes:
        return config.parallel
    if world_size != 1:
        raise ValueError(
            f"the run had {num_processes} processes and this is {world_size}; start as many, or one"
        )
    return config.parallel.model_copy(update=ONE_PROCESS)


def build_policy(bundle: Bundle, parallel: ParallelConfig) -> MegatronPolicy:
    """The policy with the weights of the bundle, which may be NaN."""
    config = bundle.config
    signals = signals_of(Method(config.method), config.seed)
    settings = replace(
        policy_settings(config, signals, vision_of(config.model.path, config.data)),
        keep_reference=False,
        total_optimizer_steps=1,
        require_finite=False,
    )
    if config.trainer.deterministic:
        make_deterministic(os.environ)
    return MegatronPolicy(config.model, parallel, config.precision, config.optim, settings)


def replay(
    bundle: Bundle, policy: MegatronPolicy, splits: Sequence[Sequence[Sequence[int]]]
) -> Replay:
    """Collective. ``splits``: the micro-batches of each data-parallel rank."""
    config = bundle.config
    at_once = policy.batching.rule.multiple
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    signals = signals_of(method, config.seed)
    experience = bundle.experience
    local = experience.local
    assert local is not None
    tokens = experience.scored_tokens

    def compute(begin: int, end: int) -> Part:
        own = splits[policy.ranks.data_rank][begin:end]
        part = replace(local, microbatches=own)
        loss = MinibatchLoss(method, signals, experience, bundle.rows, tokens, part)
        totals = policy.backward(loss.batch, loss, signals.update_outputs)
        rows = [row for split in splits for microbatch in split[begin:end] for row in microbatch]
        return Part(rows, totals.loss, gradient_norm(policy))

    count = len(splits[0])
    parts = [compute(begin, begin + at_once) for begin in range(0, count, at_once)]
    whole = compute(0, count)
    return Replay(
        inputs=_inputs(bundle),
        weights=[_facts(name, tensor) for name, tensor in policy.gathered_weights()],
        parts=parts,
        whole=whole,
        gradients=[_facts(name, tensor) for name, tensor in gathered_gradients(policy)],
    )


def _facts(name: str, tensor: Tensor) -> TensorFacts:
    values = tensor.detach().double()
    return TensorFacts(name, values.norm().item(), int((~values.isfinite()).sum()))


def _inputs(bundle: Bundle) -> list[TensorFacts]:
    experience = bundle.experience
    columns = experience.responses.tokens.columns
    tensors = {
        "sampler logprobs": torch.from_numpy(columns["sampler_logprobs"]),
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
    if options.step is not None:
        run_steps(options, world)
        return
    bundle = read_bundle(options.source)
    parallel = layout(bundle.config, bundle.world_size, world.size)
    splits = bundle.splits
    if world.size != bundle.world_size:
        splits = [[microbatch for split in bundle.splits for microbatch in split]]
    result = replay(bundle, build_policy(bundle, parallel), splits)
    if world.is_main:
        print(describe(bundle, result, options.top), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(result)) + "\n", encoding="ascii")


def run_steps(options: argparse.Namespace, world: World) -> None:
    """The steps of a run up to ``--step``.

    Raises:
        ValueError: they cannot be computed again, or are not those of the run.
    """
    route = world.from_main(lambda: find_route(options.source, options.step, options.after))
    config = config_of(route, with_bundle=options.bundle)
    parallel = layout(config, route.world_size, world.size)
    begin = route.checkpoint or f"the model {config.model.path}"
    if world.is_main:
        print(f"from {begin}, {route.step - route.after} steps", flush=True)
    steps = ReplayedRun(route, config.model_copy(update={"parallel": parallel}), world)
    done = []
    for step in range(route.after + 1, route.step + 1):
        again = steps.step(step)
        done.append(again)
        if world.is_main:
            print(describe_step(again, options.top), flush=True)
    if world.is_main and options.json is not None:
        text = json.dumps({again.recorded.step: again.metrics for again in done})
        options.json.write_text(text + "\n", encoding="ascii")
    if world.size == route.world_size and not all(again.is_equal for again in done):
        raise ValueError(
            f"{route.run}: not the steps of the run; its folder, the program, a library or the"
            " machine has changed, or the device adds in an order that varies"
        )


def describe_step(again: Again, top: int) -> str:
    """What a step was trained on, and whether it is that of the run."""
    recorded = again.recorded
    versions, counts = np.unique(recorded.token_versions, return_counts=True)
    tokens = ", ".join(f"{count} of version {version}" for version, count in zip(versions, counts))
    lines = [
        f"step {recorded.step}: {len(recorded.scores)} responses to {len(recorded.uids)} prompts,"
        f" from number {min(recorded.groups)} of the stream on; tokens: {tokens}"
    ]
    different = again.different
    if different is None:
        lines.append("  the run has no metrics of it to compare with")
    elif not different:
        lines.append(f"  {len(again.metrics)} metrics: all equal to those of the run")
    else:
        lines.append(f"  {len(different)} of {len(again.metrics)} metrics are not those of the run")
        rows = [(name, repr(here), repr(there)) for name, (here, there) in different.items()]
        lines.append(table([("metric", "here", "in the run"), *rows[:top]]))
    if again.weights is not None:
        names = ", ".join(again.weights[:4])
        verdict = f"{len(again.weights)} tensors differ ({names})" if names else "all equal"
        lines.append(f"  weights and those of the checkpoint: {verdict}")
    return "\n".join(lines)


def main() -> None:
    """Ends the process: 0, or 1 on any error."""
    parser = parser_of(__doc__)
    where = "a folder run_dir/nonfinite/step_NNNNNN, or a run_dir"
    parser.add_argument("source", metavar="BUNDLE | RUN", type=Path, help=where)
    parser.add_argument("--top", type=int, default=20, help="gradients or differences shown")
    parser.add_argument("--json", type=Path, help="a file for all the numbers")
    parser.add_argument("--step", type=int, help="of RUN: the last one to compute")
    after = "of RUN: begin after this step (0: with the model); default: the nearest that is kept"
    parser.add_argument("--after", type=int, help=after)
    bundle = "of RUN: write the first minibatch of the step to RUN/nonfinite/step_NNNNNN"
    parser.add_argument("--bundle", action="store_true", help=bundle)
    add_plugin_option(parser)
    options = parser.parse_args()
    if options.step is None and (options.bundle or options.after is not None):
        parser.error("--after and --bundle are for a RUN with --step N")
    with reported():
        world = start()
        load_plugins(options.plugin)
        run(options, world)
    exit_process(0)


if __name__ == "__main__":
    main()
