"""How servers sample: it follows from the step of a response, its prompt, and the version of the
weights, wherever and whenever it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.rollouts.experience import Responses
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.rollouts.resampling import Asks, Resampled, Resampling
from megatron_rl.rollouts.rollouts import sampling_seed
from megatron_rl.types import Prompt, Sampling


class ServerSampling:
    """``plain``: that of a training step, without its seed; ``hooks``: may change the temperature
    of a prompt, by what they know when weights are published, and ask again; None: there are
    none."""

    def __init__(self, config: Config, plain: Sampling, hooks: Resampling | None) -> None:
        self._config = config
        self._plain = plain
        self._hooks = hooks
        self._by_version: dict[int, Resampling] = {}

    def published(self, version: int) -> None:
        """Those weights exist; what hooks knew then is kept as long as they may be wanted."""
        if self._hooks is None:
            return
        self._by_version[version] = self._hooks.as_they_are()
        oldest = version - self._config.source.staleness
        for past in [one for one in self._by_version if one < oldest]:
            del self._by_version[past]

    def __call__(self, step: int, prompt: Prompt, version: int) -> Sampling:
        """``step``: counted from 0. Limit and seed are those of the step, as for every source."""
        seed = sampling_seed(self._config.seed, step + 1)
        limit = self._config.rollout.response_limit(step + 1)
        sampling = replace(self._plain, seed=seed, max_response_tokens=limit)
        if self._hooks is None:
            return sampling
        return self._by_version[version].sampling_of(prompt, sampling)

    def ask_again(
        self, sampler: Asks, step: int, responses: Responses, clock: Clock
    ) -> Resampled | None:
        """Collective. What hooks make of the responses of a step, counted from 1; None where there
        are no hooks."""
        if self._hooks is None:
            return None
        return self._hooks.run(
            sampler, step, sampling_seed(self._config.seed, step), responses, clock
        )

    def state(self) -> dict[str, Any]:
        """What hooks remember, for a checkpoint."""
        return {} if self._hooks is None else {"hooks": self._hooks.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        if self._hooks is not None:
            self._hooks.restore(state.get("hooks", {}))
