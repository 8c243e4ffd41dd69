"""torchrun program (2 processes): each remedy of the policy taken away, one at a time, and what happens then.

Arguments: a folder for the models, the file for the figures (JSON, written by rank 0).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_rl.policy import cpu, megatron_policy, optimizer
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import cpu as torch_cpu
from megatron_rl.types import LossOutput, SequenceBatch, TokenView
from tests.numerics import models
from tests.numerics.policy_reference import make_batch, scores
from tests.numerics.policy_worker import build

PIPELINE: dict[str, Any] = dict(pipeline=2)
EXPERTS: dict[str, Any] = dict(expert=2)


def simple_loss(view: TokenView) -> LossOutput:
    return LossOutput(-(view.logprobs * torch.cos(view.index.float())).sum(), {})


def rows(policy: MegatronPolicy, batch: SequenceBatch) -> list[list[int]]:
    mine = list(range(batch.num_responses))[policy.data_parallel_rank :: policy.data_parallel_size]
    return [mine[: len(mine) // 2], mine[len(mine) // 2 :]]


@contextlib.contextmanager
def without_stand_in(name: str) -> Iterator[None]:
    kept = {key: value for key, value in torch_cpu.STAND_INS.items() if key != name}
    with mock.patch.object(torch_cpu, "STAND_INS", kept):
        yield


@contextlib.contextmanager
def without_branch(name: str) -> Iterator[None]:
    """The function mode without one of its answers."""
    original = torch_cpu.CpuForCuda.__torch_function__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        skipped = {
            "device": str(kwargs.get("device", "")).startswith("cuda"),
            "cuda": func is torch.Tensor.cuda,
            "type": func is torch.Tensor.type,
        }
        return func(*args, **kwargs) if skipped[name] else original(self, func, types, args, kwargs)

    with mock.patch.object(torch_cpu.CpuForCuda, "__torch_function__", dispatch):
        yield


@contextlib.contextmanager
def without_remedy(name: str) -> Iterator[None]:
    """megatron as it is shipped, for one name."""
    remedy = next(remedy for remedy in cpu.REMEDIES if remedy.name == name)
    rest = tuple(other for other in cpu.REMEDIES if other is not remedy)
    installed = getattr(remedy.module, name)
    if cpu.ORIGINALS[remedy] is cpu.ABSENT:
        delattr(remedy.module, name)
    else:
        setattr(remedy.module, name, cpu.ORIGINALS[remedy])
    try:
        with mock.patch.object(cpu, "REMEDIES", rest):
            yield
    finally:
        setattr(remedy.module, name, installed)


def whole_run(folder: Path, model: str, layout: dict[str, Any], **more: Any) -> None:
    """Everything a step of training does."""
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # made once a process; another run must make its own
    queued = len(torch.cuda._queued_calls)
    try:
        policy = build(folder / model, layout, **more)
        batch = make_batch()
        policy.logprobs(batch, rows(policy, batch), reference=True)
        policy.update(batch, rows(policy, batch), simple_loss)
        assert len(torch.cuda._queued_calls) == queued, "calls wait for a CUDA that never comes"
    finally:
        megatron_policy.groups.destroy()


def outcome(action: Callable[[], None]) -> str:
    """"" when it works, else the error."""
    try:
        action()
    except (RuntimeError, AssertionError, AttributeError, TypeError, NameError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def needed(folder: Path) -> dict[str, dict[str, str]]:
    """For each remedy, the error without it (on this rank); "" would mean that it is needed no more."""
    scenarios: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "dense": ("qwen2", {}, {}),
        "bfloat16": ("qwen2", {}, {"params": "bfloat16"}),
        "pipeline": ("qwen2_tied", PIPELINE, {}),
        "experts": ("mixtral", EXPERTS, {}),
        "recompute": ("qwen2", {"recompute": "full"}, {}),
    }
    trials: dict[str, tuple[Any, str]] = {
        "stand_in current_device": (without_stand_in("current_device"), "dense"),
        "stand_in synchronize": (without_stand_in("synchronize"), "pipeline"),
        **{f"stand_in {name}": (without_stand_in(name), "experts") for name in ("Stream", "current_stream")},
        "branch device": (without_branch("device"), "dense"),
        "branch cuda": (without_branch("cuda"), "pipeline"),
        "branch type": (without_branch("type"), "bfloat16"),
        "remedy te_general_gemm": (without_remedy("te_general_gemm"), "experts"),
        "remedy maybe_move_tensor_to_cpu": (without_remedy("maybe_move_tensor_to_cpu"), "experts"),
        "remedy _get_cuda_rng_state": (without_remedy("_get_cuda_rng_state"), "recompute"),
        "remedy _set_cuda_rng_state": (without_remedy("_set_cuda_rng_state"), "recompute"),
    }
    found = {}
    for label, (scope, scenario) in trials.items():
        model, layout, more = scenarios[scenario]
        with scope:
            found[label] = outcome(lambda model=model, layout=layout, more=more: whole_run(folder, model, layout, **more))
        found[f"with everything: {scenario}"] = found.get(f"with everything: {scenario}", "not run")
    for scenario, (model, layout, more) in scenarios.items():
        found[f"with everything: {scenario}"] = outcome(lambda m=model, la=layout, mo=more: whole_run(folder, m, la, **mo))
    return found


def interleaved_two_stages(folder: Path) -> dict[str, float]:
    """Largest logprob error, during an update, of an interleaved pipeline of two stages with our settings, and with megatron's
    default for batched point-to-point messages."""
    batch = make_batch(length=16)
    wanted = scores(models.make("qwen2"), batch)[0].detach()
    policy = build(folder / "qwen2", dict(pipeline=2, virtual_pipeline=2))
    policy.config.variable_seq_lengths = False  # with it, megatron's default aborts the process instead of being wrong
    found = {}
    for label, batched in (("ours", False), ("default", True)):
        policy.config.batch_p2p_comm, policy.config.overlap_p2p_comm = batched, not batched

        def gap(view: TokenView) -> LossOutput:
            return LossOutput(view.logprobs.sum(), {"gap_max": (view.logprobs.detach() - wanted[view.index]).abs().max()})

        totals = policy.backward(batch, [[row] for row in range(batch.num_responses)], gap)
        found[label] = totals.metrics["gap_max"]
    policy.close()
    return found


def late_loss_setting(folder: Path) -> dict[str, float]:
    """Gradient norm over two data-parallel ranks, and with calculate_per_token_loss set only after DDP has wrapped."""
    batch = make_batch()
    original, found = megatron_policy.transformer_config, {}

    def late(*args: Any) -> Any:
        config = original(*args)
        config.calculate_per_token_loss = False
        return config

    for label, make in (("ours", original), ("late", late)):
        with mock.patch.object(megatron_policy, "transformer_config", make):
            policy = build(folder / "qwen2", {})
        policy.config.calculate_per_token_loss = True
        found[label] = policy.update(batch, rows(policy, batch), simple_loss).grad_norm
        policy.close()
    return found


def shared_step(folder: Path) -> dict[str, Any]:
    """Adam's step counts after loading the state of a distributed optimizer, and two updates later."""
    batch = make_batch()
    policy = build(folder / "qwen2", dict(distributed_optimizer=True))
    policy.update(batch, rows(policy, batch), simple_loss)
    (part,) = optimizer.parts(policy.optimizer)
    state = part.optimizer.state
    one = next(iter(state.values()))["step"]
    for entry in state.values():
        entry["step"] = one  # what megatron's load leaves behind
    shared = optimizer.unshare_steps(policy.optimizer)
    for _ in range(2):
        policy.update(batch, rows(policy, batch), simple_loss)
    steps = sorted({float(entry["step"]) for entry in state.values()})
    policy.close()
    return {"shared": shared, "parameters": len(state), "steps": steps}


