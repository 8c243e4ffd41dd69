"""Importing this registers the package's own verifiers."""

from megatron_rl.rewards import choice, code, exact, math_answers, number, reasoning_gym

__all__ = ["choice", "code", "exact", "math_answers", "number", "reasoning_gym"]
