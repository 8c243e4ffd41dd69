"""The planned sync into vLLM servers: the trainer's end of the backend ``megatron_rl``.

The ranks of the trainer and the workers of the server form one group for the weights; HTTP carries the commands alone.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Protocol
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import torch

from megatron_rl.runtime.digest import WeightSyncError
from megatron_rl.runtime.joint_group import JointGroupError, Meeting, host_store, join_group, leave_group, together, visit_store
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.reshard import ReshardSync, WeightHolder

InFlight = Literal["wait", "abort", "keep"]


class Server(Protocol):
    """Commands to an engine outside of this launch. Each returns when it is carried out, and raises ConnectionError when it is not."""

    def address(self) -> str:
        """Of this machine, as the engine sees it."""

    def num_workers(self) -> int:
        """Of all replicas."""

    def pause(self, in_flight: InFlight) -> None:
        """No request is scheduled until ``resume``. Requests under way are waited for, aborted, or kept for later."""

    def resume(self) -> None:
        """Schedules requests again."""

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Every worker calls ``init_transfer_engine`` of its backend."""

    def update(self, info: Mapping[str, Any]) -> None:
        """Every worker takes part in one update."""

    def cancel(self) -> None:
        """Ends an update that was refused."""

    def finish(self, version: int) -> None:
        """Drops all keys and values computed with the old weights and stamps the version on what follows."""


