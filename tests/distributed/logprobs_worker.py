"""Two ranks, each with half of a padded vocabulary, against one rank with all of it. Prints one OK line per case."""

import torch
import torch.distributed as dist

from megatron_rl.policy.logprobs import response_logprobs

T, H, PADDED = 13, 8, 24


def compare(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    difference = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
    assert got.shape == want.shape and difference <= tolerance, f"rank {dist.get_rank()} {name}: off by {difference}"


def case(name: str, dtype: torch.dtype, vocab_size: int, entropy: str, tolerance: float, scale: float = 2.0) -> None:
    g = torch.Generator().manual_seed(5)
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden = (scale * torch.randn(T, H, generator=g, dtype=torch.float64)).to(dtype)
    weight = torch.randn(PADDED, H, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab_size, (T,), generator=g)
    c = torch.randn(2, T, generator=g).to(torch.promote_types(dtype, torch.float32))
    settings = {"temperature": 0.8, "vocab_size": vocab_size, "entropy": entropy}
    results = []
    for w, world in ((weight, None), (weight.chunk(2)[rank].clone(), group)):
        h, w = hidden.clone().requires_grad_(), w.requires_grad_()
        logp, ent = response_logprobs(h, w, targets, chunk_tokens=5, group=world, **settings)
        loss = (c[0] * logp).sum() + ((c[1] * ent).sum() if entropy == "grad" else 0)
        grads = torch.autograd.grad(loss, [h, w])
        results.append((logp.detach(), torch.zeros(0) if ent is None else ent.detach(), grads[0], grads[1]))
    one, two = results
    for what, a, b in zip(("logprobs", "entropy", "hidden gradient"), two, one, strict=False):
        compare(f"{name} {what}", a, b, tolerance)
    compare(f"{name} weight gradient", two[3], one[3].chunk(2)[rank], tolerance)
    everyone = torch.empty(2, T, dtype=two[0].dtype)
    dist.all_gather(list(everyone.unbind(0)), two[0])
    assert torch.equal(everyone[0], everyone[1]), f"{name}: ranks disagree"
    if rank == 0:
        print(f"OK {name}", flush=True)


def no_tokens() -> None:
    weight = torch.ones(4, H, requires_grad=True)
    hidden = torch.empty(0, H, requires_grad=True)
    targets = torch.empty(0, dtype=torch.long)
    logp, _ = response_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=8, chunk_tokens=5, group=dist.group.WORLD)
    logp.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4, H)) and hidden.grad.shape == (0, H)
    dist.barrier()  # still in step
    if dist.get_rank() == 0:
        print("OK no tokens", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    case("float64", torch.float64, 19, "none", 1e-12)
    case("float64 entropy gradient", torch.float64, 19, "grad", 1e-12)
    case("float32 entropy value", torch.float32, 24, "value", 1e-5)
    case("second rank all padding", torch.float64, 11, "grad", 1e-12)
    case("maxima far apart", torch.float32, 24, "grad", 1e-2, scale=100.0)  # exp() of their distance overflows float32
    case("bfloat16", torch.bfloat16, 19, "grad", 0.1)  # gradients are rounded to bfloat16 before the sum over ranks or after
    no_tokens()
    dist.destroy_process_group()
