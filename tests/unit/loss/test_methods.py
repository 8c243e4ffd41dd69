"""Every named method: against the plain reference, under splits, and the documentation in its
yaml."""

import dataclasses
import functools
import math
import subprocess
import sys

import pytest
import torch

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.loss import Method, TokenBatch
from megatron_rl.loss.config import MethodConfig, MismatchConfig
from tests.unit.loss import reference, token_reference
from tests.unit.loss.batches import LIMIT, per_response, response_batch, rollout, token_batch
from tests.unit.loss.groups import changed
from tests.unit.loss.named import NAMED, Choice

HEAD = ("paper", "formula", "depends on", "reduces to", "choices", "released code")
WHOSE = ("", "sampler_", "teacher_")
NAMES = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))


@functools.cache
def config(name: str) -> MethodConfig:
    return load_method(name).config


def named(name: str) -> Method:
    return Method(config(name), response_limit=LIMIT)


def test_the_reference_covers_every_method() -> None:
    assert set(NAMES) == set(NAMED)


@pytest.mark.parametrize("name", NAMES)
def test_credit_and_loss_equal_the_plain_reference(name: str) -> None:
    method = named(name)
    choice = NAMED[name]
    for seed in range(3):
        rows = rollout(seed)
        credit = method.credit(response_batch(rows))
        expected = torch.tensor(reference.advantages(rows, choice), dtype=torch.float64)
        torch.testing.assert_close(credit.advantages, expected, rtol=1e-9, atol=1e-9)
        weights = torch.tensor(
            [reference.kl_weight(row, rows, choice) for row in rows], dtype=torch.float64
        )
        torch.testing.assert_close(credit.kl_weights, weights, rtol=1e-9, atol=1e-9)
        kept = [reference.is_kept(row, rows, choice) for row in rows]
        assert credit.keep.tolist() == kept
        batch = token_batch(rows, credit, seed)
        found = method.loss(batch).loss.item()
        expected = reference.loss(rows, choice, plain_tokens(batch, rows), LIMIT)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-10)


def plain_tokens(batch: TokenBatch, rows: list[reference.Row]) -> reference.Tokens:
    """What the plain reference is given of a batch."""
    assert batch.ref_logprobs is not None and batch.sampler_logprobs is not None
    names = ("entropy", "is_argmax", "nucleus_entropy", "masked_logprobs")
    values = [batch.logprobs, batch.old_logprobs, batch.ref_logprobs]
    values += [batch.token_columns[name] for name in names]
    values.append(batch.sampler_logprobs)
    values += [batch.token_columns[f"{whose}likely_logprobs"] for whose in WHOSE]
    names = ("teacher_logprobs", "later_turns", "turn_advantages")
    values += [batch.token_columns[name] for name in names]
    return reference.Tokens(*[per_response(each, rows) for each in values])


