"""What follows once a step has its responses, from any source: rollout hooks and the log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.data.rows import interleaved
from megatron_rl.data.token_rows import RowNumbers
from megatron_rl.hooks import RolloutEdit
from megatron_rl.rollouts.hooks.rollout_hooks import edited_responses
from megatron_rl.rollouts.rows.experience import (
    Experience,
    Groups,
    Response,
    Responses,
    experience_of,
)
from megatron_rl.rollouts.rows.metrics import Clock


@dataclass(frozen=True)
class PostRollout:
    """What follows when a step has its responses."""

    # Some rows as whole responses, on rank 0; see ``exchange.on_main``.
    shown: Callable[[Responses, RowNumbers], list[Response] | None]
    # Rollout hooks: from the groups of a step, on rank 0, to their changes, equal on every rank.
    after_scoring: Callable[[int, Groups | None], RolloutEdit] | None = None
    # Called on rank 0 with some responses of a step.
    log_samples: Callable[[int, Sequence[Response]], None] | None = None
    num_samples: int = 0  # of a step, to log

    def __call__(self, step: int, responses: Responses, clock: Clock) -> Experience:
        """Collective. Raises ValueError when a rollout hook failed."""
        metrics: Mapping[str, float] = {}
        num_tokens = responses.num_sampled_tokens
        if self.after_scoring is not None:
            with clock("reward"):
                everything = self.shown(responses, range(len(responses)))
                groups = None if everything is None else responses.by_group(everything)
                edit = self.after_scoring(step, groups)
                responses = edited_responses(responses, edit)
                metrics = edit.metrics
        self.log(step, responses)
        return replace(
            experience_of(responses),
            hook_metrics=metrics,
            seconds=clock.seconds,
            dropped_tokens=num_tokens - responses.num_sampled_tokens,
        )

    def log(self, step: int, responses: Responses) -> None:
        """Collective."""
        if not self.num_samples or self.log_samples is None:
            return
        uids = [prompt.uid for prompt in responses.prompts]
        shown = self.shown(responses, of_different_prompts(uids, self.num_samples))
        if shown is not None:
            self.log_samples(step, shown)


def of_different_prompts(uids: Sequence[str], count: int) -> list[int]:
    """Row numbers: the first response of each of the first prompts; then the second of each, and so
    on. ``uids``: of the prompt of each row.

    Example: rows of prompts a a a b b b, ``count=3``: 0 3 1.
    """
    by_prompt: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        by_prompt.setdefault(uid, []).append(row)
    return interleaved(list(by_prompt.values()))[:count]
