"""The runs of the trainer's tests."""

from tests.unit.trainer.conftest import build, figure, plain_figure

__all__ = ["build", "figure", "plain_figure"]