def micro_batches(batch: TokenBatch, num_rows: int, seed: int) -> list[TokenBatch]:
    """The same tokens in three uneven micro-batches, with the denominators of the whole."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    lengths = torch.bincount(batch.response_index, minlength=num_rows)
    parts = []
    for rows in (order[:1], order[1:5], order[5:]):
        at = torch.isin(batch.response_index, rows)
        fields = {
            item.name: value.detach()[at] if value.shape[:1] == at.shape else value
            for item in dataclasses.fields(batch)
            if isinstance(value := getattr(batch, item.name), torch.Tensor)
        }
        fields["logprobs"].requires_grad_()
        ends = {name: batch.columns[name][rows] for name in ("end_index", "end_logprobs")}
        of_tokens = {name: values.detach()[at] for name, values in batch.token_columns.items()}
        parts.append(
            TokenBatch(
                **fields,
                token_columns=of_tokens,
                columns={**batch.columns, **ends},
                response_loss_tokens=lengths,
                num_responses=num_rows,
                num_tokens=at.numel(),
            )
        )
    return parts


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up(name: str) -> None:
    """Loss, gradient and metrics of any split are those of the whole."""
    method = Method(
        config(name).model_copy(update={"mismatch": MismatchConfig(kind="sequence_mask")}),
        response_limit=LIMIT,
    )
    rows = rollout(1)
    batch = token_batch(rows, method.credit(response_batch(rows)))
    whole = method.loss(batch)
    whole.loss.backward()
    total = 0.0
    metrics = dict.fromkeys(whole.metrics, 0.0)
    gradient = torch.zeros_like(batch.logprobs)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    for part, chosen in zip(
        micro_batches(batch, len(rows), 3), (order[:1], order[1:5], order[5:]), strict=True
    ):
        result = method.loss(part)
        result.loss.backward()
        total += result.loss.item()
        gradient[torch.isin(batch.response_index, chosen)] = part.logprobs.grad
        for key, value in result.metrics.items():
            metrics[key] = (
                max(metrics[key], value.item())
                if key.endswith("_max")
                else metrics[key] + value.item()
            )
    assert total == pytest.approx(whole.loss.item(), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient, batch.logprobs.grad, rtol=1e-10, atol=1e-12)
    assert metrics == pytest.approx(
        {key: value.item() for key, value in whole.metrics.items()}, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name: str) -> None:
    """float64 stays, float32 agrees with it to rounding, bfloat16 logprobs are lifted to
    float32."""
    method = named(name)
    rows = rollout(2)
    exact = method.credit(response_batch(rows))
    single = method.credit(response_batch(rows, torch.float32))
    assert exact.advantages.dtype == torch.float64 and single.advantages.dtype == torch.float32
    torch.testing.assert_close(single.advantages.double(), exact.advantages, rtol=2e-4, atol=2e-4)
    half = method.loss(token_batch(rows, single, dtype=torch.bfloat16))
    assert half.loss.dtype == torch.float32 and half.loss.isfinite()
    assert method.loss(token_batch(rows, exact)).loss.dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_yaml_head_says_what_the_method_is(name: str) -> None:
    head = [
        line[1:]
        for line in (conf_dir() / "method" / f"{name}.yaml").read_text().splitlines()
        if line.startswith("#")
    ]
    keys = [line.strip().split(":")[0] for line in head[1:] if not line.startswith("   ")]
    assert tuple(keys) == HEAD
    assert "arXiv" in next(line for line in head if line.strip().startswith("paper:"))
    assert config(name).name == name


def on_policy(batch: TokenBatch) -> tuple[TokenBatch, torch.Tensor]:
    """The same at ratio 1 and at the reference, all of it sampled, and its logprobs."""
    logprobs = batch.old_logprobs.clone().requires_grad_()
    same = changed(
        batch,
        logprobs=logprobs,
        ref_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.old_logprobs,
        log_ratio_sums=torch.zeros_like(batch.columns["log_ratio_sums"]),
        is_demonstration=torch.zeros_like(batch.columns["is_demonstration"]),
        chosen_places=torch.tensor([-1]),
    )
    return same, logprobs


@pytest.mark.parametrize("name", sorted({*NAMES} - {"pacs", "papo", "sft"}))
def test_on_policy_every_method_has_the_gradient_of_reinforce(name: str) -> None:
    """(But pacs and sft, which read no advantages, and papo, whose other terms remain there.) At
    ratio 1: d loss / d logprob = -weight A, A at the token (simko spreads a share over other
    tokens), plus the KL's weight coef (1 - exp(d)) which is 0 at the reference."""
    method = named(name)
    rows = rollout(0)
    credit = method.credit(response_batch(rows))
    batch, logprobs = on_policy(token_batch(rows, credit))
    choice, tokens = NAMED[name], plain_tokens(batch, rows)
    expected = [
        value * token_reference.own_gradient(choice.token, row.correct, entropies, place)
        for row, inside, entropies in zip(
            rows, reference.token_advantages(rows, choice, tokens), tokens.entropy, strict=True
        )
        for place, value in enumerate(inside)
    ]
    advantages = torch.tensor(expected, dtype=torch.float64)
    method.loss(batch).loss.backward()
    weights = {
        "seq_mean_token_mean": (
            1 / len(rows) / torch.bincount(batch.response_index).double()[batch.response_index]
        ),
        "token_mean": torch.full_like(logprobs, 1 / logprobs.numel()),
        "seq_mean_token_sum": torch.full_like(logprobs, 1 / len(rows)),
        "seq_mean_token_sum_norm": torch.full_like(logprobs, 1 / len(rows) / LIMIT),
    }[method.config.aggregate.name]
    torch.testing.assert_close(
        logprobs.grad, (-weights * advantages).detach(), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_floats_leave_the_gradient_finite(name: str) -> None:
    """In float32 the policy has moved by 100 nats, up and down, at sampled and at given tokens of
    either sign; reference and sampler are where the policy is."""
    method = named(name)
    rows = rollout(0)
    credit = method.credit(response_batch(rows, torch.float32))
    batch = token_batch(rows, credit, dtype=torch.float32)
    place = torch.arange(batch.logprobs.numel()) % 3
    logprobs = batch.old_logprobs - 100 * (place == 1)
    old_logprobs = batch.old_logprobs - 100 * (place == 0)
    near = {"ref_logprobs": logprobs, "sampler_logprobs": old_logprobs}
    batch = changed(batch, logprobs=logprobs.requires_grad_(), old_logprobs=old_logprobs, **near)
    loss = method.loss(batch).loss
    loss.backward()
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()


SMOOTH = ["rl_zvp", "entropy_advantage", "archer", "dcpo", "pacs", "dph_forward_kl", "dph_js"]
SMOOTH += ["papo", "sft", "exgrpo", "ar3po"]


@pytest.mark.parametrize("name", [*SMOOTH, "dph_alpha"])
def test_gradients_are_the_slopes_of_the_plain_reference(name: str) -> None:
    """Central differences of its loss at every ninth token. (What simko spreads has no slope: its
    value is the plain one; nor has what rl_plus holds fixed.)"""
    rows = rollout(2)
    method = named(name)
    batch = token_batch(rows, method.credit(response_batch(rows)), 2)
    method.loss(batch).loss.backward()
    assert batch.logprobs.grad is not None
    choice, tokens = NAMED[name], plain_tokens(batch, rows)
    step = 1e-6
    places = [(at, place) for at, row in enumerate(tokens.new) for place in range(len(row))]
    slopes = []
    for at, place in places[::9]:
        values = []
        for sign in (1, -1):
            new = [list(row) for row in tokens.new]
            new[at][place] += sign * step
            moved = dataclasses.replace(tokens, new=new)
            values.append(reference.loss(rows, choice, moved, LIMIT))
        slopes.append((values[0] - values[1]) / (2 * step))
    assert batch.logprobs.grad[::9].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)
    assert max(map(abs, slopes)) > 1e-3


