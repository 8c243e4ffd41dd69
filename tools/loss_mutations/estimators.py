"""Bugs in the advantage estimators, and in the reductions over a prompt's responses."""

from __future__ import annotations

# (module, formula) -> (text that occurs once in the module, what takes its place)
BUGS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("advantages", "centered"): [
        (
            "_where_spread(rewards, groups, rewards - groups.broadcast(groups.mean(rewards)))",
            "rewards - rewards.mean()",
        ),
        (
            "rewards, groups, rewards - groups.broadcast(groups.mean(rewards))",
            "rewards, groups, groups.broadcast(groups.mean(rewards)) - rewards",
        ),
        ("- groups.broadcast(groups.mean(rewards))", "- groups.broadcast(groups.sum(rewards))"),
    ],
    ("advantages", "zscore"): [
        ("groups.broadcast(groups.std(rewards, ddof))", "groups.broadcast(groups.std(rewards, 1))"),
        ("(groups.std(rewards, ddof)) + eps", "(groups.std(rewards, ddof))"),
        ("(groups.std(rewards, ddof)) + eps", "(groups.std(rewards, ddof)).square() + eps"),
        ("groups.broadcast(groups.std(rewards, ddof)) + eps", "rewards.std(correction=ddof) + eps"),
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
        ("tokens * rewards) / groups.sum(tokens).clamp(min=1)", "tokens * rewards) / groups.count"),
        ("groups.sum(tokens * rewards) / groups.sum(tokens).clamp(min=1)", "groups.mean(rewards)"),
        (", rewards - groups.broadcast(baseline)", ", groups.broadcast(baseline) - rewards"),
    ],
    ("advantages", "reinforce_pp_baseline"): [
        ("(tokens * deviation).sum() / num_tokens.clamp(min=1)", "deviation.mean()"),
        ("/ (num_tokens - 1).clamp(min=1)", "/ num_tokens"),
        ("* torch.rsqrt(variance + 1e-8)", "/ (variance + 1e-8)"),
        ("(deviation - mean) * torch", "deviation * torch"),
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
        ("groups.broadcast(groups.mean(rewards)) + eps", "groups.broadcast(groups.mean(rewards))"),
        (
            "groups.broadcast(groups.mean(rewards)) + eps)",
            "1 - groups.broadcast(groups.mean(rewards)) + eps)",
        ),
        ("groups.broadcast(groups.mean(rewards)) +", "groups.broadcast(groups.std(rewards, 0)) +"),
    ],
    ("advantages", "mixed"): [
        ("1 - 4 * share * (1 - share)", "4 * share * (1 - share)"),
        ("1 - 4 * share * (1 - share)", "1 - 2 * share * (1 - share)"),
        ("(1 - certainty) * by_std", "certainty * by_std"),
        ("(plain_rewards - 1).abs() <= ONE", "(rewards - 1).abs() <= ONE"),
        ('correct if success == "correct" else', 'correct if success != "correct" else'),
    ],
    ("advantages", "krpo"): [
        ("prior = variance + process_noise", "prior = variance"),
        ("prior / (prior + measurement_noise)", "measurement_noise / (prior + measurement_noise)"),
        ("variance = (1 - gain) * prior", "variance = gain * prior"),
        ("(variance**0.5 + 1e-8)", "(variance + 1e-8)"),
        (
            "for rows in torch.split(order, torch.bincount(position).tolist()):",
            "for rows in torch.arange(rewards.numel())[:, None]:",
        ),
        ("variance = initial_variance", "variance = 1.0"),
    ],
    ("advantages", "signed"): [
        ("(correct, positive, 0 - negative, dtype)", "(correct, positive, negative, dtype)"),
        ("(correct, positive, 0 - negative, dtype)", "(~correct, positive, 0 - negative, dtype)"),
        ("(correct, positive, 0 - negative, dtype)", "(correct, negative, 0 - positive, dtype)"),
    ],
    ("advantages", "lead"): [
        ("(-length_decay * standardized).exp()", "(length_decay * standardized).exp()"),
        ("/ (num_correct - 1).clamp(min=1)).sqrt()", "/ num_correct.clamp(min=1)).sqrt()"),
        ("(advantages > 0, share, 1 - share)", "(advantages > 0, 1 - share, share)"),
        ("torch.sigmoid(-weight_slope", "torch.sigmoid(weight_slope"),
        ("zscore(shaped, groups, eps, ddof)", "centered(shaped, groups)"),
        ("groups.sum(tokens * correct) / num_correct.clamp(min=1)", "groups.mean(tokens)"),
    ],
    ("advantages", "pass_at_k"): [
        ("- _choose_ratio(wrong - 1, size - 1, k - 1)", "- _choose_ratio(wrong, size, k)"),
        (
            "none_right - _choose_ratio(wrong - 1, size - 1, k - 1)",
            "_choose_ratio(wrong - 1, size - 1, k - 1) - none_right",
        ),
        ("((1 - none_right) * none_right).sqrt()", "(1 - none_right) * none_right"),
        ("positive = none_right", "positive = 1 - none_right"),
        ("(part - j).clamp(min=0)", "part.clamp(min=0)"),
    ],
    ("advantages", "durian"): [
        ("total = group * zscore", "total = zscore"),
        ("perceptual * _bucketed", "reasoning * _bucketed"),
        ("buckets.std(rewards, 1) + eps", "buckets.std(rewards, 0) + eps"),
        ("buckets.std(rewards, 1) + eps", "buckets.std(rewards, 1)"),
        ("rewards, groups) / buckets.broadcast(", "rewards, buckets) / buckets.broadcast("),
        ("= (buckets.count > 1) & (buckets.spread(rewards) > 0)", "= buckets.count > 0"),
        (
            '"mean_logprobs" if normalize else "sum_logprobs")',
            '"sum_logprobs" if normalize else "mean_logprobs")',
        ),
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
}
