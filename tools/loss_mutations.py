"""The bugs that tools/mutate_loss.py plants: for each formula, plausible slips of sign, mask, divisor, reduction or constant."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    module: str
    formula: str
    old: str  # occurs once in the module
    new: str


# The test file that must notice a bug of the module.
TESTS = {
    "advantages": "test_advantages", "segments": "test_advantages", "shaping": "test_shaping", "kl": "test_kl",
    "policy_losses": "test_policy_losses", "aggregate": "test_aggregate", "mismatch": "test_mismatch", "filters": "test_filters",
    "credit": "test_credit", "token_loss": "test_token_loss",
}  # fmt: skip

_BUGS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("advantages", "centered"): [
        ("_where_spread(rewards, groups, rewards - groups.broadcast(groups.mean(rewards)))", "rewards - rewards.mean()"),
        (
            "rewards, groups, rewards - groups.broadcast(groups.mean(rewards))",
            "rewards, groups, groups.broadcast(groups.mean(rewards)) - rewards",
        ),
        (
            "rewards, groups, rewards - groups.broadcast(groups.mean(rewards))",
            "rewards, groups, rewards - groups.broadcast(groups.sum(rewards))",
        ),
    ],
    ("advantages", "zscore"): [
        ("groups.broadcast(groups.std(rewards, ddof)) + eps)", "groups.broadcast(groups.std(rewards, 1)) + eps)"),
        ("groups.broadcast(groups.std(rewards, ddof)) + eps)", "groups.broadcast(groups.std(rewards, ddof)))"),
        ("groups.broadcast(groups.std(rewards, ddof)) + eps)", "groups.broadcast(groups.std(rewards, ddof)).square() + eps)"),
        ("groups.broadcast(groups.std(rewards, ddof)) + eps)", "rewards.std(correction=ddof) + eps)"),
    ],
    ("advantages", "no spread gives zero"): [
        ("groups.spread(rewards) > 0", "groups.spread(rewards) >= 0"),
        ("groups.spread(rewards) > 0", "groups.std(rewards, 0) > 0"),
        ("groups.spread(rewards) > 0", "groups.spread(rewards) > 0.5"),
    ],
    ("advantages", "rloo"): [
        ("size / (size - 1).clamp(min=1)", "(size - 1) / size"),
        ("size / (size - 1).clamp(min=1)", "size / size"),
        ("size / (size - 1).clamp(min=1)", "size / (size + 1)"),
    ],
    ("advantages", "opo"): [
        ("groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)", "groups.sum(lengths * rewards) / groups.count"),
        ("groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)", "groups.mean(rewards)"),
        (
            "_where_spread(rewards, groups, rewards - groups.broadcast(baseline))",
            "_where_spread(rewards, groups, groups.broadcast(baseline) - rewards)",
        ),
    ],
    ("advantages", "reinforce_pp_baseline"): [
        ("(lengths * centred).sum() / tokens.clamp(min=1)", "centred.mean()"),
        ("/ (tokens - 1).clamp(min=1)", "/ tokens"),
        ("* torch.rsqrt(variance + 1e-8)", "/ (variance + 1e-8)"),
        ("(centred - mean) * torch", "centred * torch"),
    ],
    ("advantages", "gpg"): [
        ("flat = groups.spread(rewards) == 0", "flat = groups.spread(rewards) != 0"),
        ("groups.count[flat].sum()", "flat.sum()"),
        ("rewards.numel() / informative.clamp(min=1)", "informative / rewards.numel()"),
    ],
    ("advantages", "tree"): [
        ("mean * (1 - mean))", "(mean * (1 - mean)).sqrt())"),
        ("mean * (1 - mean))", "mean)"),
        ("mean * (1 - mean))", "mean * (1 + mean))"),
    ],
    ("advantages", "apd"): [
        ("groups.broadcast(groups.mean(rewards)) + eps)", "groups.broadcast(groups.mean(rewards)))"),
        ("groups.broadcast(groups.mean(rewards)) + eps)", "1 - groups.broadcast(groups.mean(rewards)) + eps)"),
        ("groups.broadcast(groups.mean(rewards)) + eps)", "groups.broadcast(groups.std(rewards, 0)) + eps)"),
    ],
    ("advantages", "mixed"): [
        ("1 - 4 * success * (1 - success)", "4 * success * (1 - success)"),
        ("1 - 4 * success * (1 - success)", "1 - 2 * success * (1 - success)"),
        ("(1 - certainty) * zscore(rewards", "certainty * zscore(rewards"),
    ],
    ("advantages", "krpo"): [
        ("prior = variance + process_noise", "prior = variance"),
        ("gain = prior / (prior + measurement_noise)", "gain = measurement_noise / (prior + measurement_noise)"),
        ("variance = (1 - gain) * prior", "variance = gain * prior"),
        ("(variance**0.5 + 1e-8)", "(variance + 1e-8)"),
        ("for rows in torch.split(order, torch.bincount(position).tolist()):", "for rows in torch.arange(rewards.numel())[:, None]:"),
        ("variance = initial_variance", "variance = 1.0"),
    ],
    ("advantages", "signed"): [
        ("where_correct(correct, positive, 0 - negative, dtype)", "where_correct(correct, positive, negative, dtype)"),
        ("where_correct(correct, positive, 0 - negative, dtype)", "where_correct(~correct, positive, 0 - negative, dtype)"),
        ("where_correct(correct, positive, 0 - negative, dtype)", "where_correct(correct, negative, 0 - positive, dtype)"),
    ],
    ("advantages", "lead"): [
        ("(-length_decay * standardised).exp()", "(length_decay * standardised).exp()"),
        ("/ (num - 1).clamp(min=1)).sqrt()", "/ num.clamp(min=1)).sqrt()"),
        ("torch.where(advantages > 0, share, 1 - share)", "torch.where(advantages > 0, 1 - share, share)"),
        ("torch.sigmoid(-weight_slope", "torch.sigmoid(weight_slope"),
        ("zscore(shaped, groups, eps=eps, ddof=ddof)", "centered(shaped, groups)"),
        ("groups.sum(lengths * correct) / num.clamp(min=1)", "groups.mean(lengths)"),
    ],
    ("advantages", "pass_at_k"): [
        ("none_right - _choose_ratio(wrong - 1, size - 1, k - 1)", "none_right - _choose_ratio(wrong, size, k)"),
        ("none_right - _choose_ratio(wrong - 1, size - 1, k - 1)", "_choose_ratio(wrong - 1, size - 1, k - 1) - none_right"),
        ("((1 - none_right) * none_right).sqrt()", "(1 - none_right) * none_right"),
        ("positive = none_right", "positive = 1 - none_right"),
        ("(part - j).clamp(min=0)", "part.clamp(min=0)"),
    ],
    ("advantages", "durian"): [
        ("total = group * zscore", "total = zscore"),
        ("perceptual * _bucketed", "reasoning * _bucketed"),
        ("buckets.std(rewards, 1) + eps", "buckets.std(rewards, 0) + eps"),
        ("buckets.std(rewards, 1) + eps", "buckets.std(rewards, 1)"),
        ("centered(rewards, groups) / buckets.broadcast(scale)", "centered(rewards, buckets) / buckets.broadcast(scale)"),
        ("usable = (buckets.count > 1) & (buckets.spread(rewards) > 0)", "usable = buckets.count > 0"),
    ],
    ("advantages", "quarters"): [
        ("torch.where(entropy <= low, 0", "torch.where(entropy < low, 0"),
        ("torch.where(entropy >= high, 2, 1)", "torch.where(entropy > high, 2, 1)"),
        ("entropy.quantile(0.75)", "entropy.quantile(0.5)"),
    ],
    ("advantages", "quantile_bins"): [
        ("right=True", "right=False"),
        ("[1:-1]", "[:-1]"),
        ("torch.linspace(0, 1, bins + 1", "torch.linspace(0, 1, bins + 2"),
    ],
    ("segments", "reductions"): [
        ("/ (self.count - ddof).clamp(min=1)", "/ self.count"),
        ("return self.sum(values) / self.count", "return self.sum(values) / self.count.max()"),
        ('"amin", include_self=False', '"amax", include_self=False'),
        ("full.masked_fill(correct, positive)", "full.masked_fill(~correct, positive)"),
    ],
    ("shaping", "stcr"): [
        ("(lengths > mean)", "(lengths != mean)"),
        ("return advantages * (2 - mu**exponent)", "return advantages * mu**exponent"),
        ("longer, mean - lengths,", "longer, lengths - mean,"),
        ("longer = ~correct &", "longer = correct &"),
        ("groups.broadcast(num > 0)", "groups.broadcast(num >= 0)"),
        ("groups.sum(lengths * correct) / num.clamp(min=1)", "groups.mean(lengths)"),
        ("longer & (advantages < 0)", "longer & (advantages > 0)"),
    ],
    ("shaping", "ddas"): [
        ("omega * hard + (1 - omega) * easy", "omega * easy + (1 - omega) * hard"),
        ("omega * hard + (1 - omega) * easy", "hard + easy"),
        ("torch.where(_inside(accuracy), omega * hard", "torch.where(~_inside(accuracy), omega * hard"),
    ],
    ("shaping", "ass"): [
        ("torch.where(advantages > 0, advantages * (omega", "torch.where(advantages < 0, advantages * (omega"),
        ("(omega / alpha).clamp(max=1)", "(omega / alpha)"),
        ("(omega / alpha).clamp(max=1)", "(omega * alpha).clamp(max=1)"),
    ],
    ("shaping", "sign_scale"): [
        ("positive * advantages, negative * advantages", "negative * advantages, positive * advantages"),
        ("positive * advantages, negative * advantages", "positive * advantages, advantages"),
        ("positive * advantages, negative * advantages", "positive * advantages, -negative * advantages"),
    ],
    ("shaping", "hard_focused"): [
        ("0.5 * advantages * _safe(accuracy).rsqrt()", "advantages * _safe(accuracy).rsqrt()"),
        ("0.5 * advantages * _safe(accuracy).rsqrt()", "0.5 * advantages / _safe(accuracy)"),
        ("0.5 * advantages * _safe(accuracy).rsqrt()", "0.5 * advantages * _safe(accuracy).sqrt()"),
        ("(accuracy > 0) & (accuracy < 1)", "(accuracy >= 0) & (accuracy < 1)"),
    ],
    ("shaping", "easy_focused"): [
        ("0.5 * advantages * _safe(1 - accuracy).rsqrt()", "0.5 * advantages * _safe(accuracy).rsqrt()"),
        ("0.5 * advantages * _safe(1 - accuracy).rsqrt()", "0.5 * advantages / _safe(1 - accuracy)"),
        ("0.5 * advantages * _safe(1 - accuracy).rsqrt()", "2 * advantages * _safe(1 - accuracy).rsqrt()"),
    ],
    ("shaping", "focal"): [
        ("(1 - accuracy) ** gamma", "accuracy**gamma"),
        ("(1 - accuracy) ** gamma", "(1 - accuracy) ** (1 / gamma)"),
        ("(1 - accuracy) ** gamma", "(1 - accuracy) * gamma"),
    ],
    ("kl", "k1"): [
        ("return logprobs - ref_logprobs", "return ref_logprobs - logprobs"),
        ("return logprobs - ref_logprobs", "return (logprobs - ref_logprobs).detach()"),
        ("return logprobs - ref_logprobs", "return (logprobs - ref_logprobs).abs()"),
    ],
    ("kl", "k2"): [
        ("(ref_logprobs - logprobs).square() / 2", "(ref_logprobs - logprobs).square()"),
        ("(ref_logprobs - logprobs).square() / 2", "(ref_logprobs - logprobs).abs() / 2"),
        ("(ref_logprobs - logprobs).square() / 2", "(ref_logprobs.exp() - logprobs.exp()).square() / 2"),
    ],
    ("kl", "k3"): [
        ("difference = ref_logprobs - logprobs", "difference = logprobs - ref_logprobs"),
        ("torch.expm1(difference) - difference", "torch.expm1(difference) + difference"),
        ("torch.expm1(difference) - difference", "difference.exp() - difference"),
        ("torch.expm1(difference) - difference", "difference.exp() - 1 - difference"),
        ("torch.expm1(difference) - difference", "(torch.expm1(difference) - difference).clamp(-10, 10)"),
    ],
    ("kl", "dads"): [
        ("-torch.expm1(math.e * (incorrect_share - 1))", "-torch.expm1(incorrect_share - 1)"),
        ("-torch.expm1(math.e * (incorrect_share - 1))", "torch.exp(math.e * (incorrect_share - 1))"),
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
        ("kept = torch.where(loss_mask, log_ratio,", "kept = torch.where(loss_mask, log_ratio.detach(),"),
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
        ("1 / max(num_tokens, 1)", "1 / max(response_ids.numel(), 1)"),
        ("per_response[response_ids] / max(num_responses, 1)", "per_response[response_ids]"),
        ("per_response[response_ids] / max(num_responses, 1)", "per_response[response_ids] / per_response.numel()"),
        ("1 / response_loss_tokens.clamp(min=1)", "1 / torch.bincount(response_ids).clamp(min=1)"),
        ("1 / max(num_responses, 1), dtype", "1.0, dtype"),
        ("/ norm_len", "/ response_ids.numel()"),
    ],
    ("aggregate", "weighted_sum"): [
        (".masked_fill(~loss_mask, 0)", ".masked_fill(loss_mask, 0)"),
        ("(values * weights).masked_fill(~loss_mask, 0).sum()", "(loss_mask * values * weights).sum()"),
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
        ("sequence_log_ratio(gap.detach(), loss_mask,", "sequence_log_ratio(gap.detach(), torch.ones_like(loss_mask),"),
    ],
    ("filters", "groups"): [
        ("(right > 0) & (right < groups.count)", "(right > 0)"),
        ("(right > 0) & (right < groups.count)", "(right < groups.count)"),
        ("groups.sum(correct) < groups.count)", "groups.sum(correct) == groups.count)"),
        ("groups.sum(correct) < groups.count)", "groups.sum(correct) > 0)"),
    ],
    ("filters", "overlong_penalty"): [
        ("start = max_tokens - buffer_tokens", "start = max_tokens"),
        ("/ buffer_tokens).clamp(-1, 0)", "/ buffer_tokens).clamp(max=0)"),
        ("/ buffer_tokens).clamp(-1, 0)", "/ max_tokens).clamp(-1, 0)"),
    ],
    ("filters", "repetition"): [
        ("token_ids[last] == token_ids[last - block]", "token_ids[last] == token_ids[last - 1]"),
        (".all(dim=1)", ".any(dim=1)"),
        ("response_tokens >= 2 * block", "response_tokens > 2 * block"),
        ("return -penalty * repeated", "return penalty * repeated"),
        ("response_tokens, truncated, min_block", "response_tokens, ~truncated, min_block"),
    ],
    ("credit", "composition"): [
        ("groups.mean(batch.correct.to(rewards.dtype))", "groups.mean(rewards)"),
        ("rewards.mean().clamp(0, 1)", "rewards.mean()"),
        ("rewards.mean().clamp(0, 1)", "shaped.mean().clamp(0, 1)"),
        ("shaped = rewards - where_correct", "shaped = rewards + where_correct"),
        ("rewards.dtype) * kl_weights * batch.kl", "rewards.dtype) * batch.kl"),
        ("(e.plain_rewards - 1).abs() <= ONE", "(e.rewards - 1).abs() <= ONE"),
        ('e.correct if success == "correct" else', 'e.correct if success != "correct" else'),
        ('e.groups if window == "group" else', 'e.groups if window != "group" else'),
        ("e.batch.mean_logprobs if normalise else e.batch.sum_logprobs", "e.batch.sum_logprobs if normalise else e.batch.mean_logprobs"),
    ],
    ("credit", "metrics"): [
        ("gap = mean_length(~correct) - mean_length(correct)", "gap = mean_length(correct) - mean_length(~correct)"),
        ("share(groups.spread(evidence.rewards) == 0)", "share(groups.spread(evidence.rewards) > 0)"),
        ("-advantages.clamp(max=0).sum()", "advantages.clamp(max=0).sum()"),
        ("torch.where(both, gap", "torch.where(both | True, gap"),
    ],
    ("token_loss", "composition"): [
        ("loss = policy_loss + kl_loss", "loss = policy_loss - kl_loss"),
        ("loss = loss - plan.entropy_coef", "loss = loss + plan.entropy_coef"),
        ("per_token if correction is None else correction * per_token", "per_token"),
        ("_kl_coefficients(terms, plan) * divergence", "divergence"),
        ("per_response = plan.kl_coef[0] * per_response", "per_response = plan.kl_coef[0] * torch.ones_like(per_response)"),
        ("where_correct(batch.correct, *plan.kl_coef", "where_correct(~batch.correct, *plan.kl_coef"),
        ("policy_weights if plan.kl_aggregate == plan.aggregate else", "policy_weights if True else"),
        ("advantages=batch.advantages.to(logprobs.dtype)[ids]", "advantages=batch.advantages.to(logprobs.dtype)[ids].abs()"),
        ("logprobs = logprobs.masked_fill(~mask, 0)", "logprobs = logprobs * mask"),
        (
            "gap = lifted(batch.old_logprobs).to(dtype) - lifted(batch.sampler",
            "gap = lifted(batch.logprobs).to(dtype) - lifted(batch.sampler",
        ),
    ],
    ("token_loss", "metrics"): [
        ("ratio > 1 + plan.policy_knobs", "ratio < 1 + plan.policy_knobs"),
        (
            '(("positive", terms.advantages > 0), ("negative", terms.advantages < 0))',
            '(("positive", terms.advantages < 0), ("negative", terms.advantages > 0))',
        ),
        ("return kept.sum() / max(self.num_tokens, 1)", "return kept.mean()"),
    ],
}

MUTATIONS = [Mutation(module, formula, old, new) for (module, formula), bugs in _BUGS.items() for old, new in bugs]
