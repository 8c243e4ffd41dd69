"""Rewards. What a plug-in or a reward function needs is here; nothing of it imports torch."""

from megatron_rl.rewards.base import Options, Task, Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier

__all__ = ["Options", "Task", "Verdict", "Verifier", "register_verifier"]
