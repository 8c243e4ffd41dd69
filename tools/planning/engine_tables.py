"""Which slices of the HF-named tensors a vLLM worker wants, and where it keeps them: declared, from
sizes alone.

In a run the engine records this from its own loaders; the tables plan for machines one does not
have. No tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megatron_rl.config.rules.layout_rules import engine_stages
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models.base import Architecture, LatentAttention, LinearAttention
from megatron_rl.weight_sync.planner.shards import ShardGroup
from megatron_rl.weight_sync.planner.slices import Slice
from tools.planning.linear_tables import linear_attention
from tools.planning.shard_table import ShardTable, divide, in_fused_tensors

FAMILIES = ("deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "llama")
FAMILIES += ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next")
FAMILIES += ("olmo2", "olmo3", "phi3", "qwen3_5_text", "qwen3_5_moe_text")
# HF names of an expert's gate, up and down projections.
EXPERT_NAMES = {
    "qwen": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
}
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
EXPERT_BLOCK = {"qwen": "mlp", "mixtral": "block_sparse_moe"}


class NotDeclaredError(ValueError):
    """The tables do not describe this model."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Example: ``ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, vocab=100,
    tied=True)``.
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
    input_norms: bool = True  # before attention and feed-forward part
    output_norms: bool = False  # behind them
    heads_norm: bool = False  # of queries and keys, over all heads
    fused: bool = False  # files have query, key and value in one tensor, gate and up in one
    experts: int = 0  # 0 = dense
    moe_ffn: int = 0
    shared_ffn: int = 0  # 0 = no shared expert
    biased: bool = False  # biases, sinks and experts of GPT-OSS
    router_bias: bool = False  # as GLM-4.5: no gate before the shared expert then
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None  # attention and shared expert are gated then
    dense_layers: tuple[int, ...] = ()  # with an ordinary feed-forward, where others have experts
    expert_names: Literal["qwen", "mixtral"] = "qwen"
    dtype: str = "bfloat16"

    @staticmethod
    def of(arch: Architecture, dtype: str = "bfloat16") -> ModelShape:
        """The sizes of an architecture. Raises NotDeclaredError for a family that the tables do
        not describe."""
        if arch.family not in FAMILIES:
            raise NotDeclaredError(
                f"the model family {arch.family!r} has no declared layout; known:"
                f" {', '.join(FAMILIES)}"
            )
        mixtral = arch.expert_prefix.startswith(EXPERT_BLOCK["mixtral"])
        return ModelShape(
            layers=arch.num_layers,
            hidden=arch.hidden_size,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            ffn=arch.ffn_hidden_size,
            vocab=arch.vocab_size,
            tied=arch.tied_embeddings,
            qkv_bias=arch.qkv_bias,
            qk_norm=arch.qk_norm,
            input_norms=arch.input_norms,
            output_norms=arch.output_norms,
            heads_norm=arch.heads_norm,
            fused=any(slot.kind == "qkv" and len(slot.hf) == 1 for slot in arch.layer_slots),
            experts=arch.num_experts,
            moe_ffn=arch.expert_ffn_hidden_size,
            shared_ffn=arch.shared_ffn_hidden_size,
            biased=arch.biased,
            router_bias=arch.sigmoid_router,
            latent=arch.latent,
            linear=arch.linear,
            dense_layers=tuple(range(arch.num_dense_layers)),
            expert_names="mixtral" if mixtral else "qwen",
            dtype=dtype,
        )

    @property
    def rows(self) -> dict[str, int]:
        """Of the matrices that files of some families have in one tensor."""
        keys = self.kv_heads * self.head_dim
        of_heads = {"q_proj": self.heads * self.head_dim, "k_proj": keys, "v_proj": keys}
        return of_heads | {"gate_proj": self.ffn, "up_proj": self.ffn}

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Whether it has experts, and linear attention."""
        return self.sparse(layer), self.linear is not None and self.linear.layers[layer]


@dataclass(frozen=True)
class RolloutLayout:
    """vLLM's parallel sizes: ``dp`` replicas of ``pp`` stages of ``tp`` neighboring ranks. ``ep`` =
    1 cuts every expert over tp; else whole experts are dealt out over groups of ``ep`` neighboring
    ranks (a multiple of tp; with stages tp itself).

    Example: ``RolloutLayout(tp=2, dp=4, first_rank=8)`` are the ranks 8-15 of a disaggregated run.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    first_rank: int = 0
    vocab_multiple: int = 64

    @staticmethod
    def of(rollout: RolloutConfig, num_replicas: int) -> RolloutLayout:
        ep = rollout.tensor if rollout.expert_parallel else 1
        return RolloutLayout(rollout.tensor, num_replicas, ep, rollout.pipeline)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.tp * self.pp * self.dp)

    @property
    def replicas(self) -> list[range]:
        """The groups of ranks that hold one whole model between them."""
        size = max(self.tp * self.pp, self.ep)
        return [self.ranks[i : i + size] for i in range(0, len(self.ranks), size)]


