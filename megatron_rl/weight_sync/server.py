"""The planned sync into vLLM servers: the trainer's end of the backend ``megatron_rl``.

The ranks of the trainer and the workers of the server form one process group for the weights; HTTP
carries only commands.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from http.client import HTTPException
from typing import Any, Literal, Protocol
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import torch
import torch.distributed as dist

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime import device as this_device
from megatron_rl.runtime.joint_group import (
    JointGroupError,
    Meeting,
    host_store,
    join_group,
    leave_group,
    together,
    visit_store,
)
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.failure import Progress, Stage
from megatron_rl.weight_sync.reshard import Plans, ReshardSync, WeightSource

InFlight = Literal["wait", "abort", "keep"]
PORTS = {"http": 80, "https": 443}
REMEDIES = {
    401: "; it was started with another secret than that of this run",
    404: "; start the server with VLLM_SERVER_DEV_MODE=1 in its environment",
}


class Server(Protocol):
    """Commands to an engine outside of this launch. Each returns when it is carried out, and raises
    ConnectionError when it is not."""

    def address(self) -> str:
        """Of this machine, as the engine sees it."""

    def num_workers(self) -> int:
        """Of all replicas."""

    def pause(self, in_flight: InFlight) -> None:
        """No request is scheduled until ``resume``. Requests under way are waited for, aborted, or
        kept for later."""

    def resume(self) -> None:
        """Schedules requests again."""

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Every worker calls ``init_transfer_engine`` of its backend."""

    def update(self, info: Mapping[str, Any]) -> None:
        """Every worker takes part in one update."""

    def cancel(self) -> None:
        """Ends an update that was refused."""

    def finish(self, version: int) -> None:
        """Drops all keys and values computed with the old weights, those of a KV connector too, and
        stamps the version on what follows."""


