"""Bugs in KL, added terms, aggregation, corrections and the composition of the loss."""

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
    ("self_reward", "self reward"): [
        ("reward = self.beta * (logprobs - start", "reward = self.beta * (logprobs + start"),
        ("reward = self.beta * (logprobs", "reward = (logprobs"),
        ("(reward - correct.to(logprobs.dtype)).square()", "(reward - 1).square()"),
        ("correct.to(logprobs.dtype)).square()", "correct.to(logprobs.dtype)).abs()"),
        ("> 0.5) == correct", "> 0.5) != correct"),
        ("> 0.5) == correct", "> 0) == correct"),
    ],
    ("self_reward", "class_weights"): [
        ("(2 * of_class)", "of_class"),
        (".masked_fill(was_cut, 0)", ""),
        ("num_correct = (correct & finished)", "num_correct = correct"),
        ("torch.where(correct, num_correct", "torch.where(~correct, num_correct"),
        ("off = self.class_weights(", "off = 1 + 0 * self.class_weights("),
        ("finished = ~was_cut & (terms", "finished = (terms"),
        ("clamp(min=1)).masked_fill", "clamp(min=1) * 0 + 1).masked_fill"),
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
    ("perception", "perception_kl"): [
        ("(masked_logprobs - logprobs).clamp", "(logprobs - masked_logprobs).clamp"),
        (".clamp(-self.max_log_ratio, self.max_log_ratio)", ""),
        ("clamp(-self.max_log_ratio, self.max_log_ratio)", "clamp(max=self.max_log_ratio)"),
        ("(torch.expm1(difference) - difference)", "(torch.expm1(difference) + difference)"),
        ("(torch.expm1(difference) - difference)", "(difference.exp() - 1 - difference)"),
        (".clamp(max=self.max_kl)", ""),
    ],
    ("perception", "perception_loss"): [
        ("return -self.gamma * kl", "return self.gamma * kl"),
        ("- self.eta * logprobs", "+ self.eta * logprobs"),
        ("- self.eta * logprobs", "- self.eta * logprobs.detach()"),
        ("- self.eta_masked * masked_logprobs", "- self.eta * masked_logprobs"),
        ("- self.eta_masked * masked_logprobs", "- self.eta_masked * logprobs"),
        ("(masked_logprobs - logprobs)", "(masked_logprobs - logprobs.detach())"),
        ("(masked_logprobs - logprobs)", "(masked_logprobs.detach() - logprobs)"),
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
        ("accuracy == 0, -alpha * missed", "accuracy == 0, alpha * missed"),
        ("accuracy == 0, -alpha * missed", "accuracy < 1, -alpha * missed"),
        ("accuracy == 1, alpha * entropy", "accuracy == 1, advantages + entropy"),
        ("accuracy == 1, alpha * entropy", "accuracy > 0, alpha * entropy"),
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
        ("loss = loss - config.entropy.coef", "loss = loss + config.entropy.coef"),
        ("per_token = correction * per_token", "per_token = per_token"),
        ("_kl_coefficients(terms, *config.kl.by_sign) * divergence", "divergence"),
        (
            "per_response = positive * per_response",
            "per_response = positive * torch.ones_like(per_response)",
        ),
        ("where_correct(terms.correct, positive", "where_correct(~terms.correct, positive"),
        ("if config.kl.aggregate not in (None, config.aggregate):", "if False:"),
    ],
    ("token_loss", "token shaping"): [
        ("advantages = shaped.detach()", "advantages = shaped"),
        ("TOKEN_SHAPERS.value(shaper, terms, advantages=advantages)", "terms.advantages"),
        (
            "TOKEN_SHAPERS.value(shaper, terms, advantages=advantages)",
            "TOKEN_SHAPERS.value(shaper, terms, advantages=terms.advantages)",
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
