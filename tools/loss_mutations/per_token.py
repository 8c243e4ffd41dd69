"""Bugs in KL, policy losses, aggregation, corrections and the composition of the loss."""

from __future__ import annotations

# (module, formula) -> (text that occurs once in the module, what takes its place)
BUGS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("kl", "k1"): [
        ("return logprobs - ref_logprobs", "return ref_logprobs - logprobs"),
        ("return logprobs - ref_logprobs", "return (logprobs - ref_logprobs).detach()"),
        ("return logprobs - ref_logprobs", "return (logprobs - ref_logprobs).abs()"),
    ],
    ("kl", "k2"): [
        ("(ref_logprobs - logprobs).square() / 2", "(ref_logprobs - logprobs).square()"),
        ("(ref_logprobs - logprobs).square() / 2", "(ref_logprobs - logprobs).abs() / 2"),
        (
            "(ref_logprobs - logprobs).square() / 2",
            "(ref_logprobs.exp() - logprobs.exp()).square() / 2",
        ),
    ],
    ("kl", "k3"): [
        ("difference = ref_logprobs - logprobs", "difference = logprobs - ref_logprobs"),
        ("torch.expm1(difference) - difference", "torch.expm1(difference) + difference"),
        ("torch.expm1(difference) - difference", "difference.exp() - difference"),
        ("torch.expm1(difference) - difference", "difference.exp() - 1 - difference"),
        (
            "torch.expm1(difference) - difference",
            "(torch.expm1(difference) - difference).clamp(-10, 10)",
        ),
    ],
    ("kl", "dads"): [
        ("-torch.expm1(math.e * (incorrect_share - 1))", "-torch.expm1(incorrect_share - 1)"),
        (
            "-torch.expm1(math.e * (incorrect_share - 1))",
            "torch.exp(math.e * (incorrect_share - 1))",
        ),
        ("-torch.expm1(math.e * (incorrect_share - 1))", "-torch.expm1(-math.e * incorrect_share)"),
        ("return 1 - incorrect_share\n", "return incorrect_share\n"),
        ("1 - incorrect_share**3", "(1 - incorrect_share) ** 3"),
        ("correct & (share != 0)", "~correct & (share != 0)"),
        ("correct & (share != 0)", "correct"),
        ("groups.broadcast(1 - accuracy)", "groups.broadcast(accuracy)"),
    ],
    ("policy_losses", "ppo_clip"): [
        ("torch.maximum(-ratio * advantages", "torch.minimum(-ratio * advantages"),
        ("ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)"),
        ("ratio.clamp(1 - low, 1 + high)", "ratio.clamp(max=1 + high)"),
        ("ratio = log_ratio.exp()", "ratio = (-log_ratio).exp()"),
        ("torch.minimum(loss, -dual_c * advantages)", "torch.maximum(loss, -dual_c * advantages)"),
        ("torch.where(advantages < 0, torch.minimum", "torch.where(advantages > 0, torch.minimum"),
    ],
    ("policy_losses", "sequence_log_ratio"): [
        ("torch.where(loss_mask, log_ratio,", "torch.where(~loss_mask, log_ratio,"),
        ("sequence_sum(sums) / response_loss_tokens", "sums / response_loss_tokens"),
        ("(sequence_sum(sums) / response_loss_tokens.clamp(min=1))", "sequence_sum(sums)"),
        (
            "kept = torch.where(loss_mask, log_ratio,",
            "kept = torch.where(loss_mask, log_ratio.detach(),",
        ),
    ],
    ("policy_losses", "cispo"): [
        ("log_ratio.detach().exp()", "log_ratio.exp()"),
        (".exp().clamp(1 - low, 1 + high)", ".exp().clamp(1 - low, high)"),
        ("return -weight * advantages * logprobs", "return weight * advantages * logprobs"),
        ("return -weight * advantages * logprobs", "return -weight * advantages"),
    ],
    ("policy_losses", "reinforce"): [
        ("return -advantages * logprobs", "return advantages * logprobs"),
        ("return -advantages * logprobs", "return -advantages * logprobs.exp()"),
        ("return -advantages * logprobs", "return -logprobs"),
    ],
    ("policy_losses", "ratio"): [
        ("return -log_ratio.exp() * advantages", "return log_ratio.exp() * advantages"),
        ("return -log_ratio.exp() * advantages", "return -log_ratio * advantages"),
        ("return -log_ratio.exp() * advantages", "return -log_ratio.detach().exp() * advantages"),
    ],
    ("aggregate", "weights"): [
        ("1 / max(num_tokens, 1)", "1 / max(response_index.numel(), 1)"),
        ("per_response[response_index] / max(num_responses, 1)", "per_response[response_index]"),
        (
            "per_response[response_index] / max(num_responses, 1)",
            "per_response[response_index] / per_response.numel()",
        ),
        (
            "1 / response_loss_tokens.clamp(min=1)",
            "1 / torch.bincount(response_index).clamp(min=1)",
        ),
        ("_constant(1 / max(num_responses, 1)", "_constant(1.0"),
        ("/ divisor", "/ response_index.numel()"),
    ],
    ("aggregate", "weighted_sum"): [
        (".masked_fill(~loss_mask, 0)", ".masked_fill(loss_mask, 0)"),
        (
            "(values * weights).masked_fill(~loss_mask, 0).sum()",
            "(loss_mask * values * weights).sum()",
        ),
        (".sum()", ".mean()"),
    ],
    ("mismatch", "tis"): [
        ("gap.detach().exp().clamp(max=cap)", "(-gap).detach().exp().clamp(max=cap)"),
        ("gap.detach().exp().clamp(max=cap)", "gap.detach().exp().clamp(1 / cap, cap)"),
        ("gap.detach().exp().clamp(max=cap)", "gap.exp().clamp(max=cap)"),
    ],
    ("mismatch", "icepop"): [
        (
            "torch.where((weight >= 1 / cap) & (weight <= cap), weight",
            "torch.where((weight >= 1 / cap) & (weight <= cap), torch.ones_like(weight)",
        ),
        ("(weight >= 1 / cap) & (weight <= cap)", "(weight <= cap)"),
        ("(weight >= 1 / cap) & (weight <= cap)", "(weight >= 1 / cap)"),
    ],
    ("mismatch", "sequence_mask"): [
        ("((mean >= 1 / cap) & (mean <= cap))", "((mean < 1 / cap) | (mean > cap))"),
        ("((mean >= 1 / cap) & (mean <= cap))", "(mean <= cap)"),
        (
            "gap.detach(), loss_mask, response_index",
            "gap.detach(), torch.ones_like(loss_mask), response_index",
        ),
    ],
    ("terms", "masking and denominators"): [
        (
            "advantages=batch.advantages.to(logprobs.dtype)[batch.response_index]",
            "advantages=batch.advantages.to(logprobs.dtype)[batch.response_index].abs()",
        ),
        ("lifted(batch.logprobs).masked_fill(~mask, 0)", "lifted(batch.logprobs) * mask"),
        ("old = lifted(self.batch.old_logprobs)", "old = lifted(self.batch.logprobs)"),
        ("return kept.sum() / max(self.num_tokens, 1)", "return kept.mean()"),
    ],
    ("token_loss", "composition"): [
        ("loss = policy_loss + kl_loss", "loss = policy_loss - kl_loss"),
        ("loss = loss - plan.entropy_coef", "loss = loss + plan.entropy_coef"),
        ("per_token = correction * per_token", "per_token = per_token"),
        ("_kl_coefficients(terms, plan) * divergence", "divergence"),
        (
            "per_response = plan.kl_coef[0] * per_response",
            "per_response = plan.kl_coef[0] * torch.ones_like(per_response)",
        ),
        ("where_correct(correct, *plan.kl_coef", "where_correct(~correct, *plan.kl_coef"),
        ("if plan.kl_aggregate != plan.aggregate:", "if False:"),
    ],
    ("token_loss", "metrics"): [
        ("ratio > 1 + plan.policy_knobs", "ratio < 1 + plan.policy_knobs"),
        (
            '{"positive": terms.advantages > 0, "negative": terms.advantages < 0}',
            '{"positive": terms.advantages < 0, "negative": terms.advantages > 0}',
        ),
    ],
}