def rollout_shards(model: ModelShape, layout: RolloutLayout, rank: int) -> list[ShardGroup]:
    """What a vLLM worker wants, and where it keeps it.

    ``qkv_proj`` is [q part; k part; v part], key-value heads replicated where tp exceeds their
    number; ``fused_qkv_a_proj`` of latent attention is whole on every rank; ``gate_up_proj`` is
    [gate part; up part]; ``w13_weight`` is (local experts, gate and up part, hidden). Padding rows
    of the vocabulary receive nothing.
    Raises ValueError when a size does not divide.
    """
    if layout.pp > 1 and layout.ep not in (1, layout.tp):
        raise ValueError(
            f"rollout layout: ep={layout.ep} must be 1 or tp={layout.tp} where there are"
            f" pp={layout.pp} stages"
        )
    if layout.pp > model.layers:
        raise ValueError(
            f"rollout layout: pp={layout.pp} stages for {model.layers} layers; choose at most that"
        )
    if layout.ep > 1 and (layout.ep % layout.tp or layout.tp * layout.dp % layout.ep):
        raise ValueError(
            f"rollout layout: ep={layout.ep} must be a multiple of tp={layout.tp} and divide"
            f" tp*dp={layout.tp * layout.dp}"
        )
    worker = _Worker(model, layout, rank - layout.first_rank)
    if worker.has_embedding:
        worker.vocabulary("model.embed_tokens.weight")
    if worker.has_head:
        if not model.tied:
            worker.vocabulary("lm_head.weight")
        worker.same_name("model.norm", (model.hidden,))
    for sparse, is_linear in product((False, True), repeat=2):
        kind = (sparse, is_linear)
        worker.layers([layer for layer in worker.stage if model.kind(layer) == kind])
        if is_linear and model.linear is not None:
            linear_attention(worker.table, model.linear, model.hidden, layout.tp, worker.tp_rank)
        elif model.latent is None:
            worker.attention()
        else:
            worker.latent_attention(model.latent)
        worker.norms()
        if sparse:
            worker.experts()
        else:
            worker.feed_forward("mlp", model.ffn)
    groups = worker.table.groups
    return in_fused_tensors(groups, model.rows) if model.fused else groups


