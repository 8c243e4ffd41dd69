"""A model family: Qwen3's layout under a name of one's own. The page: model_family.md."""

from vllm import ModelRegistry

from megatron_rl.models import Family, register_family
from megatron_rl.models.qwen3 import read

ARCHITECTURE = "RenamedQwen3ForCausalLM"
ENGINE_CLASS = "vllm.model_executor.models.qwen3:Qwen3ForCausalLM"

register_family(Family(ARCHITECTURE, read))  # the policy, on Megatron-Core
ModelRegistry.register_model(ARCHITECTURE, ENGINE_CLASS)  # the engine
