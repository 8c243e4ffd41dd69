"""token_mean within each group, then the mean over groups: what a trainer computes that averages
each micro-batch of one group by itself."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.loss import EstimatorNeeds, Evidence, register_estimator
from megatron_rl.loss.per_response.advantages import zscore


@register_estimator("zscore_part_means", needs=EstimatorNeeds(min_group=2))
def zscore_part_means(evidence: Evidence) -> Tensor:
    """zscore times N / (P N_p): N tokens of the step in P groups, N_p of them in this one.

    With it ``token_mean``, which divides by N, gives a token of a group the weight 1 / (P N_p).
    """
    groups = evidence.groups
    share = groups.mean(evidence.lengths.to(evidence.rewards))
    scale = groups.broadcast(share.mean() / share)
    return scale * zscore(evidence.rewards, groups, eps=evidence.eps, ddof=evidence.ddof)
