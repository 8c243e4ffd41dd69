"""The schema of rollout hooks. None is built in: plug-ins register them (``trainer/hooks.py``)."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializeAsAny

from megatron_rl.config.pieces import Choices, Named, by_key

ROLLOUT_HOOKS = Choices("rollout hook")

# In the order in which they are called, each with its knobs.
RolloutHooks = Annotated[dict[str, SerializeAsAny[Named]], by_key(ROLLOUT_HOOKS)]
