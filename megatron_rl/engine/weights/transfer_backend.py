"""A weight-transfer backend of vLLM: any vLLM server or engine takes its weights from a trainer,
each worker just the slices it keeps.

vLLM calls ``init_transfer_engine`` once for a trainer and ``update_weights`` for each update, on
every worker. An update replaces the weights while the engine is paused; or it stages them next
to those, in a thread, while the engine samples, and another one puts them in place.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import envs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl.engine.weights.recorder import UndiscoveredError
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.engine.weights.worker import ShardReceiver
from megatron_rl.errors import LostPeerError
from megatron_rl.protocols import Parameters, Transfer
from megatron_rl.runtime.joint_group import Barrier, connect_store, join_group, leave_group
from megatron_rl.types import Shard, SyncReport, TransferOptions

logger = logging.getLogger(__name__)

BACKEND = "megatron_rl"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer sends once: where to meet it, and how the transfer is carried out."""

    address: str
    port: int
    first_rank: int  # of the workers in the joint group, after the ranks of the trainer
    size: int
    device: str  # kind of the trainer's: cpu, cuda
    options: TransferOptions  # as a dictionary where it comes out of a message

    def __post_init__(self) -> None:
        if isinstance(self.options, dict):
            self.options = TransferOptions(**self.options)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the trainer sends for each update.

    Attributes:
        kind: "replace": weights come and take the place of the old ones; "stage": they come;
            "switch": those that were staged take their place.
        step: under which the workers meet the trainer; they do not for a switch.
    """

    step: str
    version: int
    kind: Literal["replace", "stage", "switch"] = "replace"


class StagedWeights:
    """New weights of a worker's model, next to those in use: they arrive while it samples, and
    replace the old ones later, all at once.

    One version, in host memory, as the model's loader gives its parameters: not fused, packed or
    quantized yet. It stays when it has taken its place: the model may leave it and come back.
    """

    def __init__(self, receiver: ShardReceiver) -> None:
        self._receiver = receiver
        self._tensors: dict[str, Tensor] = {}
        self.version: int | None = None  # None: there is none that is whole

    def take(self, transfer: Transfer, version: int) -> None:
        """Replaces what is staged; the model is not touched."""
        self.version = None
        transfer(self._parameter, lambda key: None)
        self.version = version

    def _parameter(self, key: str) -> Tensor:
        if key not in self._tensors:
            form = self._receiver.forms[key]
            # What no message fills (padding of a vocabulary) is 0, as in ``OpenLayers``.
            self._tensors[key] = torch.zeros_like(
                form, device="cpu", pin_memory=torch.cuda.is_available()
            )
        return self._tensors[key]

    def put_in_place(self, version: int) -> None:
        """Replaces the weights of the model by this staged version.

        Raises:
            ValueError: another version is staged; the model keeps its weights.
        """
        if version != self.version:
            raise ValueError(f"weight version {version} is not staged, but {self.version}")
        self._receiver.receive(self._copy)

    def _copy(self, parameter: Parameters, written: Callable[[str], None]) -> None:
        # Layer by layer: one that is open has memory of the device in addition to that of its old
        # weights, and they may have come in another order (first parts of all experts, then second
        # ones).
        for key in sorted(self._tensors, key=lambda key: key.rpartition(".")[0]):
            parameter(key).copy_(self._tensors[key])
            written(key)


class WorkerSink:
    """One worker's end of a planned sync.

    Attributes:
        replica: of all engines in the joint group; set anew at each connection.
        staged: weights next to those in use.
        is_staging: what comes goes there.
        failure: why its model must not run until an update is complete.
    """

    def __init__(self, receiver: ShardReceiver, shards: list[Shard]) -> None:
        self.receiver = receiver
        self.shards = shards
        self.staged = StagedWeights(receiver)
        self.is_staging = False
        self.replica = 0
        self.failure = ""

    def weight_shards(self) -> list[Shard]:
        """Recorded from the loaders of vLLM."""
        return self.shards

    def update_weights(self, transfer: Transfer, version: int) -> None:
        """Replaces all weights; any exception leaves the model unusable until a later update.
        Staging leaves it as it is."""
        if self.is_staging:
            self.staged.take(transfer, version)
            return
        with self._replacing(version):
            self.receiver.receive(transfer)

    def switch(self, version: int) -> None:
        """The staged weights take their place. Raises as ``update_weights`` does."""
        with self._replacing(version):
            self.staged.put_in_place(version)

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failure = (
                f"its weights are half replaced: the update to weight version {version} failed:"
                f" {error}"
            )
            raise
        self.failure = ""


# Collective over trainer and workers: replaces the worker's weights by those of a version.
Sync = Callable[[int], SyncReport]
_Connect = Callable[[WorkerSink, dist.ProcessGroup, TransferOptions], Sync]


class ShardTransferEngine(WeightTransferEngine):
    """One worker's end. A subclass says how its end of the sync is made."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    connect: ClassVar[_Connect]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        end_updates_of_lost_trainers(self)
        self.group: dist.ProcessGroup | None = None
        self.sync: Sync | None = None
        self.sink: WorkerSink | None = None
        self.staging: threading.Thread | None = None
        self.side_stream = SideStream(self.device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the trainer's group and makes the plan with it. Disconnects a previous trainer."""
        self.shutdown()
        parallel = self.parallel_config
        # Behind the trainer's ranks: replica after replica, and in each worker after worker.
        of_replica = parallel.data_parallel_index * parallel.world_size
        self.rank = init_info.first_rank + of_replica + parallel.rank
        timeout_s = init_info.options.timeout_s
        store = connect_store(init_info.address, init_info.port, timeout_s)
        secret = envs.VLLM_API_KEY or ""
        self.barrier = Barrier(store, secret)
        with self._reported("init"):
            self.barrier.wait("init", self.rank, self._discover(init_info))
            self.group = join_group(store, self.rank, init_info.size, timeout_s, secret)
            self.sync = type(self).connect(self.sink, self.group, init_info.options)

    @contextmanager
    def _reported(self, step: str) -> Iterator[None]:
        """Reports to the trainer, if it is still there, how the step ended. Nothing is raised: an
        executor of vLLM with several workers that meets an exception takes the answers still to
        come for those to its next command."""
        problem = ""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the trainer raises it)
            logger.error("weight transfer: %s", error)
            problem = str(error)
            is_whole = self.sync is not None and self.sink is not None and not self.sink.failure
            is_staging = self.sink is not None and self.sink.is_staging
            if not is_whole or is_staging or isinstance(error, LostPeerError):
                self._leave(error)  # so that no peer waits for this worker
        try:
            self.barrier.report(step, self.rank, problem)
        except RuntimeError as error:  # of the store
            logger.error("weight transfer: the trainer is gone (%s)", error)

    def _discover(self, init_info: InitInfo) -> str:
        """Finds out once what this worker needs; returns why it cannot take it."""
        path = Path(self.model_config.model)
        if not path.is_dir():
            return (
                f"the server was started with model {path}; start it with the directory of a"
                " Hugging Face checkpoint"
            )
        if init_info.device != self.device.type:
            return (
                f"the trainer's weights are on {init_info.device}, this worker's on"
                f" {self.device.type}; both must be of one kind"
            )
        if self.sink is None:
            receiver = ShardReceiver(self.model, self.vllm_config)
            try:
                shards = receiver.discover(expected_tensors(path))
            except (UndiscoveredError, ValueError) as error:
                return str(error)
            self.sink = WorkerSink(receiver, shards)
            refuse_half_updated(self, self.sink)
        # No two replicas of a group have one number: each has a worker of its own at least.
        self.sink.replica = init_info.first_rank + self.parallel_config.data_parallel_index
        return ""

    def start_weight_update(self) -> None:
        """Nothing, nor does ``finish_weight_update``: an update is ``receive_weights``."""

    finish_weight_update = start_weight_update

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes part in one sync, or puts in place what came with an earlier one."""
        sink = self.sink
        if sink is None:
            raise ValueError(
                "weight update: no trainer has connected to this engine; push to it with FleetSync"
                " of megatron_rl in the trainer"
            )
        self._end_staging()
        if update_info.kind == "switch":
            # Raises nothing, see ``_reported``: a worker that fails refuses to run and says why.
            try:
                sink.switch(update_info.version)
            except Exception as error:  # noqa: BLE001 (raised when the model is to run)
                logger.error("weight transfer: %s", error)
        elif update_info.kind == "stage":
            stage = partial(self._stage, sink, update_info)
            self.staging = threading.Thread(target=stage, name="staging of weights", daemon=True)
            self.staging.start()
        else:
            self._take_part(sink, update_info)

    def _take_part(self, sink: WorkerSink, update_info: UpdateInfo) -> None:
        with self._reported(update_info.step):
            problem = ""
            if self.sync is None:
                problem = sink.failure or (
                    "the trainer has left, or its connection was refused; push again with FleetSync"
                    " of megatron_rl there"
                )
            self.barrier.wait(update_info.step, self.rank, problem)
            assert self.sync is not None, "a step with a problem does not begin"
            self.sync(update_info.version)

    def _stage(self, sink: WorkerSink, update_info: UpdateInfo) -> None:
        """Takes part in a thread of its own, while the engine samples."""
        sink.is_staging = True
        try:
            with self.side_stream.entered():
                self._take_part(sink, update_info)
        finally:
            sink.is_staging = False

    def _end_staging(self) -> None:
        """What is staged is there, or has failed. A trainer begins nothing before; a new one may,
        after the old one was lost."""
        if self.staging is not None:
            self.staging.join()
            self.staging = None

    def shutdown(self) -> None:
        self._leave()
        self._end_staging()

    def _leave(self, error: BaseException | None = None) -> None:
        self.sync = None
        if self.group is not None:
            leave_group(self.group, error)
            self.group = None


class SideStream:
    """A CUDA stream for a thread whose work on the device neither waits for the engine's nor delays
    it. One for all versions: memory that was freed in another stream would not be used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """When it is left, the work is done. Nothing happens on a CPU."""
        if self._device.type == "cpu":
            yield
            return
        torch.cuda.set_device(self._device)  # of this thread
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def end_updates_of_lost_trainers(engine: WeightTransferEngine) -> None:
    """Patches the worker that owns ``engine``: a trainer that connects may begin an update, though
    one that was killed has not finished its own. vLLM would refuse it."""
    from vllm.v1.worker.gpu_worker import Worker

    connect = Worker.init_weight_transfer_engine

    def init_weight_transfer_engine(worker: Worker, init_info: dict[str, Any]) -> None:
        if worker.weight_transfer_engine is engine:
            worker._weight_update_active = False
        connect(worker, init_info)

    Worker.init_weight_transfer_engine = init_weight_transfer_engine


def refuse_half_updated(engine: WeightTransferEngine, sink: WorkerSink) -> None:
    """Patches the worker that owns ``engine``: while the sink has a failure, every execution
    raises. Not as a hook of the model: a CUDA graph of the whole model is replayed without
    calling the model."""
    from vllm.v1.worker.gpu_worker import Worker

    execute = Worker.execute_model

    def execute_model(worker: Worker, *arguments: Any, **options: Any) -> Any:
        if sink.failure and worker.weight_transfer_engine is engine:
            raise RuntimeError(f"restart this engine: {sink.failure}")
        return execute(worker, *arguments, **options)

    Worker.execute_model = execute_model


def register(connect: _Connect) -> None:
    """Makes the backend known to vLLM, once; ``connect`` makes the worker's end of the sync."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, type("Engine", (ShardTransferEngine,), {"connect": staticmethod(connect)})
        )
