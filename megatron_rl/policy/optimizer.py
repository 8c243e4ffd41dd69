"""AdamW through megatron's optimizers, its learning rate, and the rule for non-finite gradients."""

import math
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.config.schema import OptimConfig
from megatron_rl.policy.settings import PolicySettings


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0).

    With w = warmup_steps, p = learning_rate, m = min_learning_rate, and
    x = (step - w) / (total_steps - w), clipped to [0, 1]:

        while step < w:  p (step + 1) / w
        constant:        p
        linear:          p + (m - p) x
        cosine:          m + (p - m) (1 + cos(pi x)) / 2
    """
    peak = optim.learning_rate
    low = optim.min_learning_rate
    warmup = optim.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim.schedule == "linear":
        return peak + (low - peak) * done
    return low + (peak - low) * (1 + math.cos(math.pi * done)) / 2


def rate_of_run(step: int, optim: OptimConfig, settings: PolicySettings) -> float:
    """Rate of optimizer step ``step`` (from 0) of a run whose first steps may be a warm start:
    these and the others have two schedules, one after the other."""
    first = settings.warm_start_steps
    if step >= first:
        return learning_rate(step - first, optim, settings.total_optimizer_steps - first)
    if settings.warm_start_rate is not None:
        optim = optim.model_copy(update={"learning_rate": settings.warm_start_rate})
    return learning_rate(step, optim, first)


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """megatron's optimizers, one for each kind of parameter (dense, experts) of this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Collective: the norm of the gradient of all parameters, which is left ready for the step."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def step(
    optimizer: MegatronOptimizer, optim: OptimConfig, rate: float, loss: float
) -> tuple[float, bool]:
    """Collective: the gradient norm before clipping, and whether the step was skipped.

    A norm or a ``loss`` (equal on all ranks) that is not finite leaves weights and moments as they
    are on every rank: megatron checks only where it scales the loss, and a loss can be NaN while
    its gradient is not.
    """
    for group in (group for part in parts(optimizer) for group in part.param_groups):
        group["lr"] = rate
        # Megatron marks biases and norms by wd_mult 0, and only its own scheduler applies that.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    norm = gradient_norm(optimizer)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        return norm, True
    if optim.clip_grad > 0:
        for part in parts(optimizer):
            parameters = part.get_parameters()
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, optim.clip_grad, norm, decoupled)
    _step_with_ready_gradients(optimizer)
    return norm, False


def _step_with_ready_gradients(optimizer: MegatronOptimizer) -> None:
    """Collective: the step of every part, then the new weights gathered once.

    Each distributed part (dense parameters, experts) gathers the weights of all chunks after its
    own step, those of the other parts too. Only the last of these gathers has all new weights; the
    ones before it are left out.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in chained[:-1]:
        if isinstance(part, DistributedOptimizer):
            super(DistributedOptimizer, part).step_with_ready_grads()
        else:
            part.step_with_ready_grads()
    chained[-1].step_with_ready_grads()


def gradient(parameter: Any) -> Tensor:
    """What a backward left for ``parameter``; zeros for one that is not trained."""
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    return parameter.main_grad


def unshare_steps(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter its own Adam step count.

    Loading a distributed optimizer with torch's Adam puts ONE tensor into the state of every
    parameter; each update then advances it once per parameter. Call after every load.
    """
    for part in parts(optimizer):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].detach().clone()


def create_state(optimizer: MegatronOptimizer) -> None:
    """Creates zero moments where there are none.

    megatron can neither save nor load the state of an optimizer that has not stepped. Transformer
    Engine's Adam makes them itself, in its formats, with float32 weights where it keeps those. Like
    apex's it counts steps for a group, and refuses a count in the state of a parameter.
    """
    for part in parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if state:
                    continue
                if hasattr(inner, "initialize_state"):
                    is_bf16 = parameter.dtype == torch.bfloat16
                    inner.initialize_state(parameter, inner.store_param_remainders and is_bf16)
                    continue
                if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)