class HttpServer:
    """An OpenAI server of vLLM, started with VLLM_SERVER_DEV_MODE=1 and ``--weight-transfer-config
    '{"backend": "megatron_rl"}'``."""

    def __init__(self, url: str, timeout_s: float = 300.0, secret: str = "") -> None:
        """``url``: such as http://127.0.0.1:8000. ``timeout_s``: for one command, and for requests
        under way to end. ``secret``: of the run, which the server was started with."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.headers = {"Content-Type": "application/json"}
        if secret:
            self.headers["Authorization"] = f"Bearer {secret}"
        # Through no proxy: the weights go to this address directly, so the commands can.
        self.opener = build_opener(ProxyHandler({}))

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST", **query: Any
    ) -> Any:
        """The answer of the server, parsed. Raises ConnectionError with what is wrong and what to
        do."""
        url = f"{self.url}/{path}"
        if query:
            url += f"?{urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(url, data, self.headers, method=method)
            with self.opener.open(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            remedy = REMEDIES.get(error.code, "")
            text = error.read().decode(errors="replace")[:1000]
            raise ConnectionError(
                f"{method} {url}: the server answers {error.code} {error.reason}: {text}{remedy}"
            ) from error
        except (OSError, ValueError, HTTPException) as error:
            raise ConnectionError(
                f"{method} {url}: no answer from a vLLM server ({error}); is it up, and the address"
                " right?"
            ) from error

    def address(self) -> str:
        try:
            url = urlsplit(self.url)
            address = (url.hostname, url.port or PORTS[url.scheme])
            with socket.create_connection(address, timeout=self.timeout_s) as connection:
                return connection.getsockname()[0]
        except KeyError as error:
            raise ConnectionError(
                f"{self.url}: the address of a server begins with http:// or https://"
            ) from error
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"{self.url}: no server is reached ({error}); is it up, and the address right?"
            ) from error

    def num_workers(self) -> int:
        answer = self.call("get_world_size", method="GET")
        if not isinstance(answer, dict) or "world_size" not in answer:
            raise ConnectionError(
                f"GET {self.url}/get_world_size: no answer of a vLLM server ({answer}); is the"
                " address right?"
            )
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
        answer = self.call(
            "reset_prefix_cache", reset_running_requests="true", reset_external="true"
        )
        if not answer["success"]:
            raise ConnectionError(f"{self.url}: the server did not drop its prefix cache")
        # Features of images that the old tower made; no running request holds any now.
        self.call("reset_encoder_cache")


class ServerSync:
    """Implements ``protocols.WeightSync``: plans once, at construction, and carries the plan out at
    every sync.

    The server serves its old weights before a sync, nothing during it, and the new ones after it;
    when a sync fails in the middle it stays paused and its workers refuse to run. When one fails
    before anything has moved, the old weights serve on.
    """

    def __init__(
        self,
        source: WeightSource,
        server: Server,
        world: World,
        options: TransferOptions | None = None,
        *,
        in_flight_requests: InFlight = "wait",
        device: torch.device | str | None = None,
        secret: str = "",
        plans: Plans | None = None,
    ) -> None:
        """Collective over the trainer's ranks; ``server`` is used by rank 0 alone. ``options``:
        None: those of ``TransferOptions()``. ``device``: where the policy's weights are, None:
        where this process computes; the server's must be of the same kind. ``secret``: of the
        run; the workers know it from the server's VLLM_API_KEY. ``plans``: those made for other
        servers; one of the same shape is not planned again.

        Raises ValueError, on every rank: the server is not reached, lacks the backend, or holds
        another model; names tensors.
        """
        self._source = source
        self._server = server
        self._world = world
        self._options = options or TransferOptions()
        self._in_flight_requests = in_flight_requests
        self._device = this_device.device() if device is None else torch.device(device)
        self._secret = secret
        self._plans = plans
        self._pool = ThreadPoolExecutor(1)
        self._failure: str | None = None
        self._steps = 0
        self._group: dist.ProcessGroup | None = None
        self._sync: ReshardSync | None = None
        try:
            self._sync = self._connect()
        except Exception as error:
            self.close(error)
            # Of the connection, the store and the group; anything else passes as it is.
            if not isinstance(error, OSError | RuntimeError):
                raise
            raise ValueError(f"weight sync to a server: {error}") from error
        self.plan = self._sync.plan

    def _connect(self) -> ReshardSync:
        """Collective over the trainer's ranks: one group with the workers, and the plan."""
        timeout_s = self._options.timeout_s
        address, port, size = self._world.from_main(self._invite)
        store = visit_store(address, port, timeout_s)
        self._group = join_group(store, self._world.rank, size, timeout_s, self._secret)
        sync = ReshardSync(
            self._source,
            None,
            self._options,
            gpus_per_node=None,
            device=self._device,
            group=self._group,
            plans=self._plans,
        )
        self._world.from_main(self._check)
        return sync

    def sync(self, version: int) -> SyncReport:
        """Collective over the trainer's ranks. ``bytes_sent``: what this rank sent;
        ``bytes_total``: what the workers were sent.

        Raises:
            ValueError: a training parameter changed its dtype or shape. The server goes on with its
                old weights.
            WeightSyncError: server or network failed, or other bytes arrived than were sent. The
                message says whether the server goes on with its old weights, then a later sync may
                work, or stays paused.
        """
        if self._failure is not None:
            raise WeightSyncError(f"weight sync to a server: {self._failure}")
        if self._sync is None:
            raise ValueError("weight sync to a server: it is closed; construct a new one")
        start = time.perf_counter()
        progress = Progress(version)
        try:
            self._world.from_main(self._pause)
        except ConnectionError as error:
            raise WeightSyncError(f"weight sync to a server: {progress}: {error}") from error
        self._steps += 1
        progress.stage = Stage.INVITED
        try:
            report = self._push(self._sync, progress)
        except BaseException as error:
            problem = ""
            if progress.stage is Stage.READYING and isinstance(error, Exception):
                problem = self._world.from_main(self._call_off)
                if not problem:
                    raise
            self._failure = f"{progress}: {error}{problem}. The server stays paused; restart it"
            self._leave(error)  # so that no peer waits for this rank
            raise WeightSyncError(f"weight sync to a server: {self._failure}") from error
        return replace(
            report,
            num_tensors=sum(len(tensors.names) for tensors in self.plan.classes),
            bytes_total=self.plan.bytes_sent,
            seconds=time.perf_counter() - start,
        )

    def _push(self, sync: ReshardSync, progress: Progress) -> SyncReport:
        """Collective, while the server is paused."""
        self._world.from_main(lambda: self._begin(progress.version))
        report = sync.carry_out(progress)
        progress.stage = Stage.FINISHING  # of the workers: complete here, but not yet there
        self._world.from_main(self._check)
        progress.stage = Stage.COMPLETE
        self._world.from_main(lambda: self._end(progress.version))
        return report

    def close(self, error: BaseException | None = None) -> None:
        """Collective over the trainer's ranks: leaves the group. The server serves on. May be
        called again, and after a failure."""
        self._leave(error)
        self._pool.shutdown()  # workers report to the store until the command is over
        self._store = None
        self._meeting = None

    def _leave(self, error: BaseException | None = None) -> None:
        self._sync = None
        if self._group is not None:
            leave_group(self._group, error)
            self._group = None

    def _invite(self) -> tuple[str, int, int]:
        """Rank 0: tells the workers where to come and waits for them. Returns address and port of
        the store and the group's size."""
        address = self._server.address()
        first_worker = self._world.size
        size = first_worker + self._server.num_workers()
        self._store = host_store(address, self._options.timeout_s)
        self._meeting = Meeting(self._store, self._secret)
        self._workers = range(first_worker, size)
        info = {
            "address": address,
            "port": self._store.port,
            "first_rank": first_worker,
            "size": size,
            "device": self._device.type,
            "options": asdict(self._options),
        }
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
        """Rank 0: gives the command, which ends with the step, and waits until every worker is
        about to begin it."""
        self._step = step
        self._command = self._pool.submit(command)
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
        """Rank 0, after an update that every rank refused: the server goes on with its old weights.
        Returns why it cannot."""
        try:
            if not all(self._problems().values()):
                return "; some of the workers did not refuse it"
            self._server.cancel()
            self._server.resume()
        except (OSError, RuntimeError) as error:  # of a command, of the store
            return f"; calling it off: {error}"
        return ""
