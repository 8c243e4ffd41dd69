"""Responses without a verdict leave a step (``reward.on_problem=exclude``): what follows sees the
step as if they had not been sampled."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_rl.errors import first_few
from megatron_rl.rollouts.rows.experience import Responses
from megatron_rl.types import Score

_SHOWN_CAUSES = 3


class VerdictRules(NamedTuple):
    """How many verdicts a step needs."""

    min_group: int  # a group with fewer judged responses leaves, too
    max_excluded_share: float  # of responses without a verdict; a step with more ends the run

    def judged(self, responses: Responses) -> Responses:
        """Responses with a verdict, without groups that have too few of them left."""
        has_verdict = np.array([score.problem is None for score in responses.scores], dtype=bool)
        if has_verdict.all():
            return responses
        sizes = np.bincount(responses.group_ids)
        judged = np.bincount(responses.group_ids, weights=has_verdict)
        stays = (judged == sizes) | (judged >= self.min_group)
        return responses.take(np.flatnonzero(has_verdict & stays[responses.group_ids]))


def excluded_share(scores: Sequence[Score], limit: float, of: str) -> float:
    """The share of responses without a verdict. ``of``: whose responses, for the message.

    Raises:
        ValueError: it is above ``limit``, or no response has a verdict; names the causes.
    """
    problems = [score.problem for score in scores if score.problem is not None]
    share = len(problems) / len(scores)
    if share <= limit and share < 1:
        return share
    causes = [f"{count} times {problem}" for problem, count in Counter(problems).most_common()]
    shown = "; ".join(first_few(causes, _SHOWN_CAUSES, "..."))
    raise ValueError(
        f"{of}: {len(problems)} of {len(scores)} responses have no verdict, which is above"
        f" reward.max_excluded_share = {limit:g}: {shown}. Correct the verifier or its"
        " limits, or raise reward.max_excluded_share (below 1)"
    )
