"""Hooks of rollouts: code of a user, or of ``sampling.py``, that a run names in ``rollout_hooks``.

Rollout hooks: a user's code between scoring and credit, for rewards, whole groups and metrics.
What holds whatever a hook does:

- It is called once a step, on rank 0, with all groups of the step in canonical order, after dynamic
  sampling. Its answer is sent to every rank, so that ranks agree even where a hook asks a service
  or draws random numbers.
- Responses without a verdict are gone already (``reward.on_problem=exclude``), so that groups may
  differ in size.
- Prompts, tokens, logprobs, texts and verdicts (``score.correct``) stay as they are: responses
  are frozen, and only what ``RolloutEdit`` can say is applied. Evaluation is not hooked.
- A dropped group leaves the step as if it had not been sampled; it is not replaced.
- Hooks run in the order of the configuration, each on what the one before left.
- A hook's own state is in no checkpoint: what it decides must follow from its arguments for a
  resumed run to be equal.

Sampling hooks: which responses a step requests in addition, and at which temperatures it samples.
What holds whatever a hook does:

- Every rank calls it with the same scored groups, in canonical order, after dynamic sampling and
  before the rollout hooks that are functions. It decides from its arguments and its state alone, so
  that no message is needed and ranks agree. Groups that dynamic sampling refused are no part of the
  step: it is told their scores by ``observe``.
- Its state belongs to the checkpoint.
- Hooks run in the order of the configuration, each on what the one before left. One that requests
  responses is called again when they have joined, until it requests no more.
- Requests are sampled with the newest weights. Evaluation is not hooked.
- One that gives responses, those that it remembers or those that prompts bring along, gives them
  as demonstrations: the method of the run has to read which rows those are.
- A prompt's temperature is that of the hooks when its weights were published: a server that is
  ``source.staleness`` updates behind does not know of later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import SerializeAsAny

from megatron_rl.knobs import Choices, Named, by_key, new_schema
from megatron_rl.types import Completion, Prompt, Score


class HookChoice(NamedTuple):
    """A hook under a name of the configuration.

    Attributes:
        make: a function of the user, or what makes a ``SamplingHook`` from its knobs.
        resamples: ``make`` is the latter.
        changes_temperature: some responses are sampled at another one than the policy is trained
            at, so that a run needs importance weights.
        remembers: it is told the correct responses of a step, and gives some to later steps.
        on_demand: responses that prompts bring along do not join their groups, but are set aside
            for the hook (``Prompt.extra``, ``types.GUIDES``).
        for_unsolved: it works on groups without a correct response, which dynamic sampling refuses.
    """

    make: Callable[..., Any]
    schema: type[Named]
    resamples: bool = False
    changes_temperature: bool = False
    remembers: bool = False
    on_demand: bool = False
    for_unsolved: bool = False


ROLLOUT_HOOKS = Choices("rollout hook")
# In the order in which they are called, each with its knobs.
ChosenHooks = Annotated[dict[str, SerializeAsAny[Named]], by_key(ROLLOUT_HOOKS)]


@dataclass(frozen=True)
class RolloutEdit:
    """What a hook wants changed; None leaves it.

    Example, for two groups of two responses: the second is dropped, the first one's reward halved::

        RolloutEdit(rewards=[[0.5, 0.0], [0.0, 0.0]], keep=[True, False], metrics={"dropped": 1})
    """

    rewards: Sequence[Sequence[float]] | None = None  # the new total of every response, by group
    keep: Sequence[bool] | None = None  # one flag per group
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as hook/<its name>/<key>


Hook = Callable[..., RolloutEdit]


def register_rollout_hook(name: str) -> Callable[[Hook], Hook]:
    """``f(step, groups, *, knobs)`` returns a ``RolloutEdit``: see the head of this file.

    Registering calls nothing: a run names its hooks, ``rollout_hooks.<name>={}``.
    Example::

        @register_rollout_hook("halve")
        def halve(step: int, groups: Groups, *, factor: float = 0.5) -> RolloutEdit:
            rewards = [[factor * r.score.reward for r in group] for group in groups]
            return RolloutEdit(rewards=rewards)

    Raises:
        RegistrationError: the name is taken, or a knob has no type.
    """

    def register(function: Hook) -> Hook:
        schema = new_schema(ROLLOUT_HOOKS, name, function, ("step", "groups"))
        ROLLOUT_HOOKS[name] = HookChoice(function, schema)
        return function

    return register


class ScoredGroup(NamedTuple):
    """A prompt and the verdicts on its responses; ``num_unjudged``: responses without one."""

    prompt: Prompt
    scores: Sequence[Score]
    num_unjudged: int = 0

    @classmethod
    def of(cls, prompt: Prompt, scores: Sequence[Score]) -> ScoredGroup:
        """``scores``: of all responses."""
        judged = [score for score in scores if score.problem is None]
        return cls(prompt, judged, len(scores) - len(judged))

    @property
    def num_responses(self) -> int:
        return len(self.scores) + self.num_unjudged

    @property
    def num_correct(self) -> int:
        return sum(score.correct for score in self.scores)


class Ask(NamedTuple):
    """Requests ``num_responses`` more responses to ``prompt``. They join the group ``into`` (its
    number among those that the hook was given); None: they are a new group, after all others. The
    first of them are ``given``, which are not sampled. When they have joined, the last ``replaces``
    judged responses that the group had before leave."""

    prompt: Prompt
    num_responses: int
    into: int | None = None
    given: Sequence[Completion] = ()
    replaces: int = 0


@dataclass(frozen=True)
class Resample:
    """What a hook requests; ``keep``: a flag for each group; None: all stay. Groups are dropped
    after the new responses have joined them.

    Example: two more responses to the first of two groups, and the second leaves:
    ``Resample(asks=[Ask(groups[0].prompt, 2, into=0)], keep=[True, False])``.
    """

    asks: Sequence[Ask] = ()
    keep: Sequence[bool] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as hook/<its name>/<key>


class SamplingHook:
    """See the head of this file; all but ``resample`` have a default."""

    def __init__(self) -> None:
        """A hook without settings."""

    def temperature(self, prompt: Prompt, plain: float) -> float:
        """Temperature at which a prompt is first sampled; ``plain``: without this hook."""
        return plain

    def observe(self, step: int, refused: Sequence[ScoredGroup]) -> None:
        """Called before ``resample`` with the groups of the step that dynamic sampling refused."""

    def resample(self, step: int, turn: int, groups: Sequence[ScoredGroup]) -> Resample:
        """``turn``: how many times the hook has requested responses in this step."""
        raise NotImplementedError

    def remember(self, found: Sequence[tuple[Prompt, Completion]]) -> None:
        """Called once the hook requests no more, with the correct responses that were sampled in
        the step, in the form of ``Ask.given``; only where a hook defines it."""

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """The inverse. ``prompts``: those of the training data."""


Maker = TypeVar("Maker", bound=Callable[..., SamplingHook])


def register_sampling_hook(
    name: str,
    *,
    changes_temperature: bool = False,
    on_demand: bool = False,
    for_unsolved: bool = False,
) -> Callable[[Maker], Maker]:
    """A class derived from ``SamplingHook``, or ``f(*, knobs)`` that returns one, which has no
    ``remember``; what its constructor takes by keyword are its knobs. A run names it,
    ``rollout_hooks.<name>={}``.

    Raises:
        RegistrationError: the name is taken, or a knob has no type.
    """

    def register(make: Maker) -> Maker:
        function, positional = (make.__init__, ("self",)) if isinstance(make, type) else (make, ())
        schema = new_schema(ROLLOUT_HOOKS, name, function, positional)
        # Of a function this is the default: False.
        remembers = getattr(make, "remember", SamplingHook.remember) is not SamplingHook.remember
        ROLLOUT_HOOKS[name] = HookChoice(
            make, schema, True, changes_temperature, remembers, on_demand, for_unsolved
        )
        return make

    return register
