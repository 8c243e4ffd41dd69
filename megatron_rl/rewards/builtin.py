"""Importing this registers the package's own verifiers."""

from megatron_rl.rewards import code, exact, math_answers, number, reasoning_gym

__all__ = ["code", "exact", "math_answers", "number", "reasoning_gym"]
