"""A plain second implementation of every named method: one response after another, Python floats,
no tensors.

Written from the equations; it shares no code, no table and no default with the package.
"""

import math
from dataclasses import dataclass, replace
from math import comb

from tests.unit.loss import token_reference
from tests.unit.loss.named import Choice
from tests.unit.loss.plain import average, deviation, quantile

INF = float("inf")


@dataclass
class Row:
    reward: float
    correct: bool
    group: int
    length: int
    mean_logprob: float = 0.0
    visual_entropy: float = 0.0

    @property
    def prompt_confidence(self) -> float:
        return 1 / (2 + self.group)

    @property
    def response_confidence(self) -> float:
        return math.exp(1.5 * self.mean_logprob)

    @property
    def end_logprob(self) -> float:
        """Of the token after the response."""
        return -2.5 + 4 * self.mean_logprob

    @property
    def given(self) -> bool:
        """Not sampled: every response of an even length."""
        return self.length % 2 == 0

    @property
    def mean_entropy(self) -> float:
        return 1 + self.mean_logprob

    @property
    def was_cut(self) -> bool:
        return self.length > 3

    @property
    def visits(self) -> int:
        return self.group % 3

    @property
    def history_mean(self) -> float:
        """Of earlier visits; their variance is 0.2."""
        return 0.3 + 0.05 * self.group


EPS = 1e-6


def advantages(rows: list[Row], choice: Choice) -> list[float]:
    if any(leaves(row, rows, choice) for row in rows):
        stay = [row for row in rows if not leaves(row, rows, choice)]
        values = iter(advantages(stay, choice))
        return [0.0 if leaves(row, rows, choice) else next(values) for row in rows]
    if "weight" in choice.knobs:
        rows = [replace(row, reward=row.reward + curiosity(row, choice)) for row in rows]
    result = [estimate(row, rows, choice) for row in rows]
    for name in choice.shaping:
        shaped = gap if name == "gap" else factored
        result = [
            shaped(name, value, row, rows, choice) for value, row in zip(result, rows, strict=True)
        ]
    return result


def leaves(row: Row, rows: list[Row], choice: Choice) -> bool:
    """All given responses of a group but the surest, or the two that make the answer likely."""
    given = [other for other in rows if other.group == row.group and other.given]
    surer = sum(other.mean_entropy < row.mean_entropy for other in given)
    likelier = sum(other.mean_logprob > row.mean_logprob for other in given)
    return row.given and {"exgrpo": surer >= 1, "ampo": likelier >= 2}.get(choice.token, False)


def gap(_: str, advantage: float, row: Row, rows: list[Row], __: Choice) -> float:
    group = [float(other.correct) for other in rows if other.group == row.group]
    if not any(group):
        return advantage
    return advantage + 0.3 * (row.prompt_confidence - row.response_confidence)


def factored(name: str, advantage: float, row: Row, rows: list[Row], choice: Choice) -> float:
    return advantage * factor(name, advantage, row, rows, choice)


def estimate(row: Row, rows: list[Row], choice: Choice) -> float:
    group = [other for other in rows if other.group == row.group]
    rewards = [other.reward for other in group]
    mean = average(rewards)
    name = choice.estimator
    if name == "signed":
        return choice.knobs["positive"] if row.correct else -choice.knobs["negative"]
    if name == "krpo":
        return kalman(row, group)
    if name == "lead":
        return lead(row, group)
    if name == "whitened":
        return whitened(row, rows)
    if name == "smoothed":
        return smoothed(row, rewards)
    if max(rewards) == min(rewards):
        return 0.0
    accuracy = average([float(other.correct) for other in group])
    zscore = (row.reward - mean) / (deviation(rewards) + EPS)
    percent = (row.reward - mean) / (mean + EPS)
    if name == "rloo":
        return row.reward - average([other.reward for other in group if other is not row])
    if name == "opo":
        return row.reward - sum(other.length * other.reward for other in group) / sum(
            other.length for other in group
        )
    if name == "gpg":
        flat = sum(
            1
            for other in rows
            if len({peer.reward for peer in rows if peer.group == other.group}) == 1
        )
        return len(rows) / (len(rows) - flat) * (row.reward - mean)
    if name == "mixed":
        share = average([float(abs(other.reward - 1) < 1e-6) for other in group])
        certainty = 1 - 4 * share * (1 - share)
        return (1 - certainty) * zscore + certainty * percent
    if name == "pass_at_k":
        return best_of(row, len(group), round(accuracy * len(group)), int(choice.knobs["k"]))
    if name == "durian":
        return durian(row, rows, mean, zscore, choice.knobs)
    return {
        "zscore": zscore,
        "centered": row.reward - mean,
        "tree": (row.reward - mean) / (mean * (1 - mean)),
        "apd": percent,
    }[name]


