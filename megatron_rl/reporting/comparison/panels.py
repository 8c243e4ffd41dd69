"""The metrics that figures show, with heading and unit, and their drawings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.reporting.comparison.curves import pass_band, smoothing_width, variant_band
from megatron_rl.reporting.comparison.drawing import Drawing, write_png
from megatron_rl.reporting.comparison.runs import Run
from megatron_rl.reporting.comparison.variants import Variant, all_runs
from megatron_rl.reporting.metrics_file import PASS_AT, Row, is_held_out, pass_at_ks, read_metrics

SOURCES = "eval/accuracy/"
_MAX_PASS_AT = 4  # panels; all of them are in the figure over k

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
    """A metric over the steps."""

    key: str
    title: str
    label: str  # of the y axis, with the unit
    heading: str  # the figure that it is part of


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


def drawings_of(variants: Sequence[Variant]) -> dict[str, list[Drawing]]:
    """All that the runs have values for, by heading; pass@k over k is the last of its own."""
    width = smoothing_width(variants)
    drawings: dict[str, list[Drawing]] = {heading: [] for heading in HEADINGS}
    for panel in panels_of(variants):
        bands = [variant_band(variant, panel.key, width) for variant in variants]
        drawing = Drawing(panel.title, panel.label, bands, is_held_out(panel.key))
        drawings[panel.heading].append(drawing)
    over_k = [pass_band(variant) for variant in variants]
    if any(over_k):
        title = "pass@k over k, last evaluation"
        drawings[PASS].append(Drawing(title, _PROMPTS, over_k, True, "k (responses)"))
    return drawings


def draw_curves(metrics_jsonl: Path, out: Path) -> None:
    """Draws all curves of one run into ``out``, a PNG, named after the run's folder.

    Raises:
        ValueError: no metrics file, or nothing in it to draw.
    """
    rows = read_metrics(metrics_jsonl)
    name = metrics_jsonl.resolve().parent.name
    variants = [Variant(name, (Run(metrics_jsonl.parent, name, {}, {}, rows, [], True),))]
    drawings = [each for group in drawings_of(variants).values() for each in group] if rows else []
    if not drawings:
        raise ValueError(
            f"{metrics_jsonl}: has none of the metrics of the figure; let the run finish a step"
        )
    write_png(drawings, [name], out)


def panels_of(variants: Sequence[Variant]) -> list[Panel]:
    """The panels of which some run has a value, in the order of ``HEADINGS``.

    Accuracy of each data source and pass@k are added as the runs have them.
    """
    trained: list[Row] = []
    later: list[Row] = []
    for run in all_runs(variants):
        trained += run.rows
        later += run.evaluation
    rows = [*trained, *later]
    present = {key for row in trained for key, value in row.items() if value is not None}
    # Of an evaluation after the training only pass@k is drawn; all of it stands in a table.
    present |= {f"{PASS_AT}{k}" for k in pass_at_ks(later)}
    panels = [panel for panel in PANELS if panel.key in present]
    for key in sorted(key for key in present if key.startswith(SOURCES)):
        title = f"Held-out accuracy: {key.removeprefix(SOURCES)}"
        panels.append(Panel(key, title, _ACCURACY, HELD_OUT))
    for k in some(pass_at_ks(rows)):
        panels.append(Panel(f"{PASS_AT}{k}", f"Held-out pass@{k}", _PROMPTS, PASS))
    panels = [panel for panel in panels if not _says_nothing(panel.key, rows)]
    return sorted(panels, key=lambda panel: HEADINGS.index(panel.heading))


def some(ks: Sequence[int]) -> list[int]:
    """A selection of at most ``_MAX_PASS_AT`` values of k, with the first and the last.

    Example: 1, 2, 4, 8, 16, 32, 64 gives 1, 4, 16, 64: places 0, 2, 4 and 6.
    """
    if len(ks) <= _MAX_PASS_AT:
        return list(ks)
    gap = (len(ks) - 1) / (_MAX_PASS_AT - 1)
    return [ks[round(number * gap)] for number in range(_MAX_PASS_AT)]


def _says_nothing(key: str, rows: Sequence[Row]) -> bool:
    """Zeros where those are the rule; pass@1 that is the accuracy, and accuracy that is the mean
    reward: each would be the same panel twice."""
    twins = {f"{PASS_AT}1": "eval/accuracy", "reward/accuracy": "reward/mean"}
    if key in twins:
        return all(row.get(key) == row.get(twins[key]) for row in rows)
    return key in _LEFT_OUT_IF_ZERO and not any(row.get(key) for row in rows)