def non_finite(folder: Path) -> dict[str, Any]:
    """An update whose loss is not finite on one rank only."""
    batch = make_batch()
    policy = build(folder / "qwen2", {})
    before = {name: value.clone() for name, value in policy.gathered_weights()}

    def broken(view: TokenView) -> LossOutput:
        scale = float("nan") if policy.data_parallel_rank == 1 else 1.0
        return LossOutput(view.logprobs.sum() * scale, {})

    result = policy.update(batch, rows(policy, batch), broken)
    same = all(torch.equal(before[name], value) for name, value in policy.gathered_weights())
    again = policy.update(batch, rows(policy, batch), simple_loss)
    policy.close()
    return {"skipped": result.skipped, "weights_kept": same, "next_skipped": again.skipped, "next_norm": again.grad_norm}


def random_state(folder: Path) -> bool:
    """Whether building, logprobs and an update leave the global random state alone."""
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    whole_run(folder, "qwen3_moe", EXPERTS)
    return torch.equal(before, torch.get_rng_state())


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for name in ("qwen2", "qwen2_tied", "mixtral", "qwen3_moe"):
            models.save(name, folder / name)
    dist.barrier()
    figures: dict[str, Any] = {}
    for probe in (interleaved_two_stages, late_loss_setting, shared_step, non_finite, random_state, needed):
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, probe(folder))
        figures[probe.__name__] = gathered
        if dist.get_rank() == 0:
            out.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
