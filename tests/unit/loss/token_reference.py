"""The plain reference of what methods do inside a response: one token at a time, Python floats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.unit.loss.plain import average, quantile

if TYPE_CHECKING:
    from tests.unit.loss.reference import Row, Tokens


def advantage(
    name: str, response: float, accuracy: float, entropies: list[float], place: int, is_argmax: bool
) -> float:
    """The advantage of one token; ``response``: that of its response, ``accuracy``: its
    group's."""
    if name == "simko" and response < 0 and is_argmax and reasons(entropies, place):
        return 1.1 * response
    entropy = entropies[place]
    if name == "zero_variance" and accuracy == 1:
        return 0.1 * entropy
    if name == "zero_variance" and accuracy == 0:
        return -0.1 * (max(entropies) - entropy)
    if name == "entropy_bonus":
        return response + min(0.4 * entropy, abs(response) / 2)
    if name == "position_bonus":
        late = 0.1 / (1 + math.exp(-15 * (place / len(entropies) - 0.5)))
        return response + math.copysign(min(late, abs(response) / 2), response)
    return response


def reasons(entropies: list[float], place: int) -> bool:
    return entropies[place] > quantile(entropies, 0.8)


def own_gradient(name: str, correct: bool, entropies: list[float], place: int) -> float:
    """The share of a token's gradient that stays with the token itself."""
    return 0.99 if name == "simko" and correct and reasons(entropies, place) else 1.0


def dcpo_clip(old: float) -> tuple[float, float]:
    """How far the ratio of a token of this old probability may go below and above 1."""
    low = 0.5 + 0.5 * math.sqrt(max(1 - 0.64 / old, 0.0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 0.8 / old), 10.0)
    return 1 - low, high - 1


def archer_clip(entropies: list[float], place: int) -> tuple[float, float]:
    return (0.5, 0.5) if reasons(entropies, place) else (0.2, 0.2)


def archer_kl_weight(everything: list[list[float]], entropies: list[float], place: int) -> float:
    """One over the tokens of the minibatch that do not reason; 0 for those that do."""
    if reasons(entropies, place):
        return 0.0
    return 1 / sum(
        not reasons(response, other) for response in everything for other in range(len(response))
    )


def pacs(row: Row, rows: list[Row], moved: list[float]) -> float:
    """The weighted binary cross entropy of one response."""
    group = [place for place, other in enumerate(rows) if other.group == row.group]
    own = next(place for place in group if rows[place] is row)
    psi = moved[own] - average([moved[place] for place in group if place != own])
    alike = sum(rows[place].correct == row.correct for place in group)
    weight = len(group) / (2 * alike) if alike < len(group) else 1.0
    predicted = 1 / (1 + math.exp(-psi))
    return -weight * math.log(predicted if row.correct else 1 - predicted)


GIVEN = ("dph forward_kl", "dph js", "dph alpha", "rl_plus", "exgrpo", "ampo")


def of_given(name: str, advantage: float, new: float, past: float, frozen: float) -> float:
    """What is minimized at a token of a response that was not sampled."""
    if name in ("exgrpo", "ampo"):
        return -advantage / (1 + 0.1 * math.exp(past - new))
    if name == "rl_plus":
        p, q = math.exp(new), math.exp(past)
        return -2 * p / (1.5 * q + 0.5) * advantage * math.sqrt(1 - p)
    u = math.exp(new) / math.exp(frozen)
    f = {
        "dph forward_kl": u - 1 - math.log(u),
        "dph js": u * math.log(u) - (u + 1) * math.log((u + 1) / 2),
        "dph alpha": (u**0.8 - 0.8 * u - 0.2) / -0.16,
    }
    return (0.05 if name == "dph js" else 0.01) * f[name]


CHOSEN = range(3, 40, 5)  # places of tokens, by their covariance


def covariant(
    name: str, ratio: float, advantage: float, before: list[list[float]], place: int
) -> float:
    """What is minimized at a token by its place among all, ``before`` being the rows before its
    own."""
    place += sum(map(len, before))
    if name == "clip_cov":
        return 0.0 if place in CHOSEN else -min(ratio * advantage, min(ratio, 2) * advantage)
    return -ratio * advantage + (abs(math.log(ratio)) if place in CHOSEN else 0.0)


