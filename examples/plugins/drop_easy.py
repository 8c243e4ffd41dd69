"""A rollout hook: solved groups leave the step, truncation costs reward.

The page: rollout_hook.md.
"""

from collections.abc import Sequence

from megatron_rl.hooks import RolloutEdit, register_rollout_hook
from megatron_rl.rollouts.rows.experience import Response


@register_rollout_hook("drop_easy")
def drop_easy(
    step: int, groups: Sequence[Sequence[Response]], *, above: float = 0.9, penalty: float = 0.0
) -> RolloutEdit:
    """Keeps a group unless more than ``above`` of it is correct; one group stays in any case."""
    shares = [sum(response.score.correct for response in group) / len(group) for group in groups]
    keep = [share <= above for share in shares]
    if not any(keep):
        keep[0] = True
    rewards = [
        [response.score.reward - penalty * response.completion.truncated for response in group]
        for group in groups
    ]
    return RolloutEdit(rewards=rewards, keep=keep, metrics={"dropped_groups": keep.count(False)})
