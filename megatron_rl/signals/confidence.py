"""The old policy's confidence in the least likely tokens of a prompt and of a response."""

from collections.abc import Iterable

import torch

from megatron_rl.config.schema import Config
from megatron_rl.loss.per_response.shaping import tail_confidence
from megatron_rl.loss.segments import lifted
from megatron_rl.passes import Output
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Prompt

PROMPT_LOGPROBS = Output("prompt_logprobs")


@register_signal
class ResponseConfidence(Signal):
    """``response_confidence``: ``tail_confidence`` of the tokens of a response."""

    about = "the old policy's logprobs before the credit"
    columns = ("response_confidence",)
    scores = ("old",)

    def __init__(self, *, tail: float) -> None:
        self._tail = tail

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        batch = view.local.batch
        mask = view.loss_mask
        logprobs = lifted(view.experience.old.logprobs)[mask]
        index = batch.response_index[mask]
        found = tail_confidence(logprobs, index, batch.num_responses, tail=self._tail)
        return view.of_all_rows({"response_confidence": found})


@register_signal
class PromptConfidence(Signal):
    """``prompt_confidence``: ``tail_confidence`` of the tokens of a prompt but the first, which
    nothing predicts."""

    about = "the old policy's logprobs of the prompts' tokens"
    columns = ("prompt_confidence",)
    scores = ("old",)
    score_outputs = (PROMPT_LOGPROBS,)

    def __init__(self, *, tail: float) -> None:
        self._tail = tail

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        """Image tokens have no meaningful logprob, and a single token has none."""
        for prompt in prompts:
            if prompt.images or len(prompt.token_ids) < 2:
                what = "has images" if prompt.images else "is a single token"
                raise ValueError(
                    f"prompt {prompt.uid} {what}: method {config.method.name} reads how likely the"
                    " tokens of a prompt are (shaping.confidence_gap); drop the row, or choose"
                    " another method"
                )

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        batch = view.local.batch
        row = torch.repeat_interleave(torch.arange(batch.num_responses), batch.prompt_lengths)
        # [prompt tokens]: all but the first of each row.
        predicted = torch.nn.functional.pad(row[1:] == row[:-1], (1, 0))
        logprobs = lifted(view.experience.old.columns[PROMPT_LOGPROBS.name][predicted])
        found = tail_confidence(logprobs, row[predicted], batch.num_responses, tail=self._tail)
        return view.of_all_rows({"prompt_confidence": found})