AROUND_SAMPLER = ("dppo tv", "dppo kl", "ipo", "score_centered", "teacher_top_k")


def around_sampler(name: str, advantage: float, tokens: Tokens, at: int, place: int) -> float:
    """What is minimized at a token of row ``at``; nothing where it is too far from the sampler."""
    new, sampler = tokens.new[at][place], tokens.sampler[at][place]
    if name == "teacher_top_k":
        ratio = math.exp(new - tokens.old[at][place])
        own = divergence(tokens.likely[at][place], tokens.teacher_likely[at][place])
        return own - ratio * advantage
    if name == "score_centered":
        likely = (tokens.likely[at][place], tokens.sampler_likely[at][place])
        return score_centered(advantage, new, sampler, *likely)
    p, q = math.exp(new), math.exp(sampler)
    if name == "ipo" and not -0.3 <= p - q <= 0.3:
        return 0.0
    away = p > q if advantage > 0 else p < q
    if name == "dppo tv" and away and abs(p - q) > 0.15:
        return 0.0
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if name == "dppo kl" and away and kl > 0.05:
        return 0.0
    return -p / q * advantage


def score_centered(
    advantage: float, new: float, sampler: float, likely: list[float], sampler_likely: list[float]
) -> float:
    """What is minimized at a token, with the weights of TIS at cap 2."""
    rest = 1 - sum(map(math.exp, likely))
    alpha = (1 - sum(map(math.exp, sampler_likely))) / rest
    center = 0.0
    for one, other in zip(likely, sampler_likely, strict=True):
        p, q = math.exp(one), math.exp(other)
        center += (q * min(p / q, 2) - alpha * min(1 / alpha, 2) * p) * one
    return -advantage * (min(math.exp(new - sampler), 2) * new - center)


def divergence(likely: list[float], teacher_likely: list[float]) -> float:
    """KL between two distributions over these tokens and one that stands for all others."""
    p = [math.exp(value) for value in likely]
    q = [math.exp(value) for value in teacher_likely]
    pairs = zip([*p, 1 - sum(p)], [*q, 1 - sum(q)], strict=True)
    return sum(one * math.log(one / other) for one, other in pairs)


def gmpo(advantage: float, new: list[float], old: list[float]) -> float:
    """What is minimized at each token of a response; all have one advantage."""
    product = 1.0
    for now, past in zip(new, old, strict=True):
        ratio = math.exp(now) / math.exp(past)
        product *= min(ratio, math.exp(0.4)) if advantage > 0 else max(ratio, math.exp(-0.4))
    return -advantage * product ** (1 / len(new))


def peaks(entropies: list[float]) -> tuple[float, int, float, float]:
    """A number between the tokens at or above the 0.8-quantile and the others, how many they are,
    their mean, and what it was at the start."""
    bound = quantile(entropies, 0.8)
    high = [value for value in entropies if value >= bound]
    low = [value for value in entropies if value < bound]
    between = (min(high) + max(low)) / 2 if low else min(high) - 1
    return between, len(high), average(high), 0.3


def anchor(entropies: list[float]) -> float:
    """Of all tokens of a minibatch."""
    _, _, mean, start = peaks(entropies)
    return 0.005 * (mean - start) ** 2


def perception(new: float, masked: float) -> float:
    """What is minimized at a token beside the policy term; its bounds are far away."""
    likelier = math.exp(masked) / math.exp(new)
    return -0.02 * (likelier - 1 - math.log(likelier)) - 0.05 * new - 0.05 * masked


END_START = -3.0


def self_reward(rows: list[Row]) -> float:
    """How far off the policy's reward for itself is, both classes counting alike."""
    finished = [row for row in rows if not row.was_cut]
    total = 0.0
    for row in finished:
        alike = sum(other.correct == row.correct for other in finished)
        off = 0.1 * (row.end_logprob + 3) - row.correct
        total += len(finished) / (2 * alike) * off**2
    return 0.1 * total / len(rows)
