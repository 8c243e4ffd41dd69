"""The bugs that tools/mutate_loss.py plants: plausible slips of sign, mask, divisor or constant.

Three or more for each formula; a file for each kind of module.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.loss_mutations import estimators, per_response, per_token, policy_losses


class Mutation(NamedTuple):
    module: str
    formula: str
    old: str  # occurs once in the module
    new: str


# The test file that must notice a bug of the module.
TESTS = {
    "advantages": "test_advantages",
    "segments": "test_advantages",
    "shaping": "test_shaping",
    "filters": "test_filters",
    "credit": "test_credit",
    "method": "test_method_config",
    "kl": "test_kl",
    "token_advantages": "test_token_advantages",
    "whole_responses": "test_token_advantages",
    "histories": "test_histories",
    "policy_losses": "test_policy_losses",
    "response_losses": "test_response_losses",
    "covariance": "test_covariance",
    "sampler_losses": "test_sampler_losses",
    "self_reward": "test_self_reward",
    "entropy_anchor": "test_entropy_anchor",
    "perception": "test_perception",
    "demonstrations": "test_demonstrations",
    "aggregate": "test_aggregate",
    "mismatch": "test_mismatch",
    "terms": "test_token_loss",
    "token_loss": "test_token_loss",
}

MUTATIONS = [
    Mutation(module, formula, old, new)
    for bugs in (estimators.BUGS, per_response.BUGS, policy_losses.BUGS, per_token.BUGS)
    for (module, formula), changes in bugs.items()
    for old, new in changes
]