class HttpServer:
    """An OpenAI server of vLLM, started with VLLM_SERVER_DEV_MODE=1 and ``--weight-transfer-config '{"backend": "megatron_rl"}'``."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        """``url``: such as http://127.0.0.1:8000. ``timeout_s``: for one command, and for requests under way to end."""
        self.url, self.timeout_s = url.rstrip("/"), timeout_s

    def call(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST", **query: Any) -> Any:
        """The answer of the server, parsed. Raises ConnectionError with what is wrong and what to do."""
        url = f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(url, data, {"Content-Type": "application/json"}, method=method), timeout=self.timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            remedy = "; start the server with VLLM_SERVER_DEV_MODE=1 in its environment" if error.code == 404 else ""
            text = error.read().decode(errors="replace")[:1000]
            raise ConnectionError(f"{method} {url}: the server answers {error.code} {error.reason}: {text}{remedy}") from error
        except (OSError, ValueError) as error:
            raise ConnectionError(f"{method} {url}: no answer from a vLLM server ({error}); is it up, and the address right?") from error

    def address(self) -> str:
        where = urlsplit(self.url)
        try:
            with socket.create_connection((where.hostname, where.port or 80), timeout=self.timeout_s) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            raise ConnectionError(f"{self.url}: no server is reached ({error}); is it up, and the address right?") from error

    def num_workers(self) -> int:
        return self.call("get_world_size", method="GET")["world_size"]

    def pause(self, in_flight: InFlight) -> None:
        self.call("pause", mode=in_flight)

    def resume(self) -> None:
        self.call("resume")

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": info})

    def update(self, info: Mapping[str, Any]) -> None:
        self.call("start_weight_update")
        self.call("update_weights", {"update_info": info})

    def cancel(self) -> None:
        self.call("finish_weight_update")

    def finish(self, version: int) -> None:
        self.call("finish_weight_update", {"weight_version": str(version)})
        # Requests that were kept are computed again from their first token, with the new weights.
        if not self.call("reset_prefix_cache", reset_running_requests="true")["success"]:
            raise ConnectionError(f"{self.url}: the server did not drop its prefix cache")


class ServerSync:
    """Implements ``protocols.WeightSync``: plans once, at construction, and carries the plan out at every sync.

    The server serves its old weights before a sync, nothing during it, and the new ones after it; when a sync fails in the middle it
    stays paused and its workers refuse to run.
    """

    def __init__(
        self,
        policy: WeightHolder,
        server: Server,
        world: World,
        *,
        in_flight_requests: InFlight = "wait",
        bucket_mib: int = 64,
        in_flight: int = 2,
        verify: bool = True,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
    ) -> None:
        """Collective over the trainer's ranks; ``server`` is used by rank 0 alone. ``device``: where the policy's weights are.

        Raises ValueError, on every rank: the server is not reached, lacks the backend, or holds another model; names tensors.
        """
        self._policy, self._server, self._world, self._in_flight_requests = policy, server, world, in_flight_requests
        self._pool = ThreadPoolExecutor(1)
        self._failure: str | None = None
        self._steps = 0
        options = {"bucket_mib": bucket_mib, "in_flight": in_flight, "verify": verify}
        try:
            address, port, size = world.from_main(lambda: self._invite({**options, "timeout_s": timeout_s}))
            store = visit_store(address, port, timeout_s)
            self._group = join_group(store, world.rank, size, timeout_s)
            self._sync: ReshardSync | None = ReshardSync(policy, None, gpus_per_node=1, device=device, group=self._group, **options)
            world.from_main(self._check)
        except (ConnectionError, JointGroupError) as error:
            raise ValueError(f"weight sync to a server: {error}") from error
        self.plan = self._sync.plan

    def sync(self, version: int) -> SyncReport:
        """Collective over the trainer's ranks. ``bytes_sent``: what this rank sent; ``bytes_total``: what the workers were sent.

        Raises:
            ValueError: a training parameter changed its dtype or shape. The server goes on with its old weights.
            WeightSyncError: server or network failed, or other bytes arrived than were sent. The server stays paused.
        """
        if self._failure is not None:
            raise WeightSyncError(f"weight sync to a server: {self._failure}")
        assert self._sync is not None, "closed"
        start = time.perf_counter()
        self._steps += 1
        self._policy.settle()
        try:
            self._world.from_main(lambda: self._begin(version))
            report = self._sync.sync(version)
            self._world.from_main(lambda: self._end(version))
        except ValueError:
            self._world.from_main(self._resume_refused)
            raise
        except BaseException as error:
            self._failure = f"the update to weight version {version} failed: {error}. The server stays paused, start it anew"
            self._leave(error)  # nobody shall wait for this rank
            raise WeightSyncError(f"weight sync to a server: {self._failure}") from error
        num_tensors = sum(len(group.tensors) for group in self.plan.classes)
        return replace(report, num_tensors=num_tensors, bytes_total=self.plan.bytes_sent, seconds=time.perf_counter() - start)

    def close(self) -> None:
        """Collective over the trainer's ranks: leaves the group. The server serves on."""
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        self._pool.shutdown(wait=False)
        self._sync = None
        leave_group(self._group, error)
        self._group = None

    def _invite(self, options: dict[str, Any]) -> tuple[str, int, int]:
        """Rank 0: tells the workers where to come and waits for them. Returns address and port of the store and the group's size."""
        address, size = self._server.address(), self._world.size + self._server.num_workers()
        self._store = host_store(address, options["timeout_s"])
        self._meeting, self._workers = Meeting(self._store), range(self._world.size, size)
        info = {"address": address, "port": self._store.port, "first_rank": self._world.size, "size": size, **options}
        self._call("init", lambda: self._server.init_transfer(info))
        return address, self._store.port, size

    def _begin(self, version: int) -> None:
        self._server.pause(self._in_flight_requests)
        step = f"sync{self._steps}"
        self._call(step, lambda: self._server.update({"step": step, "version": version}))

    def _call(self, step: str, command: Callable[[], None]) -> None:
        """Rank 0: gives the command, which ends with the step, and waits until every worker is about to begin it."""
        self._step, self._command = step, self._pool.submit(command)
        self._meeting.open(step, self._workers, self._absent)

    def _absent(self) -> str:
        """Why the workers will not come: the command is over. Empty while it is not."""
        if not self._command.done():
            return ""
        error = self._command.exception()
        return str(error) if error else "the server answered before its workers came"

    def _problems(self) -> dict[int, str]:
        """Rank 0: waits for the end of the step; what each worker says about it."""
        self._command.result()
        return self._meeting.reports(self._step, self._workers)

    def _check(self) -> None:
        problem = together(self._problems())
        if problem:
            raise JointGroupError(problem)

    def _end(self, version: int) -> None:
        self._check()
        self._server.finish(version)
        self._server.resume()

    def _resume_refused(self) -> None:
        """After an update that every worker refused: it has its old weights, or refuses to run as well."""
        if all(self._problems().values()):
            self._server.cancel()
            self._server.resume()