def curiosity(row: Row, choice: Choice) -> float:
    return choice.knobs["weight"] * min(abs(row.reward) / 3, -row.mean_logprob)


def smoothed(row: Row, rewards: list[float]) -> float:
    n = row.visits
    mean = average(rewards)
    square = deviation(rewards, 1) ** 2 if max(rewards) > min(rewards) else 0.0
    past_mean = row.history_mean if n else mean
    all_mean = (n * past_mean + mean) / (n + 1)
    all_var = (n * 0.2 + square + n / (n + 1) * (mean - past_mean) ** 2) / (n + 1)
    new = (row.reward - mean) / (math.sqrt(square) + EPS) if square else 0.0
    total = (row.reward - all_mean) / (math.sqrt(all_var) + EPS) if all_var else 0.0
    mixtures = [(n * new + total) / (n + 1), (new + n * total) / (n + 1)]
    return min(mixtures, key=abs)


def kalman(row: Row, group: list[Row]) -> float:
    state = 0.0
    variance = 1.0
    for other in group:
        prior = variance + 1e-5
        gain = prior / (prior + 1e-2)
        state = state + gain * (other.reward - state)
        variance = (1 - gain) * prior
        if other is row:
            break
    return (row.reward - state) / (math.sqrt(variance) + 1e-8)


def lead(row: Row, group: list[Row]) -> float:
    lengths = [float(other.length) for other in group if other.correct]

    def shaped(other: Row) -> float:
        if not other.correct:
            return -1.0
        spread = deviation(lengths, 1) if len(lengths) > 1 else 1.0
        return math.exp(-0.05 * (other.length - average(lengths)) / (spread + 1e-6))

    values = [shaped(other) for other in group]
    if max(values) == min(values):
        return 0.0
    value = (shaped(row) - average(values)) / (deviation(values) + EPS)
    share = len(lengths) / len(group)
    at = share if value > 0 else 1 - share
    return value * (0.4 + 1.1 / (1 + math.exp(10 * (at - 0.75))))


def whitened(row: Row, rows: list[Row]) -> float:
    def centred(other: Row) -> float:
        return other.reward - average([peer.reward for peer in rows if peer.group == other.group])

    tokens = [centred(other) for other in rows for _ in range(other.length)]
    return (centred(row) - average(tokens)) / math.sqrt(deviation(tokens, 1) ** 2 + 1e-8)


def best_of(row: Row, size: int, right: int, k: int) -> float:
    wrong = size - right
    expected = 1 - comb(wrong, k) / comb(size, k)
    spread = math.sqrt(expected * (1 - expected))
    if spread == 0:
        return 0.0
    missed = 0.0 if row.correct else comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    return (1 - expected - missed) / spread


