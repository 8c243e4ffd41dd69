"""How likely a teacher finds the responses."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from megatron_rl.config.rules.teacher_rules import teacher_of, teachers
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.passes import LIKELY, Output
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Prompt


@register_signal
class TeacherLogprobs(Signal):
    """``teacher_logprobs`` of the sampled tokens, and ``teacher_likely_logprobs`` of the ``top_k``
    that were most likely to the sampler, -inf in places without a token.

    A response is scored by the teacher of its prompt's data source, once, after the rollout.
    """

    about = "a pass of `model.teacher` over every response"
    token_columns = ("teacher_logprobs", "teacher_likely_logprobs")

    def __init__(self, *, top_k: int = 0) -> None:
        self.num_likely = top_k

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        own = load_tokenizer(config.model.path).get_vocab()
        for folder in teachers(config.model):
            found = load_tokenizer(folder).get_vocab()
            others = sorted(dict(own.items() ^ found.items()))
            if others:
                raise ValueError(
                    f"model.teacher = {folder}: {len(others)} tokens have other numbers than in"
                    f" model.path = {config.model.path}, or none ({', '.join(others[:3])}); give a"
                    " model of the same vocabulary"
                )
        sources = {prompt.data_source for prompt in prompts}
        alone = sorted(each for each in sources if teacher_of(config.model, each) is None)
        if alone:
            raise ValueError(
                f"model.teacher: none for the prompts of {', '.join(alone)}; name a folder for"
                " each data source, or one folder for all"
            )

    def after_rollout(self, view: StepView) -> Columns:
        outputs = [Output(LIKELY, self.num_likely)] if self.num_likely else []
        local, prompts = view.local, view.experience.responses.prompts
        assert local.rows is not None
        sources = [prompts[row].data_source for row in local.rows.tolist()]
        columns: dict[str, torch.Tensor] = {}
        for teacher in view.teachers:
            # Rows of other teachers are left out of its micro-batches, and have 0 then.
            own = [
                [row for row in rows if teacher.teaches(sources[row])]
                for rows in local.microbatches
            ]
            scores = teacher.score(replace(local, microbatches=own), outputs).map(torch.Tensor.cpu)
            for name, values in {"logprobs": scores.logprobs, **scores.columns}.items():
                columns[f"teacher_{name}"] = columns.get(f"teacher_{name}", 0) + values
        return columns
