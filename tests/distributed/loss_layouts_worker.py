"""Every method on the ranks of this launch, data parallel and with context parallelism of two, against one process.

Each rank starts from the responses of its own prompts, as after a rollout. Prints one OK line per method and layout.
"""

import dataclasses

import torch
import torch.distributed as dist

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import MismatchConfig
from megatron_rl.loss import Credit, Method, ResponseBatch, TokenBatch, load_method
from tests.unit.loss.batches import LIMIT, response_batch, rollout, token_batch
from tests.unit.loss.reference import Row


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


def gathered(rows: list[Row]) -> ResponseBatch:
    """This rank's prompts, then all ranks' in canonical order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    prompts = sorted({row.group for row in rows})
    share = -(-len(prompts) // world)
    mine = response_batch([row for row in rows if row.group in prompts[rank * share : (rank + 1) * share]])
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    dist.all_gather_object(parts, {field.name: getattr(mine, field.name) for field in dataclasses.fields(mine)})
    return ResponseBatch(**{key: None if value is None else torch.cat([part[key] for part in parts]) for key, value in parts[0].items()})


def part_of(batch: TokenBatch, at: torch.Tensor, num_rows: int) -> TokenBatch:
    """The tokens ``at``, with the denominators of the whole minibatch."""
    fields = {
        field.name: value.detach()[at] if value.shape == batch.logprobs.shape else value
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    fields["logprobs"].requires_grad_()
    lengths = torch.bincount(batch.response_ids, minlength=num_rows)
    return TokenBatch(**fields, response_loss_tokens=lengths, num_responses=num_rows, num_tokens=batch.logprobs.numel())


def layout(batch: TokenBatch, num_rows: int, context: int) -> list[torch.Tensor]:
    """Token positions of this rank's micro-batches: rows dealt to data-parallel ranks, tokens of a row to context ranks."""
    rank, data_ranks = dist.get_rank(), dist.get_world_size() // context
    data_rank, context_rank = divmod(rank, context)
    place = torch.arange(batch.response_ids.numel())
    result = []
    for micro in range(2):
        rows = torch.arange(num_rows)[data_rank + micro * data_ranks :: 2 * data_ranks]
        result.append(place[torch.isin(batch.response_ids, rows) & (place % context == context_rank)])
    return result


def compare(name: str, method: Method, credit: Credit, rows: list[Row], context: int, groups: list[dist.ProcessGroup]) -> None:
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
        result = method.loss(part, sequence_sum=sequence_sum)
        result.loss.backward()
        total += result.loss.detach()
        gradient[at] = part.logprobs.grad
        for key, value in result.metrics.items():
            metrics[key] = torch.maximum(metrics[key], value) if key.endswith("_max") else metrics[key] + value
    dist.all_reduce(total)
    dist.all_reduce(gradient)
    for key, value in metrics.items():
        dist.all_reduce(value, op=dist.ReduceOp.MAX if key.endswith("_max") else dist.ReduceOp.SUM)
    what = f"{name}, context {context}, rank {dist.get_rank()}"
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: loss {text}")
    torch.testing.assert_close(gradient, batch.logprobs.grad, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: gradient {text}")
    for key, value in metrics.items():
        torch.testing.assert_close(value, whole.metrics[key], rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{what}: {key} {text}")


def identity_is_wrong_under_context_parallelism(rows: list[Row]) -> None:
    """Without the sum over ranks GSPO's ratio is that of half a response: this comparison can fail."""
    method = load_method("gspo")
    batch = token_batch(rows, method.credit(response_batch(rows)))
    total = sum(method.loss(part_of(batch, at, len(rows))).loss.detach() for at in layout(batch, len(rows), 2))
    dist.all_reduce(total)
    assert abs(total.item() - method.loss(batch).loss.item()) > 1e-3


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, rows = dist.get_world_size(), rollout(5)
    groups = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    for name in sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml")):
        config = load_method(name).config.model_copy(update={"mismatch": MismatchConfig(kind="sequence_mask")})
        method = Method(config, response_limit=LIMIT)
        credit, alone = method.credit(gathered(rows)), method.credit(response_batch(rows))
        for field in ("advantages", "kl_weights", "keep"):
            assert torch.equal(getattr(credit, field), getattr(alone, field)), f"{name}: {field} differ from one rank's"
        for context in (1, 2) if world > 1 else (1,):
            compare(name, method, credit, rows, context, groups)
            if dist.get_rank() == 0:
                print(f"OK {name} data {world // context} context {context}", flush=True)
    if world > 1:
        identity_is_wrong_under_context_parallelism(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