def durian(row: Row, rows: list[Row], mean: float, zscore: float, knobs: dict[str, float]) -> float:
    prompts = sorted({other.group for other in rows})
    entropy = {
        prompt: average([other.visual_entropy for other in rows if other.group == prompt])
        for prompt in prompts
    }
    confidence = {
        prompt: average([other.mean_logprob for other in rows if other.group == prompt])
        for prompt in prompts
    }
    low = quantile(list(entropy.values()), 0.25)
    high = quantile(list(entropy.values()), 0.75)
    edges = [quantile(list(confidence.values()), j / 12) for j in range(1, 12)]

    def quarter(prompt: int) -> int:
        return 0 if entropy[prompt] <= low else 2 if entropy[prompt] >= high else 1

    def bin_of(prompt: int) -> int:
        return sum(1 for edge in edges if confidence[prompt] >= edge)

    def part(bucket: dict[int, int]) -> float:
        values = [other.reward for other in rows if bucket[other.group] == bucket[row.group]]
        if len(values) < 2 or max(values) == min(values):
            return 0.0
        return (row.reward - mean) / (deviation(values, 1) + EPS)

    by_entropy = part({prompt: quarter(prompt) for prompt in prompts})
    by_confidence = part({prompt: bin_of(prompt) for prompt in prompts})
    return (
        knobs["group"] * zscore
        + knobs["perceptual"] * by_entropy
        + knobs["reasoning"] * by_confidence
    )


def factor(name: str, advantage: float, row: Row, rows: list[Row], choice: Choice) -> float:
    group = [other for other in rows if other.group == row.group]
    p = average([float(other.correct) for other in group])
    omega = min(max(average([other.reward for other in rows]), 0.0), 1.0)
    if name == "positive":
        return choice.knobs["scale"] if advantage > 0 else 1.0
    if name == "ass":
        return min(1.0, omega) if advantage > 0 else 1.0
    if name == "given":
        return 0.0 if row.given else 1.0
    if name == "perplexity":
        known = [other.mean_logprob for other in group]
        return 1 + 0.01 * (row.mean_logprob - average(known)) / (deviation(known) or 1)
    if name == "focal":
        return math.sqrt(1 - p)
    if name == "stcr":
        right = [float(other.length) for other in rows if other.correct]
        if row.correct or not right or row.length <= average(right):
            return 1.0
        return 2 - 1.0001 ** (average(right) - row.length)
    if p in (0.0, 1.0):
        return 1.0
    hard = 0.5 / math.sqrt(p)
    easy = 0.5 / math.sqrt(1 - p)
    return {"hard": hard, "easy": easy, "ddas": omega * hard + (1 - omega) * easy}[name]


def is_kept(row: Row, rows: list[Row], choice: Choice) -> bool:
    group = [other.correct for other in rows if other.group == row.group]
    return not (choice.drops_all_correct and all(group)) and not leaves(row, rows, choice)


def kl_weight(row: Row, rows: list[Row], choice: Choice) -> float:
    if leaves(row, rows, choice):
        return 0.0
    wrong = average([float(not other.correct) for other in rows if other.group == row.group])
    return 1 - math.exp(math.e * (wrong - 1)) if choice.dads and row.correct and wrong else 1.0


