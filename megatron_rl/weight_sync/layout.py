"""Which slices of the HF-named tensors a rank holds or wants: the declared tables, from sizes alone.

Families: Llama, Qwen2, Qwen2.5, Qwen3, Qwen2-MoE, Qwen3-MoE, Mixtral. No tensor is allocated, so the tables also serve machines one
does not have. In a run the same boxes come from the live parameters; these tables are what they are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from megatron_rl.weight_sync.boxes import Boxes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Example: ``ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, vocab=100, tied=True)``.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0  # 0 = dense
    moe_ffn: int = 0
    shared_ffn: int = 0  # 0 = no shared expert
    dense_layers: tuple[int, ...] = ()  # layers of a model with experts that have an ordinary feed-forward
    expert_names: Literal["qwen", "mixtral"] = "qwen"
    dtype: str = "bfloat16"

    @staticmethod
    def from_hf(config: Mapping[str, Any], dtype: str = "bfloat16") -> ModelShape:
        """Sizes from a HF ``config.json``. Raises ValueError for a family or an option that the tables do not describe."""
        family = config["model_type"]
        if family not in FAMILIES:
            raise ValueError(f"config.json: model_type={family!r} has no declared layout; known: {', '.join(FAMILIES)}")
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ValueError(f"config.json: {key}=true is not described by the declared layouts; use recorded boxes")
        head_dim = config["head_dim"] if config.get("head_dim") else config["hidden_size"] // config["num_attention_heads"]
        layers, experts = config["num_hidden_layers"], 0
        moe: dict[str, Any] = {}
        if family == "mixtral":
            experts = config["num_local_experts"]
            moe = {"moe_ffn": config["intermediate_size"], "expert_names": "mixtral"}
        elif family.endswith("_moe"):
            experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]  # the name since transformers 5
            sparse_step, only = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
            dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % sparse_step)
            shared = config["shared_expert_intermediate_size"] if family == "qwen2_moe" else 0
            moe = {"moe_ffn": config["moe_intermediate_size"], "shared_ffn": shared, "dense_layers": dense}
        return ModelShape(
            layers,
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=family.startswith("qwen2"),
            qk_norm=family.startswith("qwen3"),
            experts=experts,
            dtype=dtype,
            **moe,
        )

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts > 0 and layer not in self.dense_layers


@dataclass(frozen=True)
class TrainLayout:
    """Megatron's parallel sizes. Ranks count in the order tp, cp, dp, pp for dense parameters and etp, ep, expert dp, pp for
    experts (Megatron's default ``tp-cp-ep-dp-pp``), fastest first.

    Example: ``TrainLayout(tp=2, pp=2).ranks == 4``; rank 3 is ``{"tp": 1, "cp": 0, "dp": 0, "pp": 1, "etp": 0, "ep": 0, "edp": 1}``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1  # model chunks per pipeline stage
    first_layers: int | None = None  # layers of the first and last pipeline stage; None = as the others
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
        """``chunks[stage][chunk]``: global numbers of the layers of each model chunk, as Megatron deals them out."""
        fixed = {stage: n for stage, n in ((0, self.first_layers), (self.pp - 1, self.last_layers)) if n is not None}
        middle, left = self.pp - len(fixed), layers - sum(fixed.values())
        if left < 0 or (left % middle if middle else left):
            raise ValueError(
                f"train layout: {layers} layers do not divide over pp={self.pp} with first_layers={self.first_layers}, "
                f"last_layers={self.last_layers}; set the two so that the stages between them are equal"
            )
        sizes = [fixed[stage] if stage in fixed else left // middle for stage in range(self.pp)]
        if any(size % self.vpp for size in sizes):
            raise ValueError(f"train layout: stages of {sizes} layers do not divide into vpp={self.vpp} chunks; choose another vpp")
        result: list[list[range]] = [[] for _ in sizes]
        layer = 0
        for _ in range(self.vpp):
            for stage, size in enumerate(sizes):
                result[stage].append(range(layer, layer + size // self.vpp))
                layer += size // self.vpp
        return result


@dataclass(frozen=True)
class RolloutLayout:
    """vLLM's parallel sizes: ``dp`` replicas of ``tp`` neighbouring ranks. ``ep`` = 1 cuts every expert over tp; else whole
    experts are dealt out over groups of ``ep`` neighbouring ranks (a multiple of tp).

    Example: ``RolloutLayout(tp=2, dp=4, first_rank=8)`` are the ranks 8-15 of a disaggregated run.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    first_rank: int = 0
    vocab_multiple: int = 64

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.tp * self.dp)

    @property
    def replicas(self) -> list[range]:
        """The groups of ranks that hold one whole model between them."""
        size = max(self.tp, self.ep)
        return [self.ranks[i : i + size] for i in range(0, len(self.ranks), size)]


@cache
def _names(prefixes: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(prefix + suffix for prefix in prefixes)


@dataclass
class Table:
    """Boxes of one process under construction; ``tensors`` and ``keys`` are the name prefixes of a run of equal layers."""

    dtype: str
    boxes: list[Boxes] = field(default_factory=list)
    tensors: tuple[str, ...] = ("",)
    keys: tuple[str, ...] = ("",)

    def rows(self, tensor: str, full: tuple[int, ...], first: int, count: int, key: str, at: int = 0) -> None:
        """Rows ``[first, first + count)`` of the tensor are rows ``at`` and on of a parameter of equal width."""
        if count <= 0 or not self.tensors:
            return
        start, shape, stride = ((first,), (count,), (1,)) if len(full) == 1 else ((first, 0), (count, full[1]), (full[1], 1))
        names, keys = _names(self.tensors, tensor), _names(self.keys, key)
        self.boxes.append(Boxes(names, full, self.dtype, start, shape, keys, at * stride[0], stride))

    def columns(self, tensor: str, full: tuple[int, int], first: int, count: int, key: str, at: int = 0) -> None:
        """Columns ``[first, first + count)`` of the tensor are a dense block from row ``at`` of a parameter ``count`` wide."""
        if not self.tensors:
            return
        names, keys = _names(self.tensors, tensor), _names(self.keys, key)
        self.boxes.append(Boxes(names, full, self.dtype, (0, first), (full[0], count), keys, at * count, (count, 1)))


def divide(what: str, size: int, by: str, parts: int) -> int:
    """``size / parts``. Raises ValueError naming both when it is not whole."""
    if size % parts:
        raise ValueError(f"{what}={size} does not divide by {by}={parts}; choose a {by} that divides it")
    return size // parts


def train_boxes(model: ModelShape, layout: TrainLayout, rank: int) -> list[Boxes]:
    """What a Megatron rank holds: parameters are named ``<chunk>:<name in the GPTModel>``.

    The fused query-key-value matrix has the rows [q of the group, k, v] for each query group in turn, cut evenly over tp (also
    where tp exceeds the number of groups); ``linear_fc1`` is [gate part; up part] of the rank; norms and routers are whole on every
    tp rank.
    Raises ValueError when a size does not divide.
    """
    at, table = layout.coordinates(rank), Table(model.dtype)
    divide("ranks of a pipeline stage", layout.tp * layout.cp * layout.dp, "etp*ep", layout.etp * layout.ep)
    divide("heads", model.heads, "train tp", layout.tp)
    chunks = layout.chunks(model.layers)[at["pp"]]
    last = at["pp"] == layout.pp - 1
    if at["pp"] == 0:
        _train_vocabulary(table, model, layout, at["tp"], "model.embed_tokens.weight", "0:embedding.word_embeddings.weight")
    for chunk, layers in enumerate(chunks):
        for sparse in (False, True):
            chosen = [layer for layer in layers if model.sparse(layer) == sparse]
            table.tensors = tuple(f"model.layers.{layer}." for layer in chosen)
            table.keys = tuple(f"{chunk}:decoder.layers.{layer - layers.start}." for layer in chosen)
            _train_attention(table, model, layout.tp, at["tp"])
            if sparse:
                _train_experts(table, model, layout, at)
            else:
                _train_mlp(table, model, "mlp", "mlp", model.ffn, layout.tp, at["tp"])
    table.tensors = table.keys = ("",)
    if last:
        final = f"{len(chunks) - 1}:"
        table.rows("model.norm.weight", (model.hidden,), 0, model.hidden, f"{final}decoder.final_layernorm.weight")
        # A tied head is the embedding itself on one stage, and a copy of it, kept equal by Megatron, on the last of several.
        head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        if not model.tied or layout.pp > 1:
            _train_vocabulary(table, model, layout, at["tp"], head, f"{final}output_layer.weight")
    return table.boxes


def _train_vocabulary(table: Table, model: ModelShape, layout: TrainLayout, tp_rank: int, tensor: str, key: str) -> None:
    multiple = layout.vocab_multiple * layout.tp
    part = -(-model.vocab // multiple) * layout.vocab_multiple
    first = tp_rank * part
    table.rows(tensor, (model.vocab, model.hidden), first, min(part, model.vocab - first), key)


def _train_attention(table: Table, model: ModelShape, tp: int, tp_rank: int) -> None:
    per_group = divide("heads", model.heads, "kv_heads", model.kv_heads) * model.head_dim
    total = model.kv_heads * (per_group + 2 * model.head_dim)
    part = divide("rows of the fused query-key-value matrix", total, "train tp", tp)
    kinds = (("q", per_group), ("k", model.head_dim), ("v", model.head_dim))
    row, first, last = 0, tp_rank * part, (tp_rank + 1) * part
    for group in range(model.kv_heads):
        for kind, size in kinds:
            low, high = max(row, first), min(row + size, last)
            source, count = group * size + low - row, high - low
            name, full = f"self_attn.{kind}_proj.", size * model.kv_heads
            table.rows(name + "weight", (full, model.hidden), source, count, "self_attention.linear_qkv.weight", low - first)
            if model.qkv_bias:
                table.rows(name + "bias", (full,), source, count, "self_attention.linear_qkv.bias", low - first)
            row += size
    width = model.heads * model.head_dim
    table.columns("self_attn.o_proj.weight", (model.hidden, width), tp_rank * width // tp, width // tp, "self_attention.linear_proj.weight")
    if model.qk_norm:
        table.rows("self_attn.q_norm.weight", (model.head_dim,), 0, model.head_dim, "self_attention.q_layernorm.weight")
        table.rows("self_attn.k_norm.weight", (model.head_dim,), 0, model.head_dim, "self_attention.k_layernorm.weight")
    table.rows("input_layernorm.weight", (model.hidden,), 0, model.hidden, "input_layernorm.weight")
    table.rows("post_attention_layernorm.weight", (model.hidden,), 0, model.hidden, "pre_mlp_layernorm.weight")


_QWEN_EXPERT = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERT = ("w1", "w3", "w2")


def _train_mlp(
    table: Table, model: ModelShape, tensor: str, key: str, ffn: int, tp: int, tp_rank: int, names: tuple[str, str, str] = _QWEN_EXPERT
) -> None:
    part = divide(f"feed-forward width of {tensor}", ffn, "train tp", tp)
    gate, up, down = names
    table.rows(f"{tensor}.{gate}.weight", (ffn, model.hidden), tp_rank * part, part, f"{key}.linear_fc1.weight")
    table.rows(f"{tensor}.{up}.weight", (ffn, model.hidden), tp_rank * part, part, f"{key}.linear_fc1.weight", part)
    table.columns(f"{tensor}.{down}.weight", (model.hidden, ffn), tp_rank * part, part, f"{key}.linear_fc2.weight")


def _train_experts(table: Table, model: ModelShape, layout: TrainLayout, at: Mapping[str, int]) -> None:
    mixtral = model.expert_names == "mixtral"
    block, names = ("block_sparse_moe", _MIXTRAL_EXPERT) if mixtral else ("mlp", _QWEN_EXPERT)
    table.rows(f"{block}.gate.weight", (model.experts, model.hidden), 0, model.experts, "mlp.router.weight")
    local = divide("experts", model.experts, "train ep", layout.ep)
    for i in range(local):
        tensor, key = f"{block}.experts.{at['ep'] * local + i}", f"mlp.experts.local_experts.{i}"
        _train_mlp(table, model, tensor, key, model.moe_ffn, layout.etp, at["etp"], names)
    if model.shared_ffn:
        _train_mlp(table, model, "mlp.shared_expert", "mlp.shared_experts", model.shared_ffn, layout.tp, at["tp"])
        table.rows("mlp.shared_expert_gate.weight", (1, model.hidden), 0, 1, "mlp.shared_experts.gate_weight")


def rollout_boxes(model: ModelShape, layout: RolloutLayout, rank: int) -> list[Boxes]:
    """What a vLLM worker wants, and where it keeps it.

    ``qkv_proj`` is [q part; k part; v part], key-value heads replicated where tp exceeds their number; ``gate_up_proj`` is
    [gate part; up part]; ``w13_weight`` is (local experts, gate and up part, hidden). Padding rows of the vocabulary receive nothing.
    Raises ValueError when a size does not divide.
    """
    local, table = rank - layout.first_rank, Table(model.dtype)
    tp_rank = local % layout.tp
    if layout.ep > 1 and (layout.ep % layout.tp or layout.tp * layout.dp % layout.ep):
        raise ValueError(f"rollout layout: ep={layout.ep} must be a multiple of tp={layout.tp} and divide tp*dp={layout.tp * layout.dp}")
    _rollout_vocabulary(table, model, layout, tp_rank, "model.embed_tokens.weight")
    if not model.tied:
        _rollout_vocabulary(table, model, layout, tp_rank, "lm_head.weight")
    table.rows("model.norm.weight", (model.hidden,), 0, model.hidden, "model.norm.weight")
    for sparse in (False, True):
        chosen = tuple(f"model.layers.{layer}." for layer in range(model.layers) if model.sparse(layer) == sparse)
        table.tensors = table.keys = chosen
        _rollout_attention(table, model, layout.tp, tp_rank)
        if sparse:
            _rollout_experts(table, model, layout, local)
        else:
            _rollout_mlp(table, model, "mlp", model.ffn, layout.tp, tp_rank)
    return table.boxes


def _rollout_vocabulary(table: Table, model: ModelShape, layout: RolloutLayout, tp_rank: int, tensor: str) -> None:
    padded = -(-model.vocab // layout.vocab_multiple) * layout.vocab_multiple
    part = divide("padded vocabulary", padded, "rollout tp", layout.tp)
    table.rows(tensor, (model.vocab, model.hidden), tp_rank * part, min(part, model.vocab - tp_rank * part), tensor)


def _rollout_attention(table: Table, model: ModelShape, tp: int, tp_rank: int) -> None:
    heads = divide("heads", model.heads, "rollout tp", tp)
    if tp >= model.kv_heads:
        kv_heads, first = 1, tp_rank // divide("rollout tp", tp, "kv_heads", model.kv_heads)
    else:
        kv_heads = divide("kv_heads", model.kv_heads, "rollout tp", tp)
        first = tp_rank * kv_heads
    row = 0
    for kind, total, head, count in (("q", model.heads, tp_rank * heads, heads), *((x, model.kv_heads, first, kv_heads) for x in "kv")):
        full, start, size = (n * model.head_dim for n in (total, head, count))
        table.rows(f"self_attn.{kind}_proj.weight", (full, model.hidden), start, size, "self_attn.qkv_proj.weight", row)
        if model.qkv_bias:
            table.rows(f"self_attn.{kind}_proj.bias", (full,), start, size, "self_attn.qkv_proj.bias", row)
        row += size
    width, part = model.heads * model.head_dim, heads * model.head_dim
    table.columns("self_attn.o_proj.weight", (model.hidden, width), tp_rank * part, part, "self_attn.o_proj.weight")
    whole = [("input_layernorm", model.hidden), ("post_attention_layernorm", model.hidden)]
    whole += [("self_attn.q_norm", model.head_dim), ("self_attn.k_norm", model.head_dim)] if model.qk_norm else []
    for name, size in whole:
        table.rows(f"{name}.weight", (size,), 0, size, f"{name}.weight")


def _rollout_mlp(table: Table, model: ModelShape, name: str, ffn: int, tp: int, tp_rank: int) -> None:
    part = divide(f"feed-forward width of {name}", ffn, "rollout tp", tp)
    for i, kind in enumerate(("gate", "up")):
        table.rows(f"{name}.{kind}_proj.weight", (ffn, model.hidden), tp_rank * part, part, f"{name}.gate_up_proj.weight", i * part)
    table.columns(f"{name}.down_proj.weight", (model.hidden, ffn), tp_rank * part, part, f"{name}.down_proj.weight")


def _rollout_experts(table: Table, model: ModelShape, layout: RolloutLayout, local_rank: int) -> None:
    mixtral = model.expert_names == "mixtral"
    block, names = ("block_sparse_moe", _MIXTRAL_EXPERT) if mixtral else ("mlp", _QWEN_EXPERT)
    table.rows(f"{block}.gate.weight", (model.experts, model.hidden), 0, model.experts, f"{block}.gate.weight")
    if layout.ep > 1:  # as even as possible, the first ranks take one more
        base, more = divmod(model.experts, layout.ep)
        ep_rank = local_rank % layout.ep
        start, count, part, shard = ep_rank * base + min(ep_rank, more), base + (ep_rank < more), model.moe_ffn, 0
    else:
        start, count, shard = 0, model.experts, local_rank % layout.tp
        part = divide("expert feed-forward width", model.moe_ffn, "rollout tp", layout.tp)
    wide, tall = (model.moe_ffn, model.hidden), (model.hidden, model.moe_ffn)
    key = f"{block}.experts.routed_experts"
    for i in range(count):
        prefix = f"{block}.experts.{start + i}"
        for j, name in enumerate(names[:2]):
            table.rows(f"{prefix}.{name}.weight", wide, shard * part, part, f"{key}.w13_weight", (2 * i + j) * part)
        table.columns(f"{prefix}.{names[2]}.weight", tall, shard * part, part, f"{key}.w2_weight", i * model.hidden)
    if model.shared_ffn:
        _rollout_mlp(table, model, "mlp.shared_expert", model.shared_ffn, layout.tp, local_rank % layout.tp)
        table.rows("mlp.shared_expert_gate.weight", (1, model.hidden), 0, 1, "mlp.shared_expert_gate.weight")
