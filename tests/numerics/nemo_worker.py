"""Run by the Python of an environment with nemo-toolkit (extra ``nemo``), without this package:

nemo_worker.py open CHECKPOINT RESULT ...    NeMo loads each; RESULT: parameters, logits of IDS
nemo_worker.py write HF_DIRECTORY CHECKPOINT ...  NeMo's own importer writes one of each model
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

IDS = torch.arange(3, 35)
# Without Transformer Engine NeMo builds megatron's own layers, whose norms are modules of their
# own.
NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
GPU_ONLY = (
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)


def pretend_gpu() -> None:
    """NeMo 2 asks for a device in a few places even when all its tensors are on the CPU."""
    torch.cuda.Stream = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = (
        None  # a name that megatron forgets to define without Transformer Engine
    )
    random.initialize_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER.fork = lambda *_, **__: contextlib.nullcontext()
    from nemo.lightning import io

    io.pl._fix_tensors_device = lambda checkpoint: checkpoint
    apply_transforms, post_init = io.apply_transforms, TransformerConfig.__post_init__

    def without_gpu_kernels(config: Any) -> None:
        for name in GPU_ONLY:
            setattr(config, name, False)
        config.moe_token_dispatcher_type = "allgather"  # the other kinds use CUDA streams
        post_init(config)

    def with_own_norms(
        source: Any, target: Any, mapping: dict[str, str], transforms: list[Any], **more: Any
    ) -> Any:
        for fused, own in NORMS.items():
            mapping = {theirs: name.replace(fused, own) for theirs, name in mapping.items()}
        return apply_transforms(source, target, mapping=mapping, transforms=transforms, **more)

    TransformerConfig.__post_init__, io.apply_transforms = without_gpu_kernels, with_own_norms


def open_checkpoint(checkpoint: Path, result: Path) -> None:
    from nemo.lightning import io
    from safetensors.torch import save_file

    context = io.load_context(checkpoint)
    model, _ = io.ModelConnector(checkpoint).nemo_load(checkpoint)
    network = model.module
    while hasattr(network, "module"):
        network = network.module
    mask = torch.triu(torch.ones(len(IDS), len(IDS), dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = network.eval()(IDS[None], torch.arange(len(IDS))[None], mask)[0]
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in network.state_dict().items()
        if torch.is_tensor(tensor)
    }
    save_file({**tensors, "logits": logits.contiguous()}, result)
    parts = [
        type(part).__name__
        for part in (context.model, context.model.config, context.model.tokenizer, context.trainer)
    ]
    print(f"OK open {checkpoint.name}: {' '.join(parts)}", flush=True)


def write_checkpoint(source: Path, checkpoint: Path) -> None:
    from nemo.collections import llm
    from nemo.lightning.io import ModelConnector

    save = (
        ModelConnector.save_hf_tokenizer_assets
    )  # into a folder of a fixed name outside, unless told otherwise
    ModelConnector.save_hf_tokenizer_assets = lambda self, path: save(
        self, path, str(checkpoint.parent / "nemo_tokenizer")
    )
    # The sizes of these configurations do not matter: the importer reads those of the source.
    models = {
        "llama": lambda: llm.LlamaModel(llm.Llama32Config1B()),
        "qwen2": lambda: llm.Qwen2Model(llm.Qwen2Config500M()),
        "mistral": lambda: llm.MistralModel(llm.MistralConfig7B()),
        "mixtral": lambda: llm.MixtralModel(llm.MixtralConfig8x7B()),
    }
    kind = json.loads((source / "config.json").read_text())["model_type"]
    llm.import_ckpt(models[kind](), f"hf://{source}", output_path=checkpoint)
    ModelConnector.save_hf_tokenizer_assets = save
    print(f"OK write {checkpoint.name}", flush=True)


def main() -> None:
    pretend_gpu()
    action = {"open": open_checkpoint, "write": write_checkpoint}[sys.argv[1]]
    paths = [Path(path) for path in sys.argv[2:]]
    for first, second in zip(paths[::2], paths[1::2], strict=True):
        action(first, second)


if __name__ == "__main__":  # NeMo's writer starts processes that import this file
    main()
