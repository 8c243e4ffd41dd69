"""The metrics that curves show, with heading and unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.reporting.comparison.variants import Variant, all_runs
from megatron_rl.reporting.metrics_file import Row, is_held_out
from megatron_rl.reporting.pass_at_k import PASS_AT, pass_at_ks

SOURCES = "eval/accuracy/"
_MAX_PASS_AT = 4  # panels; all of them are in the figure over k

HELD_OUT = "Held-out accuracy"
PASS = "pass@k"
REWARD = "Reward in training"
LENGTH = "Length of responses"
_EXPLORATION = "Entropy and KL"
_CLIPPING = "Clipping and gradient"
_SPEED = "Time"


@dataclass(frozen=True)
class Panel:
    """One set of axes: a metric over the steps.

    Attributes:
        label: of the y axis, with the unit.
    """

    key: str
    title: str
    label: str
    heading: str

    @property
    def held_out(self) -> bool:
        """Taken at a few steps, and not smoothed."""
        return is_held_out(self.key)


_ACCURACY = "share of responses"
_TOKENS = "tokens"
_NATS = "nats"
_CLIPPED = "share of tokens"
_PROMPTS = "share of prompts"
_FIXED = (
    Panel("eval/accuracy", "Held-out accuracy", _ACCURACY, HELD_OUT),
    Panel("reward/mean", "Reward, mean of the step", "reward", REWARD),
    Panel("reward/accuracy", "Accuracy in training", _ACCURACY, REWARD),
    Panel("rollout/response_tokens_correct_mean", "Length of right responses", _TOKENS, LENGTH),
    Panel("rollout/response_tokens_wrong_mean", "Length of wrong responses", _TOKENS, LENGTH),
    Panel("rollout/response_tokens_mean", "Length of all responses", _TOKENS, LENGTH),
    Panel("rollout/truncated_share", "Cut by the length limit", _ACCURACY, LENGTH),
    Panel("eval/response_tokens_mean", "Length of held-out responses", _TOKENS, LENGTH),
    Panel("rollout/entropy", "Entropy at the start of the step", _NATS, _EXPLORATION),
    Panel("entropy/mean", "Entropy during the update", _NATS, _EXPLORATION),
    Panel("kl/reference_mean", "KL to the reference", _NATS, _EXPLORATION),
    Panel("policy/kl_old_mean", "KL to the policy that sampled", _NATS, _EXPLORATION),
    Panel(
        "policy/clip_up_positive_share", "Advantage > 0, ratio above the clip", _CLIPPED, _CLIPPING
    ),
    Panel(
        "policy/clip_down_negative_share",
        "Advantage < 0, ratio below the clip",
        _CLIPPED,
        _CLIPPING,
    ),
    Panel(
        "policy/clip_down_positive_share",
        "Advantage > 0, ratio below the clip",
        _CLIPPED,
        _CLIPPING,
    ),
    Panel(
        "policy/clip_up_negative_share", "Advantage < 0, ratio above the clip", _CLIPPED, _CLIPPING
    ),
    Panel("optim/grad_norm", "Gradient norm before clipping", "norm", _CLIPPING),
    Panel("time/step_s", "Duration of a step", "seconds", _SPEED),
    Panel("throughput/response_tokens_per_s", "Throughput", "response tokens/s", _SPEED),
)
HEADINGS = (HELD_OUT, PASS, REWARD, LENGTH, _EXPLORATION, _CLIPPING, _SPEED)
# Where the clip takes no gradient away, a panel of zeros says nothing.
_LEFT_OUT_IF_ZERO = ("policy/clip_down_positive_share", "policy/clip_up_negative_share")


def panels_of(variants: Sequence[Variant]) -> list[Panel]:
    """The panels of which some run has a value, in the order of ``HEADINGS``.

    Accuracy of each data source and pass@k are added as the runs have them.
    """
    trained: list[Row] = []
    later: list[Row] = []
    for run in all_runs(variants):
        trained += run.rows
        later += run.evaluation
    present: set[str] = set()
    for row in trained:
        present.update(key for key, value in row.items() if value is not None)
    # Of an evaluation after the training only pass@k is drawn; all of it stands in a table.
    present |= {f"{PASS_AT}{k}" for k in pass_at_ks(later)}
    every_row = [*trained, *later]
    sources = sorted(key for key in present if key.startswith(SOURCES))
    by_source = [
        Panel(key, f"Held-out accuracy: {key.removeprefix(SOURCES)}", _ACCURACY, HELD_OUT)
        for key in sources
    ]
    passes = [
        Panel(f"{PASS_AT}{k}", f"Held-out pass@{k}", _PROMPTS, PASS)
        for k in some(pass_at_ks(every_row))
    ]
    panels = [panel for panel in (*_FIXED, *by_source, *passes) if panel.key in present]
    panels = [panel for panel in panels if not _says_nothing(panel, every_row)]
    return sorted(panels, key=lambda panel: HEADINGS.index(panel.heading))


def unit_of(key: str) -> str | None:
    """The label that the panel of a metric has on its y axis; None: no panel shows this one."""
    if key.startswith(SOURCES):
        return _ACCURACY
    if key.startswith(PASS_AT):
        return _PROMPTS
    labels = {panel.key: panel.label for panel in _FIXED}
    return labels.get(key)


def some(ks: Sequence[int]) -> list[int]:
    """A selection of at most ``_MAX_PASS_AT`` values of k, with the first and the last.

    Example: 1, 2, 4, 8, 16, 32, 64 gives 1, 4, 16, 64: places 0, 2, 4 and 6.
    """
    if len(ks) <= _MAX_PASS_AT:
        return list(ks)
    gap = (len(ks) - 1) / (_MAX_PASS_AT - 1)
    return [ks[round(number * gap)] for number in range(_MAX_PASS_AT)]


def _says_nothing(panel: Panel, rows: Sequence[Row]) -> bool:
    """Zeros where those are the rule; pass@1 that is the accuracy, and accuracy that is the mean
    reward: each would be the same panel twice."""
    if panel.key in _LEFT_OUT_IF_ZERO:
        return not any(row.get(panel.key) for row in rows)
    if panel.key == f"{PASS_AT}1":
        return all(row.get(panel.key) == row.get("eval/accuracy") for row in rows)
    if panel.key == "reward/accuracy":
        return all(row.get(panel.key) == row.get("reward/mean") for row in rows)
    return False