def loss(rows: list[Row], choice: Choice, tokens: "Tokens", norm_len: int) -> float:
    """The minibatch loss: responses and their tokens, one after another."""
    if choice.token == "pacs":
        return average([token_reference.pacs(row, rows, tokens.moved) for row in rows])
    count = sum(len(response) for response in tokens.new)
    total = 0.0
    if choice.token == "siren":
        total = token_reference.anchor([value for row in tokens.nucleus for value in row])
    if choice.token == "laser":
        total = token_reference.self_reward(rows)
    by_row = zip(rows, token_advantages(rows, choice, tokens), range(len(rows)), strict=True)
    for row, inside, at in by_row:
        new_row, old_row, entropies = tokens.new[at], tokens.old[at], tokens.entropy[at]
        weight = {
            "response_mean": 1 / len(rows) / len(new_row),
            "token": 1 / count,
            "norm": 1 / len(rows) / norm_len,
            "sum": 1 / len(rows),
        }[choice.aggregate]
        sequence = math.exp(
            average([new - past for new, past in zip(new_row, old_row, strict=True)])
        )
        for place, (new, past, frozen) in enumerate(
            zip(new_row, old_row, tokens.ref[at], strict=True)
        ):
            advantage = inside[place]
            low, high, kl_mean = choice.low, choice.high, weight
            if choice.token == "archer":
                low, high = token_reference.archer_clip(entropies, place)
                kl_mean = token_reference.archer_kl_weight(tokens.entropy, entropies, place)
            if choice.token == "dcpo":
                low, high = token_reference.dcpo_clip(math.exp(past))
            ratio = sequence if choice.loss == "gspo" else math.exp(new - past)
            clipped = min(max(ratio, 1 - low), 1 + high)
            value = {"reinforce": -advantage * new, "cispo": -clipped * advantage * new}.get(
                choice.loss, -min(ratio * advantage, clipped * advantage)
            )
            if advantage < 0:
                value = min(value, -choice.dual * advantage)
            if choice.loss == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                value = -4 / tau / (1 + math.exp(tau * (1 - ratio))) * advantage
            if choice.token == "gmpo":
                value = token_reference.gmpo(advantage, new_row, old_row)
            if choice.token in ("clip_cov", "kl_cov"):
                before = tokens.new[:at]
                value = token_reference.covariant(choice.token, ratio, advantage, before, place)
            if choice.token in token_reference.AROUND_SAMPLER:
                value = token_reference.around_sampler(choice.token, advantage, tokens, at, place)
            if choice.token == "sft":
                value = -new if row.given else 0.0
            if row.given and choice.token in token_reference.GIVEN:
                away = tokens.sampler[at][place] if choice.token in ("exgrpo", "ampo") else past
                value = token_reference.of_given(choice.token, advantage, new, away, frozen)
            if choice.token == "papo":
                value += token_reference.perception(new, tokens.masked[at][place])
            drift = frozen - new
            penalty = choice.kl * kl_weight(row, rows, choice) * (math.exp(drift) - drift - 1)
            total += weight * (value - choice.entropy * entropies[place]) + kl_mean * penalty
    return total


@dataclass
class Tokens:
    """Of each response, its tokens' numbers."""

    new: list[list[float]]
    old: list[list[float]]
    ref: list[list[float]]
    entropy: list[list[float]]
    is_argmax: list[list[bool]]
    nucleus: list[list[float]]
    masked: list[list[float]]
    sampler: list[list[float]]
    likely: list[list[list[float]]]
    sampler_likely: list[list[list[float]]]
    teacher_likely: list[list[list[float]]]
    teacher: list[list[float]]
    later_turns: list[list[int]]
    turn_advantages: list[list[float]]

    @property
    def moved(self) -> list[float]:
        """Of each response, how far the sum of its logprobs is from the old one."""
        return [sum(new) - sum(old) for new, old in zip(self.new, self.old, strict=True)]


def token_advantages(rows: list[Row], choice: Choice, tokens: Tokens) -> list[list[float]]:
    """The advantage of each token of each response."""
    result = []
    by_row = zip(rows, advantages(rows, choice), tokens.entropy, tokens.is_argmax, strict=True)
    for row, advantage, entropies, modes in by_row:
        accuracy = average([float(other.correct) for other in rows if other.group == row.group])
        result.append(
            [
                token_reference.advantage(
                    choice.token, advantage, accuracy, entropies, place, modes[place]
                )
                for place in range(len(entropies))
            ]
        )
    if choice.token == "teacher":
        for at, inside in enumerate(result):
            pairs = zip(tokens.new[at], tokens.teacher[at], strict=True)
            result[at] = [own - (p - q) for own, (p, q) in zip(inside, pairs, strict=True)]
    for at, inside in enumerate(result):
        if choice.token == "turn_discount":
            result[at] = [a * 0.95**k for a, k in zip(inside, tokens.later_turns[at], strict=True)]
        if choice.token == "gigpo":
            result[at] = [a + b for a, b in zip(inside, tokens.turn_advantages[at], strict=True)]
    return result
