"""Run by an interpreter that has the GPU stack, on a machine without GPU and driver.

``cuda_build_worker.py imports MODULE:NAME ...`` imports what is named.

``cuda_build_worker.py tensors FOLDER`` needs a library of answers before that of the CUDA runtime
(cuda_answers.c). It builds the policy at the sizes of a 7B model, with two layers, on tensors of
device "cuda" that have a shape, a format and a device but no data: torch itself refuses operations,
shapes and formats that its CUDA build does not have. The layers are megatron-core's own with this
project's attention, for the kernels of Transformer Engine look at the data.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.rules.hardware import Machine
from megatron_rl.policy import layers, megatron_policy
from megatron_rl.policy import model as model_room
from megatron_rl.policy import parallel as parallel_room
from megatron_rl.policy.batches.microbatches import Microbatch, Packer
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.passes.logprobs import TokenValues
from megatron_rl.policy.state import weights
from megatron_rl.types import SequenceBatch
from tests import zoo

LAYERS = 2
QWEN_7B = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=LAYERS,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    hidden_act="silu",
    attention_dropout=0.0,
)
PROMPTS, RESPONSES = (300, 100), (724, 156)


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def imports(names: list[str]) -> None:
    assert torch.version.cuda is not None, "this needs a CUDA build of torch"
    assert not torch.cuda.is_available(), "this is for a machine without GPU"
    for name in names:
        module, _, wanted = name.partition(":")
        try:
            if not hasattr(importlib.import_module(module), wanted):
                importlib.import_module(f"{module}.{wanted}")  # a module, not a name in one
        except ImportError as error:
            assert "libcuda.so.1" in str(error), f"{name}: {error}"
            print(f"DRIVER {name}", flush=True)
        else:
            print(f"OK {name}", flush=True)


def rotated(values: Tensor, cu_seqlens: Tensor, freqs: Tensor, **_: Any) -> Tensor:
    """Stands in for the kernel that applies rotary angles: shape and format of its result. The
    plain way reads the boundaries on the host, which tensors without data do not allow."""
    return values * freqs[:1].squeeze(1).cos().to(values.dtype)


def converted(module: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """Stands in for the conversion of a module, which cannot put other contents into parameters
    without data: gives it new ones, with the marks of the old."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            changed = change(parameter.detach())
            if (changed.dtype, changed.device) != (parameter.dtype, parameter.device):
                each._parameters[name] = torch.nn.Parameter(changed)
                for mark, value in parameter.__dict__.items():
                    each._parameters[name].__dict__.setdefault(mark, value)
    return module


def all_gather_object(gathered: list[Any], mine: Any, group: Any = None) -> None:
    """Every other process has the same."""
    gathered[:] = [mine] * len(gathered)


def build(fake: FakeTensorMode, tensor: int, folder: Path) -> MegatronPolicy:
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    machine = Machine((9, 0), None, "transformer_engine")
    model_room.this_machine = layers.this_machine = megatron_policy.this_machine = lambda: machine
    megatron_policy.patches.this_machine = lambda: machine
    weights.HfDirectory.__init__ = lambda self, path, prefixes: None
    weights.HfDirectory.check = lambda self, arch: None
    # Transformer Engine's Adam allocates where it is made.
    megatron_policy.get_megatron_optimizer = lambda *_: None
    dist.all_gather_object = all_gather_object
    torch.nn.Module._apply = converted
    weights.load = lambda *_, **__: None
    weights.from_first_rank = lambda action: action()
    # It reads numbers off a tensor, and within the mode that has no data none can be read.
    parallel_room._replicas = lambda parallel: [list(range(tensor))]
    layout = [f"parallel.tensor={tensor}", f"parallel.sequence={tensor > 1}".lower()]
    run = zoo.configured(folder, *layout, "precision=bf16")
    # Groups of gloo want the other processes; these talk to nobody, whatever they are made for.
    original = parallel_state.create_group

    def made_of_nothing(*arguments: Any, backend: Any = None, **options: Any) -> Any:
        return original(*arguments, **options)

    parallel_state.create_group = made_of_nothing
    with fake:
        policy = zoo.configured_policy(run, 2048)
    policy.config.apply_rope_fusion = True
    # The sum over data-parallel ranks is one message that torch cannot send without data.
    policy.config.finalize_model_grads_func = lambda *_, **__: None
    rope_utils.fused_apply_rotary_pos_emb_thd = rotated
    return policy


def moved(thing: Any, fake: FakeTensorMode) -> Any:
    """The same with tensors of device "cuda" that have no data."""
    if isinstance(thing, Tensor):
        return fake.from_tensor(thing).to("cuda")
    if isinstance(thing, list | tuple):
        return type(thing)(moved(each, fake) for each in thing)
    if dataclasses.is_dataclass(thing):
        made = object.__new__(type(thing))
        for name, value in vars(thing).items():
            object.__setattr__(made, name, moved(value, fake))
        return made
    return thing


def microbatch(policy: MegatronPolicy) -> Microbatch:
    """Packed on the CPU, where lengths can be read; attention's groups are made there too."""
    prompts, responses = torch.tensor(PROMPTS), torch.tensor(RESPONSES)
    total = int((prompts + responses).sum())
    batch = SequenceBatch(prompts, responses, token_ids=torch.zeros(total, dtype=torch.long))
    packer = Packer(policy.batching.packer.multiples, 0, 1, torch.device("cpu"))
    packed = packer.pack(batch, [0, 1])
    assert packed.packing.groups
    return packed


def forward_and_backward(tensor: int, folder: Path) -> Counter[str]:
    """One micro-batch through layers, head and logprobs and back; the operations that it took."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    policy = build(fake, tensor, folder)
    parameters = [each for module in policy.modules for each in module.parameters()]
    kinds = {(each.device.type, each.dtype) for each in parameters}
    assert kinds == {("cuda", torch.bfloat16)}, kinds
    found: list[Tensor] = []

    def consume(_: Microbatch, values: TokenValues) -> tuple[Tensor, Any]:
        found.append(values.logprobs)
        return -values.logprobs.sum(), None

    packed = microbatch(policy)
    with fake, Counting() as counting:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        batch = moved(packed, fake)
        policy._passes.run([batch], consume, backward=True)
    (logprobs,) = found
    assert (logprobs.device.type, logprobs.dtype) == ("cuda", torch.float32)
    assert logprobs.shape == (sum(RESPONSES),)
    assert {each.main_grad.device.type for each in parameters} == {"cuda"}
    return counting.counts


def tensors(tensor: int, folder: Path) -> None:
    counts = forward_and_backward(tensor, folder)
    # The head's gradient is added up in float32 from operands in bfloat16.
    assert counts["aten.addmm.dtype_out"] > 0, counts
    assert counts["aten.mm.dtype_out"] > 0, counts
    # Nothing is fetched to the host.
    assert counts["aten._local_scalar_dense.default"] == 0, counts
    print(f"OK tensors {tensor}", flush=True)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "imports":
        imports(rest)
        return
    torch.cuda._lazy_init = lambda: None  # it would allocate
    for tensor in (1, 4):
        child = os.fork()  # a process group and megatron's state for each layout
        if child == 0:
            try:
                tensors(tensor, Path(rest[0]))
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
