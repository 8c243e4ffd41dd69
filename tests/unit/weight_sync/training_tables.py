"""Which slices of the HF-named tensors a Megatron rank holds: tables declared by hand, for tests.

They know nothing of the parameter map, so that they can be an oracle for it, for the shards of live
policies and for plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_rl.models.base import LatentAttention
from megatron_rl.weight_sync.planner.shards import ShardGroup
from megatron_rl.weight_sync.planner.slices import Slice
from tests.unit.weight_sync.family_tables import (
    expert_sizes,
    gated_query_key_value,
    heads_norms,
    linear_attention,
    linear_sizes,
)
from tools.planning import engine_tables
from tools.planning.engine_tables import (
    EXPERT_BLOCK,
    EXPERT_NAMES,
    ROUTER_BIAS,
    ModelShape,
    ShardTable,
    divide,
    in_fused_tensors,
)

FAMILIES = (*engine_tables.FAMILIES, "qwen2_moe")


def shape_from_hf(config: Mapping[str, Any], dtype: str = "bfloat16") -> ModelShape:
    """Sizes from a HF ``config.json``, read without the policy's families. Raises ValueError for a
    family or an option that the tables do not describe."""
    family = config["model_type"]
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"config.json: model_type={family!r} has no declared layout; known: {known}"
        )
    is_glm, biased, is_olmo = (family.startswith(x) for x in ("glm4_moe", "gpt_oss", "olmo"))
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not (is_glm or biased):
            raise ValueError(f"config.json: {key}=true is not described by the declared layouts")
    heads = config["num_attention_heads"]
    latent = None
    if family == "deepseek_v3":
        latent = LatentAttention(
            query_rank=config["q_lora_rank"],
            rank=config["kv_lora_rank"],
            plain_dim=config["qk_nope_head_dim"],
            rotary_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
        )
        config = {**config, "head_dim": latent.plain_dim + latent.rotary_dim}
    return ModelShape(
        config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config.get("intermediate_size", 0),
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        biased=biased,
        qkv_bias=family.startswith("qwen2") or biased or (is_glm and config["attention_bias"]),
        qk_norm=family.startswith(("qwen3", "gemma3")) or (is_glm and config["use_qk_norm"]),
        input_norms=not is_olmo,
        output_norms=is_olmo or family == "gemma3_text",
        heads_norm=is_olmo,
        fused=family == "phi3",
        dtype=dtype,
        latent=latent,
        linear=linear_sizes(config) if "linear_num_key_heads" in config else None,
        **expert_sizes(config),
    )


@dataclass(frozen=True)
class TrainLayout:
    """Megatron's parallel sizes. Ranks count in the order tp, cp, dp, pp for dense parameters and
    etp, ep, expert dp, pp for experts (Megatron's default ``tp-cp-ep-dp-pp``), fastest first.

    Example: ``TrainLayout(tp=2, pp=2).ranks == 4``; rank 3 is ``{"tp": 1, "cp": 0, "dp": 0, "pp":
    1, "etp": 0, "ep": 0, "edp": 1}``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1  # model chunks per pipeline stage
    first_layers: int | None = None  # of the first pipeline stage; None = as the others
    last_layers: int | None = None
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this times tp

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        stage, inner = divmod(rank, self.tp * self.cp * self.dp)
        return {
            "tp": inner % self.tp,
            "cp": inner // self.tp % self.cp,
            "dp": inner // (self.tp * self.cp),
            "pp": stage,
            "etp": inner % self.etp,
            "ep": inner // self.etp % self.ep,
            "edp": inner // (self.etp * self.ep),
        }

    def chunks(self, layers: int) -> list[list[range]]:
        """``chunks[stage][chunk]``: global numbers of the layers of each model chunk, as Megatron
        deals them out."""
        ends = {0: self.first_layers, self.pp - 1: self.last_layers}
        fixed = {stage: count for stage, count in ends.items() if count is not None}
        middle = self.pp - len(fixed)
        left = layers - sum(fixed.values())
        if left < 0 or (left % middle if middle else left):
            raise ValueError(
                f"train layout: {layers} layers do not divide over pp={self.pp} with"
                f" first_layers={self.first_layers}, last_layers={self.last_layers}; set the two so"
                " that the stages between them are equal"
            )
        sizes = [fixed[stage] if stage in fixed else left // middle for stage in range(self.pp)]
        if any(size % self.vpp for size in sizes):
            raise ValueError(
                f"train layout: stages of {sizes} layers do not divide into vpp={self.vpp} chunks;"
                " choose another vpp"
            )
        result: list[list[range]] = [[] for _ in sizes]
        layer = 0
        for _ in range(self.vpp):
            for stage, size in enumerate(sizes):
                result[stage].append(range(layer, layer + size // self.vpp))
                layer += size // self.vpp
        return result


def train_shards(model: ModelShape, layout: TrainLayout, rank: int) -> list[ShardGroup]:
    """What a Megatron rank holds: parameters are named ``<chunk>:<name in the GPTModel>``.

    The fused query-key-value matrix has the rows [q of the group, k, v] for each query group in
    turn, cut evenly over tp (also where tp exceeds the number of groups); ``linear_fc1`` is [gate
    part; up part] of the rank; norms and routers are whole on every tp rank.
    Raises ValueError when a size does not divide.
    """
    stage_ranks = layout.tp * layout.cp * layout.dp
    divide("ranks of a pipeline stage", stage_ranks, "etp*ep", layout.etp * layout.ep)
    divide("heads", model.heads, "train tp", layout.tp)
    table = _RankTable(model, layout, rank)
    chunks = layout.chunks(model.layers)[table.at["pp"]]
    if table.at["pp"] == 0:
        table.vocabulary("model.embed_tokens.weight", "0:embedding.word_embeddings.weight")
    for chunk, layers in enumerate(chunks):
        for sparse, is_linear in product((False, True), repeat=2):
            kind = (sparse, is_linear)
            chosen = [layer for layer in layers if model.kind(layer) == kind]
            table.lines.tensors = tuple(f"model.layers.{layer}." for layer in chosen)
            table.lines.parameters = tuple(
                f"{chunk}:decoder.layers.{layer - layers.start}." for layer in chosen
            )
            if is_linear and model.linear is not None:
                linear_attention(table.lines, model, model.linear, layout.tp, table.at["tp"])
            elif model.latent is None:
                table.attention()
            else:
                table.latent_attention(model.latent)
            table.norms()
            if sparse:
                table.experts()
            else:
                table.mlp("mlp", "mlp", model.ffn)
    table.lines.tensors = ("",)
    table.lines.parameters = ("",)
    if table.at["pp"] == layout.pp - 1:
        last = f"{len(chunks) - 1}:"
        norm = f"{last}decoder.final_layernorm.weight"
        table.lines.whole("model.norm.weight", (model.hidden,), norm)
        # A tied head is the embedding itself on one stage, and a copy of it, kept equal by
        # Megatron, on the last of several.
        head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        if not model.tied or layout.pp > 1:
            table.vocabulary(head, f"{last}output_layer.weight")
    groups = table.lines.groups
    return in_fused_tensors(groups, model.rows) if model.fused else groups


class _RankTable:
    """The lines of one rank."""

    def __init__(self, model: ModelShape, layout: TrainLayout, rank: int) -> None:
        self.model = model
        self.layout = layout
        self.at = layout.coordinates(rank)
        self.lines = ShardTable(model.dtype)

    def vocabulary(self, tensor: str, key: str) -> None:
        model = self.model
        multiple = self.layout.vocab_multiple * self.layout.tp
        part = -(-model.vocab // multiple) * self.layout.vocab_multiple
        first = self.at["tp"] * part
        count = min(part, model.vocab - first)
        self.lines.rows(tensor, (model.vocab, model.hidden), first, count, key)

    def attention(self) -> None:
        model = self.model
        self._query_key_value()
        width = model.heads * model.head_dim
        part = width // self.layout.tp
        self.lines.columns(
            "self_attn.o_proj.weight",
            (model.hidden, width),
            self.at["tp"] * part,
            part,
            "self_attention.linear_proj.weight",
        )
        if model.biased:
            key = "self_attention.linear_proj.bias"
            self.lines.whole("self_attn.o_proj.bias", (model.hidden,), key)
            key = "self_attention.core_attention.softmax_offset"
            part = model.heads // self.layout.tp
            self.lines.rows("self_attn.sinks", (model.heads,), self.at["tp"] * part, part, key)
        if model.heads_norm:
            heads_norms(self.lines, model, self.layout.tp, self.at["tp"])
        for letter in "qk" if model.qk_norm else "":
            key = f"self_attention.{letter}_layernorm.weight"
            self.lines.whole(f"self_attn.{letter}_norm.weight", (model.head_dim,), key)

    def latent_attention(self, latent: LatentAttention) -> None:
        """Heads are cut over tp; what all heads share is whole on every rank."""
        model, tp, here = self.model, self.layout.tp, self.at["tp"]

        def whole(name: str, full: tuple[int, ...], key: str) -> None:
            self.lines.whole(f"self_attn.{name}.weight", full, f"self_attention.{key}.weight")

        def heads(name: str, dim: int, inputs: int, key: str) -> None:
            rows = model.heads * dim
            name, key = f"self_attn.{name}.weight", f"self_attention.{key}.weight"
            self.lines.rows(name, (rows, inputs), here * rows // tp, rows // tp, key)

        if latent.query_rank is None:
            heads("q_proj", model.head_dim, model.hidden, "linear_q_proj")
        else:
            whole("q_a_proj", (latent.query_rank, model.hidden), "linear_q_down_proj")
            whole("q_a_layernorm", (latent.query_rank,), "q_layernorm")
            heads("q_b_proj", model.head_dim, latent.query_rank, "linear_q_up_proj")
        down = (latent.rank + latent.rotary_dim, model.hidden)
        whole("kv_a_proj_with_mqa", down, "linear_kv_down_proj")
        whole("kv_a_layernorm", (latent.rank,), "kv_layernorm")
        up = latent.plain_dim + latent.value_dim
        heads("kv_b_proj", up, latent.rank, "linear_kv_up_proj")
        width = model.heads * latent.value_dim
        key = "self_attention.linear_proj.weight"
        full, part = (model.hidden, width), width // tp
        self.lines.columns("self_attn.o_proj.weight", full, here * part, part, key)

    def norms(self) -> None:
        model = self.model
        places = [("input", "input_layernorm")] if model.input_norms else []
        if model.input_norms:
            place = "pre_feedforward" if model.output_norms else "post_attention"
            places.append((place, "pre_mlp_layernorm"))
        if model.output_norms:
            places += [
                ("post_attention", "self_attn_bda.norm"),
                ("post_feedforward", "mlp_bda.norm"),
            ]
        for norm, key in places:
            self.lines.whole(f"{norm}_layernorm.weight", (model.hidden,), f"{key}.weight")

    def _query_key_value(self) -> None:
        model = self.model
        tp = self.layout.tp
        if model.linear is not None:
            gated_query_key_value(self.lines, model, tp, self.at["tp"])
            return
        per_group = divide("heads", model.heads, "kv_heads", model.kv_heads) * model.head_dim
        total = model.kv_heads * (per_group + 2 * model.head_dim)
        part = divide("rows of the fused query-key-value matrix", total, "train tp", tp)
        first = self.at["tp"] * part
        key = "self_attention.linear_qkv"
        row = 0
        for group in range(model.kv_heads):
            for letter, size in (("q", per_group), ("k", model.head_dim), ("v", model.head_dim)):
                low = max(row, first)
                count = min(row + size, first + part) - low
                start = group * size + low - row
                name = f"self_attn.{letter}_proj"
                rows = size * model.kv_heads
                at = low - first
                self.lines.rows(
                    f"{name}.weight", (rows, model.hidden), start, count, f"{key}.weight", at
                )
                if model.qkv_bias:
                    self.lines.rows(f"{name}.bias", (rows,), start, count, f"{key}.bias", at)
                row += size

    def mlp(self, tensor: str, key: str, ffn: int) -> None:
        self._projections(tensor, key, ffn, EXPERT_NAMES["qwen"], ("tp", self.layout.tp))

    def _projections(
        self,
        tensor: str,
        key: str,
        ffn: int,
        names: tuple[str, str, str],
        axis: tuple[str, int],
    ) -> None:
        hidden = self.model.hidden
        gate, up, down = names
        part = divide(f"feed-forward width of {tensor}", ffn, "train tp", axis[1])
        first = self.at[axis[0]] * part
        fc1 = f"{key}.linear_fc1.weight"
        self.lines.rows(f"{tensor}.{gate}.weight", (ffn, hidden), first, part, fc1)
        self.lines.rows(f"{tensor}.{up}.weight", (ffn, hidden), first, part, fc1, part)
        fc2 = f"{key}.linear_fc2.weight"
        self.lines.columns(f"{tensor}.{down}.weight", (hidden, ffn), first, part, fc2)

    def biased_experts(self) -> None:
        model, hidden = self.model, self.model.hidden
        for name, full in (("weight", (model.experts, hidden)), ("bias", (model.experts,))):
            self.lines.whole(f"mlp.router.{name}", full, f"mlp.router.{name}")
        count = divide("experts", model.experts, "train ep", self.layout.ep)
        for i in range(count):
            expert = self.at["ep"] * count + i
            for name, full, layer in (
                ("gate_up", (hidden, 2 * model.moe_ffn), "linear_fc1"),
                ("down", (model.moe_ffn, hidden), "linear_fc2"),
            ):
                key = f"mlp.experts.local_experts.{i}.{layer}"
                name = f"mlp.experts.{name}_proj"
                self.lines.turned(f"{name}[{expert}]", full, Slice((0, 0), full), f"{key}.weight")
                row = Slice((expert, 0), (1, full[1]))
                self.lines.expert_vectors(
                    f"{name}_bias", full[1], row, f"{key}.bias", model.experts
                )

    def experts(self) -> None:
        model = self.model
        if model.biased:
            self.biased_experts()
            return
        block = EXPERT_BLOCK[model.expert_names]
        names = EXPERT_NAMES[model.expert_names]
        gate = f"{block}.gate.weight"
        self.lines.whole(gate, (model.experts, model.hidden), "mlp.router.weight")
        count = divide("experts", model.experts, "train ep", self.layout.ep)
        for i in range(count):
            tensor = f"{block}.experts.{self.at['ep'] * count + i}"
            key = f"mlp.experts.local_experts.{i}"
            self._projections(tensor, key, model.moe_ffn, names, ("etp", self.layout.etp))
        if model.router_bias:
            exact = replace(self.lines, dtype="float32")
            exact.whole(ROUTER_BIAS, (model.experts,), "mlp.router.expert_bias")
            self.mlp("mlp.shared_experts", "mlp.shared_experts", model.shared_ffn)
        elif model.shared_ffn:
            self.mlp("mlp.shared_expert", "mlp.shared_experts", model.shared_ffn)
            gate = "mlp.shared_expert_gate.weight"
            self.lines.whole(gate, (1, model.hidden), "mlp.shared_experts.gate_weight")
