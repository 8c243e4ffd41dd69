"""Every number of a policy that its training goes on from."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import parts


def record(policy: MegatronPolicy) -> list[Tensor]:
    """Weights, optimizer states and master weights, rates, reference, as this rank holds them."""
    for _ in policy.gathered_weights():
        pass  # ends an overlapped gathering of parameters that may be under way
    tensors = [item.tensor.detach().clone() for item in policy.held]
    for part in parts(policy.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                tensors.append(parameter.detach().clone())
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    tensors.append(state[key].detach().clone())
            rates = [group["lr"], group["weight_decay"]]
            tensors.append(torch.tensor(rates, dtype=torch.float64))
    if policy.reference is not None:
        tensors += [tensor.clone() for tensor in policy.reference.tensors().values()]
    return tensors
