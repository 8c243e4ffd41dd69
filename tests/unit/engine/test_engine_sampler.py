"""The planned memory of the sampler that GPUs run, against vLLM's own objects of it."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from megatron_rl.planning.engine_memory import GIB, max_sequences, sampler_tables
from tests.unit.planning_of_7b import QWEN2_5_7B, config

# A device whose tensors have sizes and no data.
DEVICE = torch.device("meta")


@pytest.fixture
def without_cuda(monkeypatch):
    """vLLM's buffers of CPUs, as its CPU worker puts them in; and no streams."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *arguments: None)


def tensor_sizes(sequences: int, vocab_size: int) -> list[int]:
    """Bytes of each tensor that V2's load_model makes on the device after the model itself."""
    states = RequestState(
        max_num_reqs=sequences,
        max_model_len=32,
        max_num_batched_tokens=64,
        num_speculative_steps=0,
        vocab_size=vocab_size,
        device=DEVICE,
    )
    known = {id(thing) for thing in gc.get_objects() if type(thing) is torch.Tensor}
    sampler = Sampler(SimpleNamespace(reasoning_config=None), sequences, vocab_size, DEVICE, states)
    masks = StructuredOutputsWorker(sequences, vocab_size, DEVICE, 1, 1)
    made = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    sizes = [
        tensor.nbytes for tensor in made if id(tensor) not in known and tensor.device == DEVICE
    ]
    del sampler, masks
    return sizes


@pytest.mark.parametrize("sequences", [1024, 9])
def test_the_tables_are_all_that_grows_with_the_vocabulary(without_cuda, sequences):
    others = []
    for vocab_size in (QWEN2_5_7B.vocab_size, 33):
        sizes = tensor_sizes(sequences, vocab_size)
        for table in sampler_tables(replace(QWEN2_5_7B, vocab_size=vocab_size), sequences):
            sizes.remove(table)
        others.append(sum(sizes))
    assert others[0] == others[1] < 20 * 2**10 * sequences


@pytest.mark.parametrize(
    ("device_gib", "name"), [(79.1, "h100"), (139.7, "h200"), (178.0, "b200"), (44.5, "l40s")]
)
def test_the_number_of_sequences_is_vllm_s_choice_for_the_card(monkeypatch, device_gib, name):
    monkeypatch.setattr(
        current_platform, "get_device_total_memory", lambda *arguments: int(device_gib * GIB)
    )
    monkeypatch.setattr(current_platform, "get_device_name", lambda *arguments: f"NVIDIA {name}")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    _, sequences = EngineArgs.get_batch_defaults(world_size=2)
    assert max_sequences(config().rollout, device_gib) == sequences[UsageContext.LLM_CLASS]
