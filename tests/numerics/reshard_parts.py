"""Policies and engines of the reshard tests, one of each kind a launch, and what they answer."""

import sys
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import WeightSource
from megatron_rl.runtime import launch
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.reshard import ReshardSync
from tests.numerics import rollout_models as small
from tests.zoo import build_policy

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
PROMPTS = small.make_prompts(4)
GREEDY = small.sampling(temperature=0.0, num_responses=1, max_response_tokens=16)
OTHER, START = 2, 1  # seeds: what the policy holds, what the engines start with


@cache
def path_of(arch: str, seed: int) -> Path:
    path = FOLDER / f"{arch}_{seed}"
    if WORLD.rank == 0 and not path.exists():
        small.write(arch, seed, FOLDER)
    WORLD.barrier()
    return path


@cache
def engine_of(arch: str, tensor: int, **more: int) -> VllmEngine:
    path = path_of(arch, START)
    # engines of one process share rotary tables; a failed update leaves them without data
    _ROPE_DICT.clear()
    config = small.engine_config(arch, tensor=tensor, **more)
    return VllmEngine(str(path), config, seed=0, launch_id=WORLD.launch_id)


def policy_of(
    arch: str, layout: dict, seed: int = OTHER, params: str | None = None
) -> MegatronPolicy:
    has_experts = any(key.endswith("_experts") for key in small.FAMILIES[arch])
    more = {"sequence": True} if "tensor" in layout and has_experts else {}
    return build_policy(path_of(arch, seed), layout | more, params or small.number_format(arch))


class Loaded:
    """The parameters of a worker as they are when a layer's loading is over, before vLLM packs them
    away."""

    def __init__(self, engine: VllmEngine) -> None:
        self.values: dict[str, Tensor] = {}
        self.model = engine._llm.collective_rpc(lambda worker: worker.model_runner.model)[0]
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading = partial(
                    self.process, name, method.process_weights_after_loading
                )

    def process(self, name: str, original, layer: torch.nn.Module) -> None:
        self.keep(name, layer)
        original(layer)

    def keep(self, name: str, layer: torch.nn.Module) -> None:
        self.values |= {
            f"{name}.{key}": value.detach().clone()
            for key, value in layer._parameters.items()
            if value is not None
        }

    def take(self) -> dict[str, Tensor]:
        """What was loaded since the last call; parameters that are never processed as they are
        now."""
        before, self.values = self.values, {}
        for name, module in self.model.named_modules():
            self.keep(name, module)
        return self.values | before | (self.reset() or {})

    def reset(self) -> None:
        self.values = {}


loaded_of = cache(Loaded)


def answers(engine: VllmEngine) -> tuple:
    groups = engine.generate(PROMPTS, GREEDY)
    return (
        small.tokens(groups),
        small.logprobs(groups).tolist(),
        {one.weight_version for group in groups for one in group},
    )


def planned(policy: WeightSource, engine: VllmEngine, cast: bool = False) -> ReshardSync:
    return ReshardSync(
        policy, engine, TransferOptions(bucket_mib=1, cast=cast), gpus_per_node=WORLD.size
    )
