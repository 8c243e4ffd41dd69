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
    ("response_losses", "entropy_clip"): [
        ("reasons = entropy > responses", "reasons = entropy >= responses"),
        ("masked_fill(reasons, 1 - reasoning_low)", "masked_fill(~reasons, 1 - reasoning_low)"),
        ("masked_fill(reasons, 1 + reasoning_high)", "masked_fill(reasons, 1 + high)"),
    ],
    ("response_losses", "clipped"): [
        ("-inside * advantages), lower, upper)", "-inside * advantages), upper, lower)"),
        ("torch.minimum(torch.maximum(ratio, lower), upper)", "torch.maximum(ratio, lower)"),
        ("return Clipped(torch.maximum(", "return Clipped(torch.minimum("),
    ],
    ("response_losses", "adaptive_clip"): [
        ("1 - 4 * low / old_probability", "1 - 4 * low * old_probability"),
        ("1 + 4 * high / old_probability", "1 + high / old_probability"),
        (".clamp(max=largest)", ""),
        ("(logprobs - log_ratio).detach().exp()", "logprobs.detach().exp()"),
    ],
    ("response_losses", "simko"): [
        ("gate = entropy > responses", "gate = entropy < responses"),
        ("topk_logprobs.detach()).exp().mean(1)", "topk_logprobs.detach()).exp().sum(1)"),
        ("spread * ratio.detach() * grown", "spread * ratio * grown"),
        ("correct[response_index] & gate, spread_out", "gate, spread_out"),
        ("gate & is_argmax & (advantages < 0)", "gate & (advantages < 0)"),
        ("gate & is_argmax & (advantages < 0)", "gate & is_argmax"),
    ],
    ("entropy_anchor", "find_peaks"): [
        ("(ordered < bound).sum()", "(ordered <= bound).sum()"),
        ("ordered[first - 1].item()) / 2", "lowest) / 2"),
        ("ordered[first:].mean()", "ordered.mean()"),
        ("len(ordered) - first, ordered", "len(ordered), ordered"),
        ("entropies.double().sort()", "entropies.sort()"),
        ("(place - below) *", "(1 - place + below) *"),
    ],
    ("entropy_anchor", "anchored"): [
        ("entropy.detach() >= threshold", "entropy.detach() > threshold"),
        ("is_peak = loss_mask & (", "is_peak = ("),
        ("gap = mean - anchor", "gap = anchor - mean"),
        ("gap.square() + 2 * gap * rise", "gap.square() + gap * rise"),
        ("gap.square() + 2 * gap * rise", "2 * gap * rise"),
        ("coef * share, is_peak", "share, is_peak"),
        ("(1 / num.clamp(min=1))", "(1 / is_peak.sum())"),
    ],
    ("given_responses", "dph"): [
        ("torch.expm1(log_u) - log_u", "torch.expm1(log_u) + log_u"),
        ("torch.expm1(log_u) - log_u", "torch.expm1(-log_u) + log_u"),
        ("(grown + 2) * torch.log1p(grown / 2)", "torch.log1p(grown / 2)"),
        ("(grown + 2) * torch.log1p(grown / 2)", "(grown + 2) * torch.log1p(grown)"),
        ("(alpha * (alpha - 1))", "(alpha * (1 - alpha))"),
        ("torch.expm1((1 - alpha) * log_u)", "torch.expm1(alpha * log_u)"),
        ("torch.where(given, logprobs - ref_logprobs,", "torch.where(given, log_ratio,"),
        ("held = eta * ", "held = "),
        ("torch.where(given, held, per_token)", "torch.where(given, held + per_token, per_token)"),
    ],
    ("given_responses", "rl_plus"): [
        ("old + (old + 1) / 2", "old + (probability + 1) / 2"),
        ("2 * probability / (old", "2 * old / (old"),
        ("1 - probability.detach()", "1 - probability"),
        (".clamp(min=0) ** gamma", " ** gamma"),
        ("** gamma  #", "** (2 * gamma)  #"),
        ("torch.where(given, learned, per_token)", "torch.where(given, learned, learned)"),
    ],
    ("given_responses", "bounds"): [
        ("lower.masked_fill(given, -torch.inf)", "lower.masked_fill(given, torch.inf)"),
        ("upper.masked_fill(given, torch.inf)", "upper.masked_fill(~given, torch.inf)"),
        ("lower.masked_fill(given, -torch.inf)", "lower"),
    ],
    ("response_losses", "pacs"): [
        ("groups.sum(estimate)) - estimate) / others", "groups.sum(estimate))) / others"),
        ("estimate = beta * log_ratio_sums * present", "estimate = beta * log_ratio_sums"),
        ("others = (size - 1).clamp(min=1)", "others = size"),
        ("num_correct, size - num_correct)", "size - num_correct, num_correct)"),
        ("both = (num_correct > 0) & (num_correct < size)", "both = num_correct > 0"),
        ("softplus(psi) - correct * psi", "softplus(-psi) - correct * psi"),
        ("groups.sum(slope)) - slope) / others", "groups.sum(slope))) / others"),
        ("beta * pull[response_index]", "beta * slope[response_index]"),
        ("value = loss / response_loss_tokens.clamp(min=1)", "value = loss"),
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
    ("aggregate", "token_mean_by_entropy"): [
        ("num_high = response_loss_tokens.sum() - num_low", "num_high = num_low"),
        ("reasoning * of_high, of_low)", "of_low, reasoning * of_high)"),
        ("reasoning * of_high, of_low)", "reasoning * of_low, of_low)"),
        ("reasons = entropy > responses", "reasons = entropy >= responses"),
        ("num_up_to_quantile(response_loss_tokens, quantile).sum()", "response_loss_tokens.sum()"),
    ],
    ("aggregate", "weighted_sum"): [
        (".masked_fill(~loss_mask, 0)", ".masked_fill(loss_mask, 0)"),
        (
            "(values * weights).masked_fill(~loss_mask, 0).sum()",
            "(loss_mask * values * weights).sum()",
        ),
        (".masked_fill(~loss_mask, 0).sum()", ".masked_fill(~loss_mask, 0).mean()"),
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
    ("token_advantages", "zero_variance"): [
        ("responses.maximum(entropy) - entropy", "entropy.max() - entropy"),
        ("responses.maximum(entropy) - entropy", "responses.maximum(entropy)"),
        ("group_accuracy == 0, -alpha * missed", "group_accuracy == 0, alpha * missed"),
        ("group_accuracy == 0, -alpha * missed", "group_accuracy < 1, -alpha * missed"),
        ("group_accuracy == 1, alpha * entropy", "group_accuracy == 1, advantages + entropy"),
        ("group_accuracy == 1, alpha * entropy", "group_accuracy > 0, alpha * entropy"),
    ],
    ("token_advantages", "entropy_bonus"): [
        ("advantages.abs() / kappa", "advantages / kappa"),
        ("advantages.abs() / kappa", "advantages.abs() * kappa"),
        ("torch.minimum(alpha * entropy", "torch.maximum(alpha * entropy"),
        ("return advantages + torch", "return advantages.sign() * torch"),
    ],
    ("whole_responses", "statistics"): [
        ("place.floor().long()", "place.ceil().long()"),
        ("* (high - low)", "* (low - high)"),
        ("by_value[index[by_value].argsort(stable=True)]", "by_value"),
        ("masked_fill(~self.loss_mask, torch.nan)", "masked_fill(self.loss_mask, torch.nan)"),
        ("share * (count - 1).clamp(min=0).double()", "share * count.double()"),
        ('none_yet.scatter_reduce(0, index, values, "amax")', "values.max().expand(9)"),
        (".floor().long() + 1, 0)", ".floor().long(), 0)"),
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
    ("token_loss", "token shaping"): [
        ("advantages = shaped.detach()", "advantages = shaped"),
        ("TOKEN_SHAPERS[name](terms, knobs, advantages)", "terms.advantages"),
        (
            "TOKEN_SHAPERS[name](terms, knobs, advantages)",
            "TOKEN_SHAPERS[name](terms, knobs, terms.advantages)",
        ),
    ],
    ("token_loss", "metrics"): [
        ("above = ratio > bounds[1]", "above = ratio < bounds[1]"),
        ("above = ratio > bounds[1]", "above = ratio > bounds[0]"),
        (
            '{"positive": terms.advantages > 0, "negative": terms.advantages < 0}',
            '{"positive": terms.advantages < 0, "negative": terms.advantages > 0}',
        ),
    ],
}