class _Worker:
    """The table of one worker, layer kind after layer kind."""

    def __init__(self, model: ModelShape, layout: RolloutLayout, local_rank: int) -> None:
        self.model = model
        self.layout = layout
        self.local_rank = local_rank
        self.tp_rank = local_rank % layout.tp
        number = local_rank // layout.tp % layout.pp
        self.stage = engine_stages(model.layers, layout.pp)[number]
        # In vLLM every stage of a model with experts has the embedding, the last norm and the head;
        # of Qwen3.5 the embedding alone.
        is_last, has_four = number == layout.pp - 1, model.linear and not model.linear.fused
        self.has_head = is_last or (model.experts > 0 and not has_four)
        every = bool(model.experts or has_four)
        self.has_embedding = number == 0 or every or (is_last and model.tied)
        self.table = ShardTable(model.dtype)
        if model.biased:
            self.table.renamed = (("self_attn.", "attn."), (".embed_tokens", ".embedding"))

    def layers(self, numbers: Sequence[int]) -> None:
        """What follows is said of these layers."""
        prefixes = tuple(f"model.layers.{number}." for number in numbers)
        self.table.tensors = prefixes
        self.table.parameters = prefixes

    def same_name(self, module: str, full: tuple[int, ...]) -> None:
        """A whole weight that vLLM calls as HF does."""
        self.table.whole(f"{module}.weight", full, f"{module}.weight")

    def vocabulary(self, name: str) -> None:
        model = self.model
        multiple = self.layout.vocab_multiple
        padded = -(-model.vocab // multiple) * multiple
        # The last ranks may have padding alone: then ``count`` is not positive, and nothing is
        # wanted.
        rows = divide("padded vocabulary", padded, "rollout tp", self.layout.tp)
        first = self.tp_rank * rows
        count = min(rows, model.vocab - first)
        self.table.rows(name, (model.vocab, model.hidden), first, count, name)

    def attention(self) -> None:
        model = self.model
        heads = divide("heads", model.heads, "rollout tp", self.layout.tp)
        first_kv_head, kv_heads = self._kv_heads()
        row = 0  # of the fused parameter
        for letter, all_heads, first, count in (
            ("q", model.heads, self.tp_rank * heads, heads),
            ("k", model.kv_heads, first_kv_head, kv_heads),
            ("v", model.kv_heads, first_kv_head, kv_heads),
        ):
            dim = model.head_dim * (2 if letter == "q" and model.linear else 1)  # and its gate
            full, start, size = all_heads * dim, first * dim, count * dim
            name = f"self_attn.{letter}_proj"
            key = "self_attn.qkv_proj"
            matrix = (full, model.hidden)
            self.table.rows(f"{name}.weight", matrix, start, size, f"{key}.weight", row)
            if model.qkv_bias:
                self.table.rows(f"{name}.bias", (full,), start, size, f"{key}.bias", row)
            row += size
        self._output(heads, model.head_dim)
        if model.biased:
            name = "self_attn.sinks"
            self.table.rows(name, (model.heads,), self.tp_rank * heads, heads, name)
            self.table.whole("self_attn.o_proj.bias", (model.hidden,), "self_attn.o_proj.bias")
        for letter, count in (("q", model.heads), ("k", model.kv_heads)):
            if model.qk_norm or model.heads_norm:
                size = model.head_dim * (count if model.heads_norm else 1)
                self.same_name(f"self_attn.{letter}_norm", (size,))

    def latent_attention(self, latent: LatentAttention) -> None:
        model = self.model
        heads = divide("heads", model.heads, "rollout tp", self.layout.tp)
        queries, down_rows = "q_proj", latent.rank + latent.rotary_dim
        down, row, width = "kv_a_proj_with_mqa", 0, model.hidden
        if latent.query_rank is not None:
            queries, down, row, width = "q_b_proj", "fused_qkv_a_proj", *2 * (latent.query_rank,)
            name, key = "self_attn.q_a_proj.weight", f"self_attn.{down}.weight"
            self.table.rows(name, (row, model.hidden), 0, row, key)
            self.same_name("self_attn.q_a_layernorm", (row,))
        name, key = "self_attn.kv_a_proj_with_mqa.weight", f"self_attn.{down}.weight"
        self.table.rows(name, (down_rows, model.hidden), 0, down_rows, key, row)
        self.same_name("self_attn.kv_a_layernorm", (latent.rank,))
        up_dim = latent.plain_dim + latent.value_dim
        for name, dim, inputs in (
            (queries, model.head_dim, width),
            ("kv_b_proj", up_dim, latent.rank),
        ):
            name, full = f"self_attn.{name}.weight", (model.heads * dim, inputs)
            self.table.rows(name, full, self.tp_rank * heads * dim, heads * dim, name)
        self._output(heads, latent.value_dim)

    def _output(self, heads: int, value_dim: int) -> None:
        model, width = self.model, heads * value_dim
        name = "self_attn.o_proj.weight"
        full = (model.hidden, model.heads * value_dim)
        self.table.columns(name, full, self.tp_rank * width, width, name)

    def norms(self) -> None:
        model = self.model
        for place, is_there in (
            ("input", model.input_norms),
            ("post_attention", True),
            ("pre_feedforward", model.input_norms and model.output_norms),
            ("post_feedforward", model.output_norms),
        ):
            if is_there:
                self.same_name(f"{place}_layernorm", (model.hidden,))

    def _kv_heads(self) -> tuple[int, int]:
        """First key-value head of the worker, and how many it has."""
        tp = self.layout.tp
        kv_heads = self.model.kv_heads
        if tp >= kv_heads:  # several workers have the same head
            return self.tp_rank // divide("rollout tp", tp, "kv_heads", kv_heads), 1
        count = divide("kv_heads", kv_heads, "rollout tp", tp)
        return self.tp_rank * count, count

    def feed_forward(self, block: str, ffn: int) -> None:
        hidden = self.model.hidden
        size = divide(f"feed-forward width of {block}", ffn, "rollout tp", self.layout.tp)
        first = self.tp_rank * size
        fused = f"{block}.gate_up_proj.weight"
        self.table.rows(f"{block}.gate_proj.weight", (ffn, hidden), first, size, fused)
        self.table.rows(f"{block}.up_proj.weight", (ffn, hidden), first, size, fused, size)
        down = f"{block}.down_proj.weight"
        self.table.columns(down, (hidden, ffn), first, size, down)

    def biased_experts(self) -> None:
        """Those of a layer in one tensor each, which a plan takes apart; gate and up alternate."""
        model, hidden = self.model, self.model.hidden
        for name, full in (("weight", (model.experts, hidden)), ("bias", (model.experts,))):
            self.table.whole(f"mlp.router.{name}", full, f"mlp.router.{name}")
        first_expert, count, first, size = self._expert_part()
        wide = Slice((0, 2 * first), (hidden, 2 * size))
        tall = Slice((first, 0), (size, hidden))
        block = "mlp.experts.routed_experts"
        for i in range(count):
            up, down = (f"mlp.experts.{x}_proj[{first_expert + i}]" for x in ("gate_up", "down"))
            at = 2 * i * size * hidden
            full = (hidden, 2 * model.moe_ffn)
            self.table.turned(up, full, wide, f"{block}.w13_weight", at)
            self.table.turned(down, (model.moe_ffn, hidden), tall, f"{block}.w2_weight", at // 2)
        for name, width, start, length in (
            ("gate_up", 2 * model.moe_ffn, 2 * first, 2 * size),
            ("down", hidden, 0, hidden),
        ):
            key = f"{block}.w{'13' if name == 'gate_up' else '2'}_bias"
            # Of experts that are cut over ranks the first adds the bias.
            if name == "gate_up" or self.tp_rank == 0 or self.layout.ep > 1:
                part = Slice((first_expert, start), (count, length))
                self.table.expert_vectors(
                    f"mlp.experts.{name}_proj_bias", width, part, key, model.experts
                )

    def experts(self) -> None:
        model = self.model
        if model.biased:
            self.biased_experts()
            return
        block = EXPERT_BLOCK[model.expert_names]
        gate, up, down = EXPERT_NAMES[model.expert_names]
        self.same_name(f"{block}.gate", (model.experts, model.hidden))
        first_expert, count, first, size = self._expert_part()
        wide = (model.moe_ffn, model.hidden)
        tall = (model.hidden, model.moe_ffn)
        w13 = f"{block}.experts.routed_experts.w13_weight"
        w2 = f"{block}.experts.routed_experts.w2_weight"
        for i in range(count):
            expert = f"{block}.experts.{first_expert + i}"
            # w13 holds, expert after expert, its gate rows and then its up rows.
            gate_row = 2 * i * size
            self.table.rows(f"{expert}.{gate}.weight", wide, first, size, w13, gate_row)
            self.table.rows(f"{expert}.{up}.weight", wide, first, size, w13, gate_row + size)
            self.table.columns(f"{expert}.{down}.weight", tall, first, size, w2, i * model.hidden)
        if model.router_bias:
            exact = replace(self.table, dtype="float32")
            exact.whole(ROUTER_BIAS, (model.experts,), ROUTER_BIAS)
            self.feed_forward("mlp.shared_experts", model.shared_ffn)
        elif model.shared_ffn:
            self.feed_forward("mlp.shared_expert", model.shared_ffn)
            self.same_name("mlp.shared_expert_gate", (1, model.hidden))

    def _expert_part(self) -> tuple[int, int, int, int]:
        """``(first expert, experts, first row, rows)`` of the worker."""
        model = self.model
        layout = self.layout
        if layout.ep == 1:
            rows = divide("expert feed-forward width", model.moe_ffn, "rollout tp", layout.tp)
            return 0, model.experts, self.tp_rank * rows, rows
        # Whole experts, as even as possible: the first ranks take one more.
        each, more = divmod(model.experts, layout.ep)
        ep_rank = self.local_rank % layout.ep
        first_expert = ep_rank * each + min(ep_rank, more)
        return first_expert, each + (ep_rank < more), 0, model.moe_ffn
