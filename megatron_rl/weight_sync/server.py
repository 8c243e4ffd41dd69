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
from http.client import HTTPException
from typing import Any, Literal, Protocol
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import torch

from megatron_rl.runtime import cpu
from megatron_rl.runtime.digest import WeightSyncError
from megatron_rl.runtime.joint_group import JointGroupError, Meeting, host_store, join_group, leave_group, together, visit_store
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.reshard import ReshardSync, WeightHolder

InFlight = Literal["wait", "abort", "keep"]
PORTS = {"http": 80, "https": 443}


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
        """Drops all keys and values computed with the old weights, those of a KV connector too, and stamps the version on what follows."""


class HttpServer:
    """An OpenAI server of vLLM, started with VLLM_SERVER_DEV_MODE=1 and ``--weight-transfer-config '{"backend": "megatron_rl"}'``."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        """``url``: such as http://127.0.0.1:8000. ``timeout_s``: for one command, and for requests under way to end."""
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        # Through no proxy: the weights go to this address directly, so the commands can.
        self.opener = build_opener(ProxyHandler({}))

    def call(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST", **query: Any) -> Any:
        """The answer of the server, parsed. Raises ConnectionError with what is wrong and what to do."""
        url = f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(url, data, {"Content-Type": "application/json"}, method=method)
            with self.opener.open(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            remedy = "; start the server with VLLM_SERVER_DEV_MODE=1 in its environment" if error.code == 404 else ""
            text = error.read().decode(errors="replace")[:1000]
            raise ConnectionError(f"{method} {url}: the server answers {error.code} {error.reason}: {text}{remedy}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise ConnectionError(f"{method} {url}: no answer from a vLLM server ({error}); is it up, and the address right?") from error

    def address(self) -> str:
        try:
            where = urlsplit(self.url)
            with socket.create_connection((where.hostname, where.port or PORTS[where.scheme]), timeout=self.timeout_s) as connection:
                return connection.getsockname()[0]
        except KeyError as error:
            raise ConnectionError(f"{self.url}: the address of a server begins with http:// or https://") from error
        except (OSError, ValueError) as error:
            raise ConnectionError(f"{self.url}: no server is reached ({error}); is it up, and the address right?") from error

    def num_workers(self) -> int:
        answer = self.call("get_world_size", method="GET")
        if not isinstance(answer, dict) or "world_size" not in answer:
            raise ConnectionError(f"GET {self.url}/get_world_size: no answer of a vLLM server ({answer}); is the address right?")
        return answer["world_size"]

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
        if not self.call("reset_prefix_cache", reset_running_requests="true", reset_external="true")["success"]:
            raise ConnectionError(f"{self.url}: the server did not drop its prefix cache")


class Pushing(ReshardSync):
    """Knows how far a sync has come: weights move only once every rank is ready."""

    moving = False

    def _ready(self) -> None:
        self.moving = False
        super()._ready()
        self.moving = True


class ServerSync:
    """Implements ``protocols.WeightSync``: plans once, at construction, and carries the plan out at every sync.

    The server serves its old weights before a sync, nothing during it, and the new ones after it; when a sync fails in the middle it
    stays paused and its workers refuse to run. When one fails before anything has moved, the old weights serve on.
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
        device: torch.device | str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Collective over the trainer's ranks; ``server`` is used by rank 0 alone. ``device``: where the policy's weights are, None: where
        this process computes; the server's must be of the same kind.

        Raises ValueError, on every rank: the server is not reached, lacks the backend, or holds another model; names tensors.
        """
        self._policy, self._server, self._world, self._in_flight_requests = policy, server, world, in_flight_requests
        self._pool = ThreadPoolExecutor(1)
        self._failure: str | None = None
        self._steps = 0
        self._group: torch.distributed.ProcessGroup | None = None
        self._sync: Pushing | None = None
        device = cpu.device() if device is None else torch.device(device)
        options = {"bucket_mib": bucket_mib, "in_flight": in_flight, "verify": verify}
        try:
            address, port, size = world.from_main(lambda: self._invite({**options, "timeout_s": timeout_s, "device": device.type}))
            store = visit_store(address, port, timeout_s)
            self._group = join_group(store, world.rank, size, timeout_s)
            self._sync = Pushing(policy, None, gpus_per_node=1, device=device, group=self._group, **options)
            world.from_main(self._check)
        except Exception as error:
            self.close(error)
            if not isinstance(error, OSError | RuntimeError):  # of the connection, the store and the group
                raise
            raise ValueError(f"weight sync to a server: {error}") from error
        self.plan = self._sync.plan

    def sync(self, version: int) -> SyncReport:
        """Collective over the trainer's ranks. ``bytes_sent``: what this rank sent; ``bytes_total``: what the workers were sent.

        Raises:
            ValueError: a training parameter changed its dtype or shape. The server goes on with its old weights.
            WeightSyncError: server or network failed, or other bytes arrived than were sent. The message says whether the server goes on
                with its old weights, then a later sync may work, or stays paused.
        """
        if self._failure is not None:
            raise WeightSyncError(f"weight sync to a server: {self._failure}")
        if self._sync is None:
            raise ValueError("weight sync to a server: it is closed; construct a new one")
        start, update = time.perf_counter(), f"the update to weight version {version}"
        try:
            self._world.from_main(self._pause)
        except ConnectionError as error:
            raise WeightSyncError(f"weight sync to a server: {update} did not begin, nothing has moved: {error}") from error
        self._steps += 1
        stage = "did not begin"
        try:
            self._world.from_main(lambda: self._begin(version))
            stage = "failed"
            report = self._sync.sync(version)
            self._world.from_main(self._check)
            stage = "is complete, but the server did not go on"
            self._world.from_main(lambda: self._end(version))
        except BaseException as error:
            problem = ""
            if stage == "failed" and not self._sync.moving and isinstance(error, Exception):
                problem = self._world.from_main(self._call_off)
                if not problem:
                    raise
                stage = "did not begin"
            self._failure = f"{update} {stage}: {error}{problem}. The server stays paused, start it anew"
            self._leave(error)  # nobody shall wait for this rank
            raise WeightSyncError(f"weight sync to a server: {self._failure}") from error
        num_tensors = sum(len(group.tensors) for group in self.plan.classes)
        return replace(report, num_tensors=num_tensors, bytes_total=self.plan.bytes_sent, seconds=time.perf_counter() - start)

    def close(self, error: BaseException | None = None) -> None:
        """Collective over the trainer's ranks: leaves the group. The server serves on. May be called again, and after a failure."""
        self._leave(error)
        self._pool.shutdown()  # workers report to the store until the command is over
        self._store = self._meeting = None

    def _leave(self, error: BaseException | None = None) -> None:
        self._sync = None
        if self._group is not None:
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

    def _pause(self) -> None:
        """Rank 0: when the server does not pause in time, it is to serve on."""
        try:
            self._server.pause(self._in_flight_requests)
        except ConnectionError as error:
            try:
                self._server.resume()
            except ConnectionError as also:
                raise ConnectionError(f"{error}; the server may be paused: {also}") from error
            raise

    def _begin(self, version: int) -> None:
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
        self._server.finish(version)
        self._server.resume()

    def _call_off(self) -> str:
        """Rank 0, after an update that every rank refused: the server goes on with its old weights. Returns why it cannot."""
        try:
            if not all(self._problems().values()):
                return "; some of the workers did not refuse it"
            self._server.cancel()
            self._server.resume()
        except (OSError, RuntimeError) as error:  # of a command, of the store
            return f"; calling it off: {error}"
        return ""