def test_pacs_has_the_gradient_of_its_formula() -> None:
    """By autograd through the sums of whole responses; psi is a constant in the method itself."""
    rows = rollout(3)
    method = named("pacs")
    batch = token_batch(rows, method.credit(response_batch(rows)))
    method.loss(batch).loss.backward()
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    moved = torch.zeros(len(rows), dtype=torch.float64)
    moved = moved.index_add(0, batch.response_index, logprobs - batch.old_logprobs)
    losses = []
    for place, row in enumerate(rows):
        group = [at for at, other in enumerate(rows) if other.group == row.group]
        psi = moved[place] - moved[[at for at in group if at != place]].mean()
        alike = sum(rows[at].correct == row.correct for at in group)
        weight = len(group) / (2 * alike) if alike < len(group) else 1.0
        sign = 1 if row.correct else -1
        losses.append(-weight * torch.nn.functional.logsigmoid(sign * psi))
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(batch.logprobs.grad, logprobs.grad, rtol=1e-10, atol=1e-14)


def test_pacs_at_the_old_policy() -> None:
    """log 2 in every group, for the weights of a group of both classes have mean 1 as well; and
    the gradient of a response is w (1/2 - correct) less the mean of the others'."""
    rows = rollout(0)
    method = named("pacs")
    batch, logprobs = on_policy(token_batch(rows, method.credit(response_batch(rows))))
    result = method.loss(batch)
    assert result.loss.item() == pytest.approx(math.log(2), rel=1e-12)
    result.loss.backward()
    # Group 0: correct, wrong, wrong, correct: w = 1, slopes -1/2, 1/2, 1/2, -1/2.
    expected = [-0.5 - 0.5 / 3, 0.5 + 0.5 / 3, 0.5 + 0.5 / 3, -0.5 - 0.5 / 3]
    assert logprobs.grad is not None
    for place, value in enumerate(expected):
        found = logprobs.grad[batch.response_index == place] * len(rows)
        torch.testing.assert_close(found, torch.full_like(found, value))


def test_load_is_light_and_quick() -> None:
    """Neither megatron nor vllm comes in, and a method is there in under a second after torch."""
    script = (
        "import sys, time, torch; start = time.process_time(); from megatron_rl.config.method"
        " import load_method; load_method('a_grae');took = time.process_time() - start; loaded ="
        " {name.split('.')[0] for name in sys.modules};print(took, sorted(loaded & {'megatron',"
        " 'vllm', 'transformers'}))"
    )
    took, loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split(" ", 1)
    assert loaded.strip() == "[]"
    print(f"load_method: {float(took):.2f} s of processor time")


def test_compositions_without_code() -> None:
    """STCR on A-GRAE, focal on DAPO: the factors multiply."""
    rows = rollout(4)
    batch = response_batch(rows)
    base = load_method("a_grae")
    shaped = load_method("a_grae", ["shaping.stcr.mu=1.5"])
    longer = Choice(shaping=("ddas", "ass"))
    torch.testing.assert_close(
        base.credit(batch).advantages,
        torch.tensor(reference.advantages(rows, longer), dtype=torch.float64),
        rtol=1e-9,
        atol=1e-9,
    )
    ratio = shaped.credit(batch).advantages / base.credit(batch).advantages
    assert ratio[~ratio.isnan()].max() > 1.3 and ratio[~ratio.isnan()].min() == 1
    focal = load_method("dapo", ["shaping.focal={}"]).credit(batch).advantages
    torch.testing.assert_close(
        focal,
        torch.tensor(reference.advantages(rows, Choice(shaping=("focal",))), dtype=torch.float64),
    )


def test_shaping_order_is_yaml_order_and_null_leaves_out() -> None:
    method = load_method("a_grae", ["shaping.ddas=null", "shaping.stcr={}"])
    assert list(method.config.shaping) == ["ass", "stcr"]
