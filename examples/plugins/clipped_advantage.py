"""An advantage estimator: GRPO's z-score, cut at a limit. The page: estimator.md."""

from pathlib import Path

from torch import Tensor

from megatron_rl.config.load import add_config_dir
from megatron_rl.loss import EstimatorNeeds, Evidence, register_estimator
from megatron_rl.loss.per_response.advantages import zscore

add_config_dir(Path(__file__).parent / "conf")  # method=clipped_grpo


@register_estimator("clipped_zscore", needs=EstimatorNeeds(min_group=2))
def clipped_zscore(evidence: Evidence, *, limit: float = 1.5) -> Tensor:
    """min(max(z, -limit), limit), z = (r - mean) / (std + eps) of the group."""
    plain = zscore(evidence.rewards, evidence.groups, eps=evidence.eps, ddof=evidence.ddof)
    return plain.clamp(-limit, limit)
