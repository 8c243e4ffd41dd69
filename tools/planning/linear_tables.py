"""What a vLLM worker keeps of a gated delta net: see ``engine_tables``."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.base import LinearAttention
from tools.planning.shard_table import ShardTable, divide


def linear_attention(
    table: ShardTable, linear: LinearAttention, hidden: int, tp: int, here: int
) -> None:
    """Rows by key head where HF has them so, else by kind, as those of the filter."""
    divide("key heads of linear attention", linear.key_heads, "rollout tp", tp)
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    heads, kinds = linear.value_heads, (keys, keys, values)

    def cut(name: str, sizes: tuple[int, ...], *others: int, key: str = "", at: int = 0) -> None:
        """A part of each of ``sizes`` rows; ``at``: its first row in ``key``, times tp."""
        lines = replace(table, dtype="float32") if name == "A_log" else table
        full, first, key = (sum(sizes), *others), 0, f"linear_attn.{key or name}"
        for size in sizes:
            start, row = first + here * size // tp, (at + first) // tp
            lines.rows(f"linear_attn.{name}", full, start, size // tp, key, row)
            first += size

    qkvz, ba = "in_proj_qkvz.weight", "in_proj_ba.weight"
    if linear.fused:
        cut(qkvz, (2 * keys + 2 * values,), hidden)
        cut(ba, (2 * heads,), hidden)
    else:
        cut("in_proj_qkv.weight", kinds, hidden, key=qkvz)
        cut("in_proj_z.weight", (values,), hidden, key=qkvz, at=linear.filtered)
        cut("in_proj_b.weight", (heads,), hidden, key=ba)
        cut("in_proj_a.weight", (heads,), hidden, key=ba, at=heads)
    for name in ("dt_bias", "A_log"):
        cut(name, (heads,))
    cut("conv1d.weight", kinds, 1, linear.kernel)
    name = "linear_attn.norm.weight"
    table.whole(name, (linear.value_dim,), name)
    name, part = "linear_attn.out_proj.weight", values // tp
    table.columns(name, (hidden, values), here * part, part, name)
