"""Each patch of the policy is still needed, and cures what it is there for (real megatron-core,
two ranks)."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_rl.passes import LocalBatch, LossOutput, TokenView
from megatron_rl.policy import megatron_policy, optimizer, patches
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import device as torch_cpu
from megatron_rl.runtime.device import STAND_INS
from megatron_rl.types import SequenceBatch
from tests import zoo
from tests.numerics.policy_reference import make_batch, scores
from tests.ranks import on_ranks
from tests.zoo import tiny_policy

PIPELINE: dict[str, Any] = dict(pipeline=2)
EXPERTS: dict[str, Any] = dict(expert=2)


def simple_loss(view: TokenView) -> LossOutput:
    return LossOutput(-(view.logprobs * torch.cos(view.index.float())).sum(), {})


def rows(policy: MegatronPolicy, batch: SequenceBatch) -> list[list[int]]:
    mine = list(range(batch.num_responses))[policy.ranks.data_rank :: policy.ranks.data]
    return [mine[: len(mine) // 2], mine[len(mine) // 2 :]]


@contextlib.contextmanager
def without_replacement(name: str) -> Iterator[None]:
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
    patches.apply()  # notes what megatron has there
    patch = next(patch for patch in patches.PATCHES if patch.name == name)
    rest = tuple(other for other in patches.PATCHES if other is not patch)
    installed = getattr(patch.module, name)
    if patches.ORIGINALS[patch] is patches.ABSENT:
        delattr(patch.module, name)
    else:
        setattr(patch.module, name, patches.ORIGINALS[patch])
    try:
        with mock.patch.object(patches, "PATCHES", rest):
            yield
    finally:
        setattr(patch.module, name, installed)


def whole_run(folder: Path, model: str, layout: dict[str, Any], **more: Any) -> None:
    """Everything a step of training does."""
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = (
        None  # made once a process; another run must make its own
    )
    queued = len(torch.cuda._queued_calls)
    try:
        policy = tiny_policy(folder / model, layout, **more)
        batch = make_batch()
        policy.score(LocalBatch(batch, rows(policy, batch)), reference=True)
        policy.update(LocalBatch(batch, rows(policy, batch)), simple_loss)
        assert len(torch.cuda._queued_calls) == queued, "calls wait for a CUDA that never comes"
    finally:
        megatron_policy.parallel_state.destroy_model_parallel()


def outcome(action: Callable[[], None]) -> str:
    """ "" when it works, else the error."""
    try:
        action()
    except (
        RuntimeError,
        AssertionError,
        AttributeError,
        TypeError,
        NameError,
        ValueError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Model, layout, and what else the policy is built with.
SCENARIOS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen2", {}, {}),
    "bfloat16": ("qwen2", {}, {"params": "bfloat16"}),
    "pipeline": ("qwen2_tied", PIPELINE, {}),
    "experts": ("mixtral", EXPERTS, {}),
    "recompute": ("qwen2", {"recompute": "full"}, {}),
}
# What is taken away, and the scenario that fails then.
TAKEN_AWAY: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "replacement current_device": (without_replacement, "current_device", "dense"),
    "replacement synchronize": (without_replacement, "synchronize", "pipeline"),
    "replacement Stream": (without_replacement, "Stream", "experts"),
    "replacement current_stream": (without_replacement, "current_stream", "experts"),
    "branch device": (without_branch, "device", "dense"),
    "branch cuda": (without_branch, "cuda", "pipeline"),
    "branch type": (without_branch, "type", "bfloat16"),
    "patch maybe_move_tensor_to_cpu": (without_remedy, "maybe_move_tensor_to_cpu", "experts"),
    "patch _get_cuda_rng_state": (without_remedy, "_get_cuda_rng_state", "recompute"),
    "patch _set_cuda_rng_state": (without_remedy, "_set_cuda_rng_state", "recompute"),
}


def test_every_stand_in_is_listed_and_tried():
    tried = {label.split()[1] for label in TAKEN_AWAY if label.startswith("replacement")}
    assert tried == set(STAND_INS)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_schedules_alone_want_triton():
    """What ``megatron_rl.policy`` puts in place of kernels may go when they do not."""
    program = "import megatron.core.pipeline_parallel.schedules"
    for before, code in (("", 1), ("import megatron_rl.policy; ", 0)):
        done = subprocess.run([sys.executable, "-c", before + program], stderr=subprocess.PIPE)
        assert done.returncode == code
        assert (b"No module named 'triton'" in done.stderr) == bool(code)


@on_ranks(2)
@pytest.mark.parametrize("label", TAKEN_AWAY)
def test_nothing_works_without_a_remedy(hf_models: Path, label: str):
    """On every rank: what is needed no more may go."""
    scope, name, scenario = TAKEN_AWAY[label]
    model, layout, more = SCENARIOS[scenario]
    with scope(name):
        error = outcome(lambda: whole_run(hf_models, model, layout, **more))
    assert error, "needed no more"


@on_ranks(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_everything_works_with_all_remedies(hf_models: Path, scenario: str):
    model, layout, more = SCENARIOS[scenario]
    whole_run(hf_models, model, layout, **more)


@on_ranks(2)
def test_interleaved_pipeline_of_two_stages_is_silently_wrong_by_default(hf_models: Path):
    """Largest logprob error during an update, with our settings and with megatron's default for
    batched point-to-point messages."""
    batch = make_batch(length=16)
    wanted = scores(zoo.tiny_model("qwen2"), batch)[0].detach()
    policy = tiny_policy(hf_models / "qwen2", dict(pipeline=2, virtual_pipeline=2))
    # With it, megatron's default aborts the process instead of being wrong.
    policy.config.variable_seq_lengths = False

    def gap(view: TokenView) -> LossOutput:
        distance = (view.logprobs.detach() - wanted[view.index]).abs().max()
        return LossOutput(view.logprobs.sum(), {"gap_max": distance})

    gaps = {}
    for label, batched in (("ours", False), ("default", True)):
        policy.config.batch_p2p_comm, policy.config.overlap_p2p_comm = batched, not batched
        rows = [[row] for row in range(batch.num_responses)]
        gaps[label] = policy.backward(LocalBatch(batch, rows), gap).metrics["gap_max"]
    assert gaps["ours"] <= 1e-5
    assert gaps["default"] > 0.1, "megatron's default is right now: the setting may go"


@on_ranks(2)
def test_per_token_loss_must_be_set_before_ddp_wraps(hf_models: Path):
    batch = make_batch()
    original = megatron_policy.transformer_config

    def late(*args: Any) -> Any:
        config = original(*args)
        config.calculate_per_token_loss = False
        return config

    norms = {}
    for label, make in (("ours", original), ("late", late)):
        with mock.patch.object(megatron_policy, "transformer_config", make):
            policy = tiny_policy(hf_models / "qwen2", {})
        policy.config.calculate_per_token_loss = True
        norms[label] = policy.update(LocalBatch(batch, rows(policy, batch)), simple_loss).grad_norm
        policy.close()
    assert norms["late"] == pytest.approx(norms["ours"] / 2, rel=1e-3), (
        "two data-parallel ranks would train with half the gradient"
    )


@on_ranks(2)
def test_adam_steps_are_unshared(hf_models: Path):
    """After loading the state of a distributed optimizer all parameters share one count."""
    batch = make_batch()
    policy = tiny_policy(hf_models / "qwen2", dict(distributed_optimizer=True))
    policy.update(LocalBatch(batch, rows(policy, batch)), simple_loss)
    (part,) = optimizer.parts(policy.optimizer)
    state = part.optimizer.state
    shared = next(iter(state.values()))["step"]
    for entry in state.values():
        entry["step"] = shared  # what megatron's load leaves behind
    optimizer.unshare_steps(policy.optimizer)
    for _ in range(2):
        policy.update(LocalBatch(batch, rows(policy, batch)), simple_loss)
    steps = {float(entry["step"]) for entry in state.values()}
    assert steps == {3.0}, "one step before and two after"


@on_ranks(2)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(hf_models: Path):
    batch = make_batch()
    policy = tiny_policy(hf_models / "qwen2", {})
    before = {name: value.clone() for name, value in policy.gathered_weights()}

    def broken(view: TokenView) -> LossOutput:
        scale = float("nan") if policy.ranks.data_rank == 1 else 1.0
        return LossOutput(view.logprobs.sum() * scale, {})

    assert policy.update(LocalBatch(batch, rows(policy, batch)), broken).skipped
    assert all(torch.equal(before[name], value) for name, value in policy.gathered_weights())
    again = policy.update(LocalBatch(batch, rows(policy, batch)), simple_loss)
    assert not again.skipped
    norms = [0.0, 0.0]
    dist.all_gather_object(norms, again.grad_norm)
    assert norms[0] == norms[1]


@on_ranks(2)
def test_the_global_random_state_is_not_consumed(hf_models: Path):
    """By building, logprobs and an update."""
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    whole_run(hf_models, "qwen3_moe", EXPERTS)
    assert torch.equal(before, torch.get_rng_state())
