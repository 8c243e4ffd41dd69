"""Credit assignment and losses, in pure torch.

A ``Method`` has ``credit``, per response, and ``loss``, per token.
"""

from megatron_rl.loss.batch import Credit, EstimatorNeeds, LossOutput, ResponseBatch, TokenBatch
from megatron_rl.loss.choices import (
    register_estimator,
    register_policy_loss,
    register_shaper,
    register_token_shaper,
)
from megatron_rl.loss.method import Method
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_token.terms import Terms

__all__ = [
    "Credit",
    "EstimatorNeeds",
    "Evidence",
    "LossOutput",
    "Method",
    "ResponseBatch",
    "Terms",
    "TokenBatch",
    "register_estimator",
    "register_policy_loss",
    "register_shaper",
    "register_token_shaper",
]
