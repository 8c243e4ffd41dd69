"""The command of a server, read by vLLM's own parser."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from megatron_rl.engine.arguments import engine_arguments
from megatron_rl.engine.serving.server import server_command
from tests.unit.engine.test_engine_calls import config

# How an engine inside another program finds its ranks, takes weights and sleeps.
OF_THE_LIBRARY = {
    "distributed_executor_backend",
    "worker_extension_cls",
    "use_tqdm_on_load",
    "enable_sleep_mode",
    "distributed_timeout_seconds",
    "cpu_distributed_timeout_seconds",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_head_computes_in_float32(tmp_path, dtype):
    """As the policy's does. Without the override vLLM takes the type of the weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    LlamaConfig(**sizes, num_attention_heads=2, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path
    )
    rollout = config("rollout=vllm", f"rollout.dtype={dtype}").rollout
    arguments = engine_arguments(str(tmp_path), rollout, 3)
    names = ("model", "dtype", "hf_overrides", "skip_tokenizer_init")
    asked = {name: arguments[name] for name in names if name in arguments}
    model = EngineArgs(**asked).create_model_config()
    assert (model.dtype, model.head_dtype) == (getattr(torch, dtype), torch.float32)
    assert bool(asked["hf_overrides"]) == (dtype != "float32")


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout=vllm_cpu"],
        ["rollout=vllm_cpu", "rollout.anneal.start=1.2", "rollout.stop=[END]"],
        ["rollout=vllm", "rollout.max_num_seqs=8", "rollout.kv_cache_gib=1.5"],
    ],
)
def test_a_server_gets_the_settings_of_the_engine_in_the_process(parser, overrides):
    rollout = config(*overrides).rollout
    arguments = engine_arguments("m", rollout, 3)
    words = server_command(arguments, "127.0.0.1", 8000)
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(words[3:]))
    settings = {name: arguments[name] for name in arguments if name not in OF_THE_LIBRARY}
    backend = settings.pop("attention_config")["backend"]  # without a GPU
    assert parsed.attention_config.backend.name == backend == "CPU_MLA"
    assert {name: getattr(parsed, name) for name in settings} == settings
