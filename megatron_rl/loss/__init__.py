"""Credit assignment and losses, in pure torch: ``load_method(name)``, then ``credit`` per response and ``loss`` per token."""

from megatron_rl.loss.batch import Credit, LossResult, Needs, ResponseBatch, TokenBatch
from megatron_rl.loss.method import Method, load_method

__all__ = ["Credit", "LossResult", "Method", "Needs", "ResponseBatch", "TokenBatch", "load_method"]
