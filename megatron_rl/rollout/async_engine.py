"""An AsyncLLM of vLLM that takes its weights from a trainer in the same process, by the backend ``megatron_rl``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class AsyncEngine:
    """Commands to the engine, whose event loop runs in another thread. Implements ``weight_sync.server.Server``."""

    def __init__(self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop, timeout_s: float = 300.0) -> None:
        """``engine``: built with ``weight_transfer_config=WeightTransferConfig(backend="megatron_rl")``. ``timeout_s``: for one command."""
        self.engine, self.loop, self.timeout_s = engine, loop, timeout_s

    def _wait(self, command: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(command, self.loop).result(self.timeout_s)
        except Exception as error:
            raise ConnectionError(f"the engine did not carry out {command.__qualname__}: {type(error).__name__}: {error}") from error

    def address(self) -> str:
        """Of this machine, where the workers are too."""
        return "127.0.0.1"

    def num_workers(self) -> int:
        """Of all replicas."""
        return self.engine.vllm_config.parallel_config.world_size_across_dp

    def pause(self, in_flight: Any) -> None:
        """Schedules no request; those under way are waited for, aborted or kept."""
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

    def cancel(self) -> None:
        """Ends an update that was refused."""
        self._wait(self.engine.finish_weight_update())

    def finish(self, version: int) -> None:
        """Stamps the version, drops keys and values of the old weights, those of a KV connector too."""
        self._wait(self.engine.finish_weight_update(str(version)))
        if not self._wait(self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
            raise ConnectionError("the engine did not drop its prefix cache")
