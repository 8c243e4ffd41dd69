"""How a response is sampled: one function of its step, its prompt and the version of the weights,
wherever and whenever it is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.schema import Config
from megatron_rl.rollouts.hooks.resampling import NO_RESAMPLING, Resampling
from megatron_rl.types import Prompt, Sampling


@dataclass
class SamplingPlan:
    """The sampling of a run. Response j to a prompt is a function of what this gives, the uid of
    the prompt and j, and of the weights: for every backend, and for a response that continues in a
    later step, which is sampled as that step says.

    A hook may change the temperature of a prompt, by what it knows when weights are published.
    """

    plain: Sampling  # that of a training step, without its seed
    seed: int | None = None  # of the run; None where everything is sampled as ``plain`` says
    response_limit: Callable[[int], int] | None = None  # tokens, by step
    hooks: Resampling = NO_RESAMPLING
    staleness: int = 0  # most updates between the newest weights and those that sample
    _by_version: dict[int, Resampling] = field(default_factory=dict, init=False)

    def published(self, version: int) -> None:
        """Those weights exist; what hooks knew then is kept as long as they may be wanted."""
        if version in self._by_version:
            return
        self._by_version[version] = self.hooks.as_they_are()
        for past in [one for one in self._by_version if one < version - self.staleness]:
            del self._by_version[past]

    def __call__(self, step: int, prompt: Prompt, version: int, turn: int = 0) -> Sampling:
        """``step``: counted from 1; ``turn``: from 0."""
        sampling = self.of_step(step)
        if turn and sampling.seed is not None:  # else a later turn would repeat the first draws
            sampling = replace(sampling, seed=sampling_seed(sampling.seed, turn))
        # Outside training there are no hooks, and ``published`` is not called.
        if not self.hooks.hooks:
            return sampling
        return self._by_version[version].sampling_of(prompt, sampling)

    def of_step(self, step: int) -> Sampling:
        """The sampling of a step, without what hooks change for single prompts."""
        plain = self.plain
        if self.seed is None:
            return plain
        if plain.annealing is not None:
            plain = replace(plain, annealing=plain.annealing.at(step))
        if self.response_limit is not None:
            plain = replace(plain, max_response_tokens=self.response_limit(step))
        return replace(plain, seed=sampling_seed(self.seed, step))


def sampling_seed(seed: int, step: int) -> int:
    """A distinct seed for each step (32 bits); evaluation uses step 0 only. From the seed of a step
    one for each turn."""
    return (seed * 1_000_003 + step * 1_009) % 2**32


def rollout_sampling(
    config: Config, stop_ids: tuple[int, ...], num_likely: int = 0, expert_width: int = 0
) -> Sampling:
    """How a training step samples. ``num_likely`` (for its signals) and ``expert_width``: see
    ``Sampling``."""
    rollout = config.rollout
    return Sampling(
        num_responses=config.batch.responses_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
        stop=rollout.stop,
        annealing=rollout.anneal.schedule,
        with_kept=rollout.is_truncated,
        num_likely=num_likely,
        expert_width=expert_width if rollout.router_replay == "rollout" else 0,
    )


def evaluation_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """One seed at every evaluation, so that the same weights give the same answers."""
    evaluation = config.evaluation
    return Sampling(
        num_responses=evaluation.responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        seed=sampling_seed(config.seed, 0),
        stop_token_ids=stop_ids,
        stop=config.rollout.stop,
    )


def stop_token_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids that end a response, from ``eos_token_id`` of a tokenizer."""
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
