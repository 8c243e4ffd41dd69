"""The runs of the trainer's tests."""

from tests.unit.trainer.conftest import build

__all__ = ["build"]
