"""The schema of rollout hooks: those of the package and what plug-ins register, see
``rollouts/hooks``."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializeAsAny

from megatron_rl.knobs import Choices, Named, by_key

# The import of its home fills the table.
ROLLOUT_HOOKS = Choices("rollout hook", home="megatron_rl.rollouts.hooks.sampling_hooks")

# In the order in which they are called, each with its knobs.
RolloutHooks = Annotated[dict[str, SerializeAsAny[Named]], by_key(ROLLOUT_HOOKS)]
