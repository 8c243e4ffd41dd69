"""Credit assignment and losses, in pure torch.

``load_method(name)``, then ``credit`` per response and ``loss`` per token.
"""

from megatron_rl.loss.batch import (
    Credit,
    EstimatorNeeds,
    LossResult,
    MethodRequirements,
    ResponseBatch,
    TokenBatch,
)
from megatron_rl.loss.method import Method, load_method
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_token.terms import Terms
from megatron_rl.loss.register import (
    register_estimator,
    register_policy_loss,
    register_shaper,
    register_token_shaper,
)

__all__ = [
    "Credit",
    "EstimatorNeeds",
    "Evidence",
    "LossResult",
    "Method",
    "MethodRequirements",
    "ResponseBatch",
    "Terms",
    "TokenBatch",
    "load_method",
    "register_estimator",
    "register_policy_loss",
    "register_shaper",
    "register_token_shaper",
]
