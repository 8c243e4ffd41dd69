"""How a policy works through batches: what is fixed when it is built."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.protocols import Entropy, ImageProcessor


@dataclass(frozen=True)
class PolicySettings:
    """What a policy is built with beside the sections of the configuration.

    Example: ``PolicySettings(temperature=1.0, keep_reference=False, total_optimizer_steps=100,
    max_sequence_tokens=1024, tokens_per_microbatch=8192, entropy="value")``.
    """

    temperature: float  # divides the logits, but where a batch brings temperatures of its own
    keep_reference: bool  # keep the starting weights of this rank's shard, for reference passes
    total_optimizer_steps: int
    max_sequence_tokens: int
    tokens_per_microbatch: int  # prompt + response tokens of one forward on one data-parallel rank
    share_prompts: bool = True  # compute a prompt once for its responses, where attention can
    entropy: Entropy = "none"  # what scores hold, and "grad": what a loss gets
    entropy_in_loss: bool = False  # a loss gets them without gradient too
    top_k: int = 0  # a loss gets the logprobs of so many most likely tokens; 0: of none
    nucleus: float = 0.0  # a loss gets entropies of the nucleus of this probability; 0: of none
    require_finite: bool = True  # refuse weights of NaN or infinity
    # Weights of the model directory; False: nothing is defined, the reference included, until
    # ``load`` has read a checkpoint.
    read_weights: bool = True
    image_processor: ImageProcessor | None = None  # of a model that sees, where prompts have images

    def problems(self, vocab_size: int) -> list[str]:
        """What a model of so many tokens cannot give."""
        if self.top_k <= vocab_size:
            return []
        return [
            f"method.policy_loss.top_k = {self.top_k}: the model has {vocab_size} tokens; choose at"
            " most that"
        ]
