"""The metrics that figures show, with heading and unit."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.reporting.metrics_file import PASS_AT, Row, pass_at_ks

OVER_K = "eval/pass_at_k"  # no key of a row: pass@k of one evaluation, over k
SOURCES = "eval/accuracy/"
_MAX_PASS_AT = 4  # panels; all of them are in that over k

HELD_OUT = "Held-out accuracy"
PASS = "pass@k"
REWARD = "Reward in training"
LENGTH = "Length of responses"
_EXPLORATION = "Entropy and KL"
_CLIP = "Clipping and gradient"
_SPEED = "Time"
HEADINGS = (HELD_OUT, PASS, REWARD, LENGTH, _EXPLORATION, _CLIP, _SPEED)


@dataclass(frozen=True)
class Panel:
    """One set of axes: a metric over the steps, or ``OVER_K``."""

    key: str
    title: str
    label: str  # of the y axis, with the unit
    heading: str = ""  # the figure that it is part of
    axis: str = "step"  # label of the x axis; ``step``, or one of powers of 2


_ACCURACY = "share of responses"
_TOKENS = "tokens"
_NATS = "nats"
_CLIPPED = "share of tokens"
_PROMPTS = "share of prompts"
PANELS = (
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
    Panel("mismatch/logprob_abs_diff_max", "Largest gap to the sampler", _NATS, _EXPLORATION),
    Panel("policy/clip_up_positive_share", "Advantage > 0, above the clip", _CLIPPED, _CLIP),
    Panel("policy/clip_down_negative_share", "Advantage < 0, below the clip", _CLIPPED, _CLIP),
    Panel("policy/clip_down_positive_share", "Advantage > 0, below the clip", _CLIPPED, _CLIP),
    Panel("policy/clip_up_negative_share", "Advantage < 0, above the clip", _CLIPPED, _CLIP),
    Panel("optim/grad_norm", "Gradient norm before clipping", "norm", _CLIP),
    Panel("time/step_s", "Duration of a step", "seconds", _SPEED),
    Panel("throughput/response_tokens_per_s", "Throughput", "response tokens/s", _SPEED),
)
# Where the clip takes no gradient away, a panel of zeros says nothing.
_LEFT_OUT_IF_ZERO = ("policy/clip_down_positive_share", "policy/clip_up_negative_share")


def panels_of(trained: Sequence[Row], later: Sequence[Row] = ()) -> list[Panel]:
    """The panels of which some row has a value, in the order of ``HEADINGS``.

    Accuracy of each data source and pass@k are added as the rows have them.

    Args:
        later: rows of evaluations after the training. Of these only pass@k is drawn.
    """
    rows = [*trained, *later]
    present = {key for row in trained for key, value in row.items() if value is not None}
    present |= {f"{PASS_AT}{k}" for k in pass_at_ks(later)}
    panels = [panel for panel in PANELS if panel.key in present]
    for key in sorted(key for key in present if key.startswith(SOURCES)):
        title = f"Held-out accuracy: {key.removeprefix(SOURCES)}"
        panels.append(Panel(key, title, _ACCURACY, HELD_OUT))
    for k in some(pass_at_ks(rows)):
        panels.append(Panel(f"{PASS_AT}{k}", f"Held-out pass@{k}", _PROMPTS, PASS))
    if any(len(pass_at_ks([row])) > 1 for row in rows):
        title = "pass@k over k, last evaluation"
        panels.append(Panel(OVER_K, title, _PROMPTS, PASS, "k (responses)"))
    panels = [panel for panel in panels if not _says_nothing(panel.key, rows)]
    return sorted(panels, key=lambda panel: HEADINGS.index(panel.heading))


def some(ks: Sequence[int]) -> list[int]:
    """A selection of at most ``_MAX_PASS_AT`` values of k, with the first and the last.

    Example: 1, 2, 4, 8, 16, 32, 64 gives 1, 4, 16, 64: places 0, 2, 4 and 6.
    """
    gap = (len(ks) - 1) / (_MAX_PASS_AT - 1)
    return sorted({ks[round(number * gap)] for number in range(_MAX_PASS_AT) if ks})


def _says_nothing(key: str, rows: Sequence[Row]) -> bool:
    """Zeros where those are the rule; pass@1 that is the accuracy, and accuracy that is the mean
    reward: each would be the same panel twice."""
    twins = {f"{PASS_AT}1": "eval/accuracy", "reward/accuracy": "reward/mean"}
    if key in twins:
        return all(row.get(key) == row.get(twins[key]) for row in rows)
    return key in _LEFT_OUT_IF_ZERO and not any(row.get(key) for row in rows)
