"""A sampling hook: prompts without a right response are asked once more.

The page: sampling_hooks.md.
"""

from collections.abc import Sequence

from megatron_rl.hooks import Ask, Resample, SamplingHook, ScoredGroup, register_sampling_hook


@register_sampling_hook("ask_once_more")
class AskOnceMore(SamplingHook):
    """A group that is all wrong gets as many responses more as it has."""

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        if turn:  # the answers have joined their groups
            return Resample()
        asks = [
            Ask(group.prompt, group.num_responses, into=number)
            for number, group in enumerate(groups)
            if not group.num_correct
        ]
        return Resample(asks, metrics={"asked_groups": len(asks)})
