"""How a policy works through batches: what is fixed when it is built."""

from dataclasses import dataclass

from megatron_rl.protocols import ImageProcessor


@dataclass(frozen=True)
class PolicySettings:
    """What a policy is built with beside the sections of the configuration.

    Example: ``PolicySettings(temperature=1.0, keep_reference=False, total_optimizer_steps=100,
    max_sequence_tokens=1024, tokens_per_microbatch=8192)``.
    """

    temperature: float  # divides the logits, but where a batch brings temperatures of its own
    keep_reference: bool  # keep the starting weights of this rank's shard, for reference passes
    total_optimizer_steps: int
    max_sequence_tokens: int
    tokens_per_microbatch: int  # prompt + response tokens of one forward on one data-parallel rank
    share_prompts: bool = True  # compute a prompt once for its responses, where attention can
    require_finite: bool = True  # refuse weights of NaN or infinity
    # Weights of the model directory; False: nothing is defined, the reference included, until
    # ``load`` has read a checkpoint.
    read_weights: bool = True
    # The first optimizer steps have a learning-rate schedule of their own, with this peak; None:
    # the peak of the other steps.
    warm_start_steps: int = 0
    warm_start_rate: float | None = None
    # Of a vision-language model, where prompts have images.
    image_processor: ImageProcessor | None = None
