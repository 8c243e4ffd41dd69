"""Logprobs of each response: the old policy's, also of the answer in it, their KL to the reference,
how far they moved."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rl.data.reading import Data
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.loss.per_token import kl
from megatron_rl.loss.segments import lifted
from megatron_rl.passes import Output
from megatron_rl.signals.base import Columns, Signal, SignalSetup, StepView
from megatron_rl.signals.registry import register_signal

ENTROPY = Output("entropy")


def totals(values: Tensor, view: StepView) -> Tensor:
    """The sum over the loss tokens of each row of this rank, ``[rows]``."""
    batch = view.local.batch
    kept = torch.where(view.loss_mask, values, torch.zeros_like(values))
    sums = torch.zeros(batch.num_responses, dtype=values.dtype)
    return sums.index_add(0, batch.response_index, kept)


def means(values: Tensor, view: StepView) -> Tensor:
    """The mean over the loss tokens of each row, ``[rows]``; 0 for a row without any."""
    return totals(values, view) / totals(torch.ones_like(values), view).clamp(min=1)


@register_signal
class ResponseLogprobs(Signal):
    """``sum_logprobs`` and ``mean_logprobs`` of the old policy over the tokens of a response."""

    about = "the old policy's logprobs before the credit"
    columns = ("sum_logprobs", "mean_logprobs")
    scores = ("old",)

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        old = lifted(view.experience.old.logprobs)
        found = {"sum_logprobs": totals(old, view), "mean_logprobs": means(old, view)}
        return view.of_all_rows(found)


@register_signal
class MeanEntropy(Signal):
    """``mean_entropy`` of the old policy over the tokens of a response, in nats."""

    about = "the old policy's entropies before the credit"
    columns = ("mean_entropy",)
    scores = ("old",)
    score_outputs = (ENTROPY,)

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        entropy = lifted(view.experience.old.columns[ENTROPY.name])
        return view.of_all_rows({"mean_entropy": means(entropy, view)})


@register_signal
class AnswerProbability(Signal):
    """``answer_probability`` of each demonstration: the mean of the old policy's probabilities of
    the tokens of its prompt's answer, at its last occurrence; 0 for a demonstration without it, and
    for sampled responses."""

    about = "the old policy's logprobs before the credit, and where demonstrations have the answer"
    columns = ("answer_probability",)
    scores = ("old",)

    def prepare(self, data: Data, setup: SignalSetup) -> Data:
        self.decode = text_of(load_tokenizer(setup.model_path))
        return data

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None and view.local.rows is not None
        responses, batch = view.experience.responses, view.local.batch
        lengths = batch.response_lengths.tolist()
        is_answer = torch.zeros(sum(lengths), dtype=torch.bool)
        # Rows are views of ``is_answer``: what is set in a row is set there.
        rows = zip(view.local.rows.tolist(), is_answer.split(lengths), batch.offsets[1:].tolist())
        for row, of_row, end in rows:
            if responses.is_demonstration[row]:
                token_ids = batch.token_ids[end - len(of_row) : end].tolist()
                place = last_place(responses.prompts[row].answer, token_ids, self.decode)
                of_row[place] = True
        probabilities = lifted(view.experience.old.logprobs).exp()
        of_answers = totals(probabilities.masked_fill(~is_answer, 0), view)
        count = totals(is_answer.to(probabilities.dtype), view).clamp(min=1)
        return view.of_all_rows({"answer_probability": of_answers / count})


def last_place(
    text: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> slice:
    """The tokens that hold the last occurrence of ``text``; empty where there is none.

    Example: of "1", "+", "12", ".", and the text "1", it is the third.
    """
    if not text or text not in decode(token_ids):
        return slice(0)
    places = range(len(token_ids) + 1)
    start = bisect_left(places, True, key=lambda at: text not in decode(token_ids[at:])) - 1
    end = bisect_left(places, True, start, key=lambda at: text in decode(token_ids[start:at]))
    return slice(start, end)


@register_signal
class ReferenceKl(Signal):
    """``kl``: the sum over the tokens of a response of the method's KL estimator at (old, ref)."""

    about = "the old policy's and the reference's logprobs before the credit"
    columns = ("kl",)
    scores = ("old", "ref")

    def __init__(self, *, kl_estimator: str) -> None:
        self._estimate = kl.ESTIMATORS[kl_estimator]

    def after_rollout(self, view: StepView) -> Columns:
        old, ref = view.experience.old, view.experience.ref
        assert old is not None and ref is not None
        logprobs = lifted(old.logprobs)
        estimate = self._estimate(logprobs, lifted(ref.logprobs).to(logprobs.dtype))
        return view.of_all_rows({"kl": totals(estimate, view)})


@register_signal
class LogRatioSums(Signal):
    """``log_ratio_sums``: logprobs minus old_logprobs summed over each response of the minibatch,
    without gradient, by a pass of its own before the update."""

    about = "a pass over every minibatch before it"
    columns = ("log_ratio_sums",)

    def before_minibatch(self, view: StepView) -> Columns:
        if view.experience.on_policy:
            # Before the only update of a step the policy is still the old one.
            return {"log_ratio_sums": torch.zeros(view.num_responses, dtype=torch.float64)}
        moved = view.score().logprobs.numpy() - view.tokens["old_logprobs"]
        moved[~view.loss_mask.numpy()] = 0
        return {"log_ratio_sums": view.response_sums(moved)}
