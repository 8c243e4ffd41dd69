"""Estimators, shapers and policy losses of plug-ins: one function each.

A function has the form of the built-in ones in the tables of ``credit.py`` and ``token_loss.py``. It
is registered while a plug-in is imported (``--plugin``). A method's yaml then chooses the name like
a built-in one, and the knobs, its keyword-only arguments, are validated as strictly. Pages with tested
examples: ``examples/plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_rl.config import method, registry
from megatron_rl.loss import credit, token_loss
from megatron_rl.loss.batch import EstimatorNeeds
from megatron_rl.plugins import RegistrationError

Function = Callable[..., Tensor]
PLAIN = EstimatorNeeds()
READABLE = ("mean_logprobs", "sum_logprobs", "visual_entropy", "kl")


def register_estimator(
    name: str, *, needs: EstimatorNeeds = PLAIN
) -> Callable[[Function], Function]:
    """``f(evidence, *, knobs)`` gives one advantage per response.

    Example::

        @register_estimator("half", needs=EstimatorNeeds(min_group=1))
        def half(evidence: Evidence, *, factor: float = 0.5) -> Tensor:
            return factor * evidence.rewards

    Args:
        needs: what the estimator asks of batch and rewards; refused by message where it is not met.

    Raises:
        RegistrationError: the name is taken, a knob has no type, or ``needs`` is not understood.
    """

    def register(function: Function) -> Function:
        _check_reads(f"estimator {name}", needs.reads)
        piece = registry.register_piece(
            "estimator", method.ESTIMATORS, name, function, ("evidence",)
        )
        if isinstance(needs.min_group, str) and needs.min_group not in piece.model_fields:
            del method.ESTIMATORS[name]
            raise RegistrationError(
                f"estimator {name}: min_group names the knob {needs.min_group!r}, which it has not"
            )
        piece.unit_rewards = needs.unit_rewards
        credit.ESTIMATORS[name] = function
        credit.NEEDS[name] = needs
        return function

    return register


def register_shaper(name: str, *, reads: Sequence[str] = ()) -> Callable[[Function], Function]:
    """``f(advantages, evidence, *, knobs)`` gives the advantages after it, one per response.

    Example::

        @register_shaper("cap")
        def cap(advantages: Tensor, evidence: Evidence, *, limit: float = 2.0) -> Tensor:
            return advantages.clamp(-limit, limit)

    Args:
        reads: optional fields of ResponseBatch that the function reads (``READABLE``).

    Raises:
        RegistrationError: the name is taken, a knob has no type, or ``reads`` is not understood.
    """

    def register(function: Function) -> Function:
        _check_reads(f"shaper {name}", reads)
        positional = ("advantages", "evidence")
        registry.register_piece("shaper", method.SHAPERS, name, function, positional)
        credit.SHAPERS[name] = function
        credit.SHAPER_READS[name] = tuple(reads)
        return function

    return register


def register_policy_loss(
    name: str, *, sequence_ratio: bool = False, clips: bool = False
) -> Callable[[Function], Function]:
    """``f(terms, *, knobs)`` gives what is minimized, one value per token, with gradient.

    Example::

        @register_policy_loss("plain")
        def plain(terms: Terms, *, scale: float = 1.0) -> Tensor:
            return -scale * terms.log_ratio.exp() * terms.advantages

    Args:
        sequence_ratio: ``terms.log_ratio`` is the response's mean, as in GSPO, not the token's.
        clips: the loss clips the ratio to [1 - low, 1 + high] of its knobs ``low`` and ``high``, so
            that the shares of clipped tokens are logged.

    Raises:
        RegistrationError: the name is taken, a knob has no type, or ``clips`` lacks its two knobs.
    """

    def register(function: Function) -> Function:
        piece = registry.register_piece(
            "policy loss", method.POLICY_LOSSES, name, function, ("terms",)
        )
        floats = [knob for knob, info in piece.model_fields.items() if info.annotation is float]
        if clips and not {"low", "high"} <= set(floats):
            del method.POLICY_LOSSES[name]
            raise RegistrationError(
                f"policy loss {name}: clips=True needs the knobs low: float and high: float"
            )
        token_loss.POLICY_LOSSES[name] = function
        if sequence_ratio:
            token_loss.SEQUENCE_RATIO.add(name)
        if clips:
            token_loss.CLIPS.add(name)
        return function

    return register


def _check_reads(subject: str, reads: Sequence[str]) -> None:
    for field in reads:
        if field not in READABLE:
            raise RegistrationError(
                f"{subject}: reads {field!r}, which is none of {', '.join(READABLE)}; "
                "rewards, correct, lengths and groups are always there"
            )
