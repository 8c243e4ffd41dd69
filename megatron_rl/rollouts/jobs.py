"""What is to be generated: the steps of a run, or answers to some prompts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.prompts import FixedPrompts, PromptStream
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.rollouts.store import ResponseStore
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Completion, Prompt, Sampling, Score


@dataclass(frozen=True)
class GenerationJob:
    """What is to be generated, equal on every rank but for the store.

    Attributes:
        rules: How many groups and responses a step has, and when it is complete.
        stream: The prompts of the groups.
        plan: How a response is sampled.
        wants_group: Whether a group is trained on, by whether each of its responses is correct.
        verdicts: What becomes of responses without a verdict.
        demonstrations: Responses that prompts bring along.
        store: The tokens that lie on this rank.
    """

    rules: StepRules
    stream: PromptStream
    plan: SamplingPlan
    wants_group: Callable[[Sequence[bool]], bool]
    verdicts: VerdictRules
    demonstrations: Demonstrations | None = None
    store: ResponseStore = field(default_factory=ResponseStore)

    @property
    def is_training(self) -> bool:
        """Whether the job is the steps of a run, which a resumed run may repeat."""
        return self.plan.seed is not None

    def demonstration(self, prompt: Prompt, response: int) -> Completion | None:
        known = self.demonstrations
        return None if known is None else known.get(prompt, response)

    def wants(self, scores: Sequence[Score]) -> bool:
        """Whether a group with these scores is trained on."""
        return self.wants_group([score.correct for score in scores if score.problem is None])

    def state(self) -> dict[str, Any]:
        """For a checkpoint, on rank 0: the stored tokens, and the position in the prompts."""
        return {"store": self.store.state(), "prompts": self.stream.state()}

    def forget(self, groups: Iterable[int]) -> None:
        """On rank 0: no step needs these groups any more."""
        self.store.forget(groups)
        self.stream.forget_visits(groups)


def answers_to(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    demonstrations: Demonstrations | None = None,
    *,
    lockstep: bool = True,
) -> GenerationJob:
    """``sampling.num_responses`` responses to each prompt, in one step; nothing is refused."""
    return GenerationJob(
        rules=StepRules(len(prompts), sampling.num_responses, lockstep=lockstep),
        stream=FixedPrompts(prompts),
        plan=SamplingPlan(sampling),
        wants_group=lambda verdicts: True,
        verdicts=VerdictRules(1, 1.0),
        demonstrations=demonstrations,
    )
