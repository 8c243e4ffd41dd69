"""Bugs in shaping, filters and the composition of credit."""

from __future__ import annotations

# (module, formula) -> (text that occurs once in the module, what takes its place)
BUGS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("shaping", "stcr"): [
        ("(tokens > mean)", "(tokens != mean)"),
        ("return advantages * (2 - mu**exponent)", "return advantages * mu**exponent"),
        ("longer, mean - tokens,", "longer, tokens - mean,"),
        ("longer = ~correct &", "longer = correct &"),
        ("groups.broadcast(num_correct > 0)", "groups.broadcast(num_correct >= 0)"),
        ("groups.sum(tokens * correct) / num_correct.clamp(min=1)", "groups.mean(tokens)"),
        ("longer & (advantages < 0)", "longer & (advantages > 0)"),
        ('if window == "batch":', 'if window != "batch":'),
        ('"group"] = "batch"', '"group"] = "group"'),
    ],
    ("shaping", "ddas"): [
        ("omega * hard + (1 - omega) * easy", "omega * easy + (1 - omega) * hard"),
        ("omega * hard + (1 - omega) * easy", "hard + easy"),
        ("torch.where(_inside(share), omega * hard", "torch.where(~_inside(share), omega * hard"),
    ],
    ("shaping", "ass"): [
        ("torch.where(advantages > 0, advantages *", "torch.where(advantages < 0, advantages *"),
        ("(omega / alpha).clamp(max=1)", "(omega / alpha)"),
        ("(omega / alpha).clamp(max=1)", "(omega * alpha).clamp(max=1)"),
    ],
    ("shaping", "sign_scale"): [
        ("positive * advantages, negative *", "negative * advantages, positive *"),
        ("positive * advantages, negative * advantages", "positive * advantages, advantages"),
        ("* advantages, negative * advantages", "* advantages, -negative * advantages"),
    ],
    ("shaping", "hard_focused"): [
        ("0.5 * advantages * _safe(share).rsqrt()", "advantages * _safe(share).rsqrt()"),
        ("0.5 * advantages * _safe(share).rsqrt()", "0.5 * advantages / _safe(share)"),
        ("0.5 * advantages * _safe(share).rsqrt()", "0.5 * advantages * _safe(share).sqrt()"),
        ("(share > 0) & (share < 1)", "(share >= 0) & (share < 1)"),
    ],
    ("shaping", "easy_focused"): [
        ("(1 - share.sqrt() + 1e-6)", "(1 - share + 1e-6)"),
        ('if easy_form == "released":', 'if easy_form != "released":'),
        ("share, easy_form=easy_form)", "share)"),
        ("0.5 * advantages * _safe(1 - share).rsqrt()", "0.5 * advantages * _safe(share).rsqrt()"),
        ("0.5 * advantages * _safe(1 - share).rsqrt()", "0.5 * advantages / _safe(1 - share)"),
        ("0.5 * advantages * _safe(1 - share).rsqrt", "2 * advantages * _safe(1 - share).rsqrt"),
    ],
    ("shaping", "focal"): [
        ("(1 - share) ** gamma", "share**gamma"),
        ("(1 - share) ** gamma", "(1 - share) ** (1 / gamma)"),
        ("(1 - share) ** gamma", "(1 - share) * gamma"),
    ],
    ("histories", "smoothed"): [
        ("(1 - weight) * new + weight * everything", "weight * new + weight * everything"),
        ("weight * new + (1 - weight) * everything", "everything"),
        ("mostly_new.abs() < mostly_all.abs()", "mostly_new.abs() > mostly_all.abs()"),
        ("1 / (visits.double() + 1)", "1 / visits.double().clamp(min=1)"),
        ("groups.spread(rewards) > 0, var", "groups.spread(rewards) >= 0, var"),
        ("var > 0, var.sqrt() + eps", "var > 0, var + eps"),
    ],
    ("histories", "after_visit"): [
        ("mean + moved / (n + 1)", "mean + moved / 2"),
        ("n / (n + 1) * moved.square()", "moved.square()"),
        ("n / (n + 1) * moved.square()", "n / (n + 1) * moved"),
        ("<= ROUNDING * mean.abs(), 0)", "<= 0 * mean.abs(), 0)"),
        ("ddof=1", "ddof=0"),
        ("return visits + 1,", "return visits,"),
    ],
    ("filters", "groups"): [
        ("groups.sum(correct) < groups.count)", "groups.sum(correct) == groups.count)"),
        ("groups.sum(correct) < groups.count)", "groups.sum(correct) > 0)"),
        ("groups.sum(correct) < groups.count)", "groups.sum(correct) <= groups.count)"),
    ],
    ("method", "wants_group"): [
        ("0 < sum(correct) < len(correct)", "0 < sum(correct)"),
        ("0 < sum(correct) < len(correct)", "sum(correct) < len(correct)"),
        ("0 < sum(correct) < len(correct)", "0 <= sum(correct) < len(correct)"),
        ("len(correct) >= self.config.min_group", "len(correct) > 0"),
        ("filters.dynamic_sampling is None", "filters.dynamic_sampling is not None"),
    ],
    ("filters", "overlong_penalty"): [
        ("start = limit - buffer_tokens", "start = limit"),
        ("/ buffer_tokens).clamp(-1, 0)", "/ buffer_tokens).clamp(max=0)"),
        ("/ buffer_tokens).clamp(-1, 0)", "/ limit).clamp(-1, 0)"),
    ],
    ("filters", "repetition"): [
        ("token_ids[last] == token_ids[last - block]", "token_ids[last] == token_ids[last - 1]"),
        (".all(dim=1)", ".any(dim=1)"),
        ("response_tokens >= 2 * block", "response_tokens > 2 * block"),
        ("return -self.penalty * repeated", "return self.penalty * repeated"),
        ("response_tokens, truncated, **blocks", "response_tokens, ~truncated, **blocks"),
    ],
    ("shaping", "confidence_gap"): [
        ("prompt_confidence - response_confidence", "response_confidence - prompt_confidence"),
        ("torch.where(share > 0, advantages + gap", "torch.where(_inside(share), advantages + gap"),
        ("torch.where(share > 0, advantages + gap", "torch.where(share >= 0, advantages + gap"),
        ("advantages + gap, advantages)", "advantages * (1 + gap), advantages)"),
        ("gap = alpha * (prompt", "gap = (prompt"),
    ],
    ("tails", "tail_confidence"): [
        (".ceil().long().clamp(min=1)", ".floor().long().clamp(min=1)"),
        ("- ROUNDING).ceil()", "+ ROUNDING).ceil()"),
        (".ceil().long().clamp(min=1)", ".ceil().long()"),
        ("rank >= wanted[row], 0)", "rank < wanted[row], 0)"),
        ("kept) / wanted).exp()", "kept) / length).exp()"),
        ("by_value[index[by_value].argsort(stable=True)]", "index.argsort(stable=True)"),
        ("logprobs.argsort(stable=True)", "logprobs.argsort(stable=True, descending=True)"),
    ],
    ("filters", "curiosity_bonus"): [
        ("rewards.abs() / self.kappa", "rewards / self.kappa"),
        ("rewards.abs() / self.kappa", "rewards.abs()"),
        ("-self.alpha * mean_logprobs", "self.alpha * mean_logprobs"),
        ("torch.minimum(rewards.abs()", "torch.maximum(rewards.abs()"),
        ("self.start + (self.end", "self.end + (self.end"),
        ("self.start + (self.end - self.start) * progress", "self.start * progress"),
    ],
    ("credit", "curiosity"): [
        ("rewards=evidence.rewards + bonus", "rewards=evidence.rewards - bonus"),
        ("rewards=evidence.rewards + bonus", "rewards=evidence.plain_rewards + bonus"),
        ("rewards = evidence.plain_rewards", "rewards = evidence.rewards"),
    ],
    ("credit", "composition"): [
        ("groups.mean(batch.correct.to(rewards.dtype))", "groups.mean(rewards)"),
        ("rewards.mean().clamp(0, 1)", "rewards.mean()"),
        ("rewards.mean().clamp(0, 1)", "shaped.mean().clamp(0, 1)"),
        ("shaped = rewards - coefficient", "shaped = rewards + coefficient"),
        ("coefficient * kl_weights * evidence", "coefficient * evidence"),
    ],
    ("credit", "rewards in the unit interval"): [
        ("if readers and (low < 0 or high > 1 + ONE)", "if readers and high > 1 + ONE"),
        ("if readers and (low < 0 or high > 1 + ONE)", "if readers and low < 0"),
        ("readers = list(config.unit_reward_readers)", "readers = []"),
    ],
    ("credit", "metrics"): [
        (", ~correct) - mean_of(lengths, correct", ", correct) - mean_of(lengths, ~correct"),
        ("(groups.spread(evidence.rewards) == 0)", "(groups.spread(evidence.rewards) > 0)"),
        ("-advantages.clamp(max=0).sum()", "advantages.clamp(max=0).sum()"),
        ("torch.where(both, gap", "torch.where(both | True, gap"),
    ],
}
