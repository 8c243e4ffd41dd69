"""Statistics of lists of floats, for the plain references."""

import math


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float], ddof: int = 0) -> float:
    middle = average(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - ddof))


def quantile(values: list[float], share: float) -> float:
    """Interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
