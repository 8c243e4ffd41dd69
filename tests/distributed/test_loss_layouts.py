"""The loss, its gradient and its metrics are the same on one, two and four ranks, and when
responses are cut over two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch
from megatron_rl.loss.config import MismatchConfig
from tests.ranks import call, on_ranks
from tests.unit.loss.batches import LIMIT, response_batch, rollout, token_batch
from tests.unit.loss.reference import Row

METHOD_NAMES = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_method_on_ranks_equals_one_process(ranks: int):
    assert METHOD_NAMES
    call(ranks, every_method_equals_one_process)


def every_method_equals_one_process() -> None:
    """Data parallel, and with context parallelism of two. Each rank starts from the responses of
    its own prompts, as after a rollout."""
    world, rows = dist.get_world_size(), rollout(5)
    groups = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    for name in METHOD_NAMES:
        mismatch = MismatchConfig(kind="sequence_mask")
        config = load_method(name).config.model_copy(update={"mismatch": mismatch})
        method = Method(config, response_limit=LIMIT)
        credit, alone = method.credit(gathered(rows)), method.credit(response_batch(rows))
        for field in ("advantages", "kl_weights", "keep"):
            same = torch.equal(getattr(credit, field), getattr(alone, field))
            assert same, f"{name}: {field} differ from one rank's"
        for context in (1, 2):
            compare(name, method, credit, rows, context, groups)


class SumOverRanks(torch.autograd.Function):
    """The differentiable all-reduce a trainer passes as sequence_sum: sums in both directions."""

    @staticmethod
    def forward(ctx, values, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def columns_of(group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sequence_gather of a trainer: what the ranks of ``group`` hold, filled up with NaN."""

    def gather(columns: torch.Tensor) -> torch.Tensor:
        if group is None:
            return columns
        parts = [torch.zeros(0)] * dist.get_world_size(group)
        dist.all_gather_object(parts, columns, group=group)
        filled = torch.full((columns.shape[0], 3), torch.nan, dtype=columns.dtype)
        return torch.cat([*parts, filled], dim=1)

    return gather


ROWS = ("rewards", "correct", "group_ids", "response_tokens")


def gathered(rows: list[Row]) -> ResponseBatch:
    """This rank's prompts, then all ranks' in canonical order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    prompts = sorted({row.group for row in rows})
    share = -(-len(prompts) // world)
    mine = response_batch(
        [row for row in rows if row.group in prompts[rank * share : (rank + 1) * share]]
    )
    tensors = {name: value for name, value in vars(mine).items() if name in ROWS}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    dist.all_gather_object(parts, {**tensors, **mine.columns})
    whole = {
        key: torch.cat([part[key] for part in parts]) if value.ndim else value
        for key, value in parts[0].items()
    }
    columns = {name: whole[name] for name in mine.columns}
    return ResponseBatch(**{name: whole[name] for name in ROWS}, columns=columns)


def part_of(batch: TokenBatch, at: torch.Tensor, num_rows: int) -> TokenBatch:
    """The tokens ``at``, with the denominators of the whole minibatch."""
    fields = {
        field.name: value.detach()[at] if value.shape[:1] == batch.logprobs.shape else value
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    fields["logprobs"].requires_grad_()
    lengths = torch.bincount(batch.response_index, minlength=num_rows)
    # What follows a response is known where its last token is.
    ends_here = torch.isin(lengths.cumsum(0) - 1, at)
    ends = {name: batch.columns[name][ends_here] for name in ("end_index", "end_logprobs")}
    return TokenBatch(
        **fields,
        token_columns={name: each.detach()[at] for name, each in batch.token_columns.items()},
        columns={**batch.columns, **ends},
        response_loss_tokens=lengths,
        num_responses=num_rows,
        num_tokens=batch.logprobs.numel(),
    )


def layout(batch: TokenBatch, num_rows: int, context: int) -> list[torch.Tensor]:
    """Token positions of this rank's micro-batches: rows dealt to data-parallel ranks, tokens of a
    row to context ranks."""
    rank, data_ranks = dist.get_rank(), dist.get_world_size() // context
    data_rank, context_rank = divmod(rank, context)
    place = torch.arange(batch.response_index.numel())
    result = []
    for micro in range(2):
        rows = torch.arange(num_rows)[data_rank + micro * data_ranks :: 2 * data_ranks]
        result.append(
            place[torch.isin(batch.response_index, rows) & (place % context == context_rank)]
        )
    return result


def compare(
    name: str,
    method: Method,
    credit: Credit,
    rows: list[Row],
    context: int,
    groups: list[dist.ProcessGroup],
) -> None:
    batch = token_batch(rows, credit)
    whole = method.loss(batch)
    whole.loss.backward()
    group = groups[dist.get_rank() // context] if context > 1 else None

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return values if group is None else SumOverRanks.apply(values, group)

    total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(batch.logprobs)
    metrics = {key: torch.zeros((), dtype=torch.float64) for key in whole.metrics}
    for at in layout(batch, len(rows), context):
        part = part_of(batch, at, len(rows))
        result = method.loss(part, sequence_sum, columns_of(group))
        result.loss.backward()
        total += result.loss.detach()
        gradient[at] = part.logprobs.grad
        for key, value in result.metrics.items():
            metrics[key] = (
                torch.maximum(metrics[key], value) if key.endswith("_max") else metrics[key] + value
            )
    dist.all_reduce(total)
    dist.all_reduce(gradient)
    for key, value in metrics.items():
        dist.all_reduce(value, op=dist.ReduceOp.MAX if key.endswith("_max") else dist.ReduceOp.SUM)
    what = f"{name}, context {context}, rank {dist.get_rank()}"
    torch.testing.assert_close(
        total, whole.loss.detach(), rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: loss {text}"
    )
    torch.testing.assert_close(
        gradient,
        batch.logprobs.grad,
        rtol=1e-10,
        atol=1e-12,
        msg=lambda text: f"{what}: gradient {text}",
    )
    for key, value in metrics.items():
        torch.testing.assert_close(
            value,
            whole.metrics[key],
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, key=key: f"{what}: {key} {text}",
        )


@on_ranks(2)
@pytest.mark.parametrize(("name", "least"), [("gspo", 1e-3), ("archer", 1e-6), ("rl_zvp", 1e-6)])
def test_statistics_of_half_a_response_are_others(name: str, least: float):
    """Without the tokens of the other context rank GSPO's sum, quantile and maximum differ: the
    comparison can fail."""
    rows, method = rollout(5), load_method(name)
    batch = token_batch(rows, method.credit(response_batch(rows)))
    total = sum(
        method.loss(part_of(batch, at, len(rows))).loss.detach()
        for at in layout(batch, len(rows), 2)
    )
    dist.all_reduce(total)
    assert abs(total.item() - method.loss(batch).loss.item()) > least
