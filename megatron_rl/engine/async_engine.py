"""An AsyncLLM of vLLM that takes its weights from a trainer in the same process.

The weights arrive through the weight transfer backend ``megatron_rl``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class AsyncEngine:
    """Commands to an engine whose event loop runs in another thread.

    Implements ``weight_sync.commands.Server``.
    """

    def __init__(
        self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop, timeout_s: float = 300.0
    ) -> None:
        """
        Args:
            engine: built with
                ``weight_transfer_config=WeightTransferConfig(backend="megatron_rl")``.
            timeout_s: limit of one command.
        """
        self.engine = engine
        self.loop = loop
        self.timeout_s = timeout_s

    def _wait(self, command: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(command, self.loop).result(self.timeout_s)
        except Exception as error:
            raise ConnectionError(
                f"the engine did not carry out {command.__qualname__}: {type(error).__name__}:"
                f" {error}"
            ) from error

    def address(self) -> str:
        """The address of this machine, on which the workers run too."""
        return "127.0.0.1"

    def num_workers(self) -> int:
        """The number of workers of all replicas."""
        return self.engine.vllm_config.parallel_config.world_size_across_dp

    def pause(self, in_flight: Any) -> None:
        """Stops scheduling; running requests are waited for, aborted or kept."""
        self._wait(self.engine.pause_generation(mode=in_flight))

    def resume(self) -> None:
        """Schedules requests again."""
        self._wait(self.engine.resume_generation())

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Connects every worker."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self.engine.init_weight_transfer_engine(WeightTransferInitRequest(dict(info))))

    def update(self, info: Mapping[str, Any]) -> None:
        """Every worker takes part in one update."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self.engine.start_weight_update())
        self._wait(self.engine.update_weights(WeightTransferUpdateRequest(dict(info))))

    def stage(self, info: Mapping[str, Any]) -> None:
        """Every worker begins to take part in an update beside its work."""
        self.update({**info, "kind": "stage"})
        self._wait(self.engine.finish_weight_update())

    def switch(self, version: int) -> None:
        """Staged weights take the place of the old ones."""
        self.update({"step": "", "version": version, "kind": "switch"})

    def alive(self) -> None:
        """The engine works."""
        self._wait(self.engine.check_health())

    def cancel(self) -> None:
        """Ends an update that a worker refused."""
        self._wait(self.engine.finish_weight_update())

    def finish(self, version: int) -> None:
        """Sets the version and drops what the old weights made: keys and values, a KV connector's
        included, and features of images."""
        self._wait(self.engine.finish_weight_update(str(version)))
        reset = self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not self._wait(reset):
            raise ConnectionError("the engine did not drop its prefix cache")
        # After the other: no request runs any more that holds features.
        self._wait(self.engine.reset_encoder_cache())
