"""What the pass of an update tells of the distribution of each token."""

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.models import read_architecture
from megatron_rl.passes import Output
from megatron_rl.signals.base import Signal
from megatron_rl.signals.registry import register_signal
from megatron_rl.types import Prompt


@register_signal
class Entropy(Signal):
    """``entropy``: of the current policy over the whole vocabulary, in nats."""

    about = "the entropy of every token in the loss"
    token_columns = ("entropy",)

    def __init__(self, *, gradient: bool = False) -> None:
        self.update_outputs = (Output("entropy", gradient=gradient),)


@register_signal
class MostLikelyTokens(Signal):
    """``topk_logprobs``: of the ``top_k`` most likely tokens, most likely first, with gradient."""

    about = "the logprobs of the most likely tokens in the loss"
    token_columns = ("topk_logprobs",)

    def __init__(self, *, top_k: int) -> None:
        self._top_k = top_k
        self.update_outputs = (Output("topk_logprobs", top_k, gradient=True),)

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        _check_top_k(self._top_k, config)


@register_signal
class SamplersMostLikelyTokens(Signal):
    """Of the ``top_k`` tokens that were most likely to the sampler, most likely first:
    ``sampler_likely_logprobs`` as it had them, which come with the responses, and
    ``likely_logprobs`` of the current policy, with gradient. Slots without a token have -inf in
    both: those of tokens that were not sampled.
    """

    about = (
        "the logprobs of the sampler's most likely tokens, its own and the policy's, in the loss"
    )
    token_columns = ("likely_logprobs", "sampler_likely_logprobs")
    update_outputs = (Output("likely_logprobs", gradient=True),)

    def __init__(self, *, top_k: int) -> None:
        self.num_likely = top_k

    def check(self, prompts: Iterable[Prompt], config: Config) -> None:
        _check_top_k(self.num_likely + 1, config)  # engines are asked for one more
        without = {
            "source.schedule = free": config.source.schedule == "free",
            "source.partial.groups_in_flight": config.source.is_partial,
        }
        for key, is_on in without.items():
            if is_on:
                raise ValueError(
                    f"{key}: responses that are recorded or continued come without the sampler's"
                    " most likely tokens, which the method reads; leave it out, or choose another"
                    " method"
                )


def _check_top_k(num_tokens: int, config: Config) -> None:
    vocab_size = read_architecture(Path(config.model.path))[0].vocab_size
    if num_tokens > vocab_size:
        raise ValueError(
            f"method.policy_loss.top_k: {num_tokens} tokens are read, and the model has"
            f" {vocab_size}; choose fewer"
        )


@register_signal
class IsArgmax(Signal):
    """``is_argmax``: no token is more likely than the sampled one."""

    about = "whether the sampled token is the most likely one"
    token_columns = ("is_argmax",)
    update_outputs = (Output("is_argmax"),)
