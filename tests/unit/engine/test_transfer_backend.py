"""The weight transfer of a server, against the classes of the vLLM that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.gpu_worker import Worker

from megatron_rl import vllm_plugin
from megatron_rl.engine.weights import transfer_backend
from megatron_rl.engine.weights.worker import WeightReceiver
from megatron_rl.runtime.joint_group import Barrier, serve_store
from megatron_rl.types import TransferOptions


@pytest.fixture
def backend(monkeypatch):
    """What a worker makes of ``--weight-transfer-config '{"backend": "megatron_rl"}'``."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    init = Worker.init_weight_transfer_engine
    monkeypatch.setattr(Worker, "init_weight_transfer_engine", init)  # is put back after the test
    vllm_plugin.register()
    vllm_plugin.register()  # plugins may be loaded several times
    config = SimpleNamespace(backend=transfer_backend.BACKEND)
    engine_config = SimpleNamespace(
        parallel_config=SimpleNamespace(), model_config=SimpleNamespace()
    )
    return WeightTransferEngineFactory.create_engine(
        config, engine_config, torch.device("cpu"), nn.Linear(1, 1)
    )


def test_the_worker_can_make_the_backend(backend):
    assert isinstance(backend, transfer_backend.ShardTransferEngine)
    assert backend.connect is vllm_plugin.receiving_end


def test_its_methods_take_what_vllm_gives(backend):
    for name in WeightTransferEngine.__abstractmethods__:
        wanted = inspect.signature(getattr(WeightTransferEngine, name)).parameters
        assert list(inspect.signature(getattr(type(backend), name)).parameters) == list(wanted), (
            name
        )


def test_the_options_of_the_trainer_arrive(backend):
    """They travel as a dictionary inside the message."""
    options = TransferOptions(bucket_mib=3, rounds_in_flight=4, verify=False, timeout_s=5.0)
    where = {"address": "a", "port": 1, "first_rank": 2, "size": 3, "device": "cpu"}
    assert backend.parse_init_info({**where, "options": asdict(options)}).options == options


def test_an_update_without_a_trainer_is_refused(backend):
    backend.start_weight_update()
    with pytest.raises(ValueError, match="no trainer has connected"):
        backend.update_weights({"step": "1", "version": 1})
    backend.finish_weight_update()
    backend.shutdown()


@pytest.fixture
def worker(backend):
    """vLLM's, of a model that no trainer can send."""
    worker = object.__new__(Worker)
    worker.vllm_config, worker.weight_transfer_engine = object(), backend
    worker._weight_update_active = False
    backend.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    backend.model_config = SimpleNamespace(model="of a hub")
    backend.sink = transfer_backend.WorkerSink(SimpleNamespace(), [])
    return worker


def connect(worker: Worker, store: dist.TCPStore) -> None:
    """A trainer that this server is of no use to."""
    place = {"address": "127.0.0.1", "port": store.port, "first_rank": 1, "size": 2}
    options = asdict(TransferOptions(timeout_s=20.0))
    info = {**place, "device": "cpu", "options": options}
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(worker.init_weight_transfer_engine, info)
        problems = Barrier(store).release("init", [1], dict)
        joined.result(timeout=30.0)
    assert "directory of a Hugging Face checkpoint" in problems[1]


def test_an_update_that_a_lost_trainer_began_keeps_out_no_other(worker):
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    connect(worker, serve_store("127.0.0.1", 20.0))
    worker.start_weight_update()


def test_a_worker_whose_trainer_is_gone_raises_nothing(worker, backend, caplog):
    """An exception would leave the answers of the other workers to the next command."""
    store = serve_store("127.0.0.1", 20.0)
    connect(worker, store)
    del store  # the trainer was killed
    backend.receive_weights(transfer_backend.UpdateInfo("sync1", 1))
    assert "the trainer is gone" in caplog.text


def test_all_versions_are_staged_in_one_stream(monkeypatch):
    """The device's memory that one has used is of no use to another."""
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Mock())

    @contextmanager
    def entered(stream: Mock) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", entered)
    side = transfer_backend.SideStream(torch.device("cuda", 0))
    for _ in range(2):
        with side.entered():
            pass
    first, second = used
    assert first is second and first.synchronize.call_count == 2


def test_weights_are_received_under_the_settings_of_the_engine():
    """Layers look there for the kernels that they are processed for; the worker's own reload sees
    to it."""
    seen = []

    def reload(weights_iterator: object) -> None:
        seen.append((get_current_vllm_config(), weights_iterator))

    worker = object.__new__(type("EngineWorker", (WeightReceiver, Worker), {}))
    worker.vllm_config, worker.device = object(), SimpleNamespace(type="cuda")
    worker.model_runner = SimpleNamespace(reload_weights=reload, model=None)
    weights = iter([])
    worker.receive_weights(weights, {})
    assert seen == [(worker.vllm_config, weights)]
