"""Importing this registers the package's own verifiers."""

from megatron_rl.rewards import code, exact, generated, math_answers, number

__all__ = ["code", "exact", "generated", "math_answers", "number"]
