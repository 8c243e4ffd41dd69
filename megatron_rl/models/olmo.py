"""OLMo 2 and 3: norms behind attention and feed-forward part in place of those before them, and one
norm over all heads of the queries, and of the keys. OLMo 3 has windows in three of four layers, and
YaRN in the others. Source: OLMo 2, arXiv:2501.00656, section 2."""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    Architecture,
    Family,
    Slot,
    common,
    refuse,
)


def read(hf: Any) -> Architecture:
    refuse(hf, {"attention_bias": (False,)})
    of_heads = (("q", hf.num_attention_heads), ("k", hf.num_key_value_heads))
    dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    norms = tuple(
        Slot(f"self_attention.{x}_norm.weight", "rows", (f"self_attn.{x}_norm.weight",), (n * dim,))
        for x, n in of_heads
    )
    norms += tuple(
        Slot(f"{megatron}_bda.norm.weight", "whole", (f"post_{name}_layernorm.weight",))
        for megatron, name in (("self_attn", "attention"), ("mlp", "feedforward"))
    )
    return common(
        hf,
        layer_slots=ATTENTION[1:-1] + norms + DENSE_MLP,
        input_norms=False,
        output_norms=True,
        heads_norm=True,
    )


FAMILIES = (Family("Olmo2ForCausalLM", read), Family("Olmo3ForCausalLM", read))
