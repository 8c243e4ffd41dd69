"""Functions of plug-ins become choices of the configuration, while a plug-in is imported
(``--plugin``); their names are then as good as built-in ones. Pages with tested examples:
``examples/plugins``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.errors import RegistrationError
from megatron_rl.loss.batch import EstimatorNeeds
from megatron_rl.loss.choices import ESTIMATORS, POLICY_LOSSES, SHAPERS, TOKEN_SHAPERS, Function

PLAIN = EstimatorNeeds()


def register_estimator(
    name: str, *, needs: EstimatorNeeds = PLAIN
) -> Callable[[Function], Function]:
    """``f(evidence, *, knobs)`` gives one advantage per response.

    Instead of ``evidence`` a function may name what it reads of it: ``f(rewards, groups, *,
    knobs)``.

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
        schema = ESTIMATORS.enter(name, function, needs.reads, needs=needs)
        if isinstance(needs.min_group, str) and needs.min_group not in schema.model_fields:
            del ESTIMATORS[name]
            raise RegistrationError(
                f"estimator {name}: min_group names the knob {needs.min_group!r}, which it has not"
            )
        return function

    return register


def register_shaper(name: str, *, reads: Sequence[str] = ()) -> Callable[[Function], Function]:
    """``f(advantages, evidence, *, knobs)`` gives the advantages after it, one per response.

    Example::

        @register_shaper("cap")
        def cap(advantages: Tensor, evidence: Evidence, *, limit: float = 2.0) -> Tensor:
            return advantages.clamp(-limit, limit)

    Args:
        reads: columns that a function of ``evidence`` reads by ``evidence.column(name)``; those
            that it names as inputs are known. Signals give them (``megatron_rl/signals``).

    Raises:
        RegistrationError: the name is taken, or a knob has no type.
    """

    def register(function: Function) -> Function:
        SHAPERS.enter(name, function, reads)
        return function

    return register


def register_token_shaper(
    name: str, *, reads: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """``f(advantages, terms, *, knobs)`` gives the advantages after it, one per token.

    Example::

        @register_token_shaper("sharpen")
        def sharpen(advantages: Tensor, entropy: Tensor, *, scale: float = 0.1) -> Tensor:
            return advantages * (1 + scale * entropy)

    Args:
        reads: columns that a function of ``terms`` reads by ``terms.column(name)``, and fields that
            may be missing (``OPTIONAL`` of ``terms.py``); those that it names as inputs are known.

    Raises:
        RegistrationError: the name is taken, or a knob has no type.
    """

    def register(function: Function) -> Function:
        TOKEN_SHAPERS.enter(name, function, reads)
        return function

    return register


def register_policy_loss(
    name: str, *, sequence_ratio: bool = False, clips: bool = False, reads: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """``f(terms, *, knobs)`` gives what is minimized, one value per token, with gradient.

    Example::

        @register_policy_loss("plain")
        def plain(terms: Terms, *, scale: float = 1.0) -> Tensor:
            return -scale * terms.log_ratio.exp() * terms.advantages

    Args:
        sequence_ratio: ``terms.log_ratio`` is the response's mean, as in GSPO, not the token's.
        clips: the loss clips the ratio to [1 - low, 1 + high] of its knobs ``low`` and ``high``, so
            that the shares of clipped tokens are logged. (Bounds that differ from token to token
            are returned: ``response_losses.Clipped``.)
        reads: as for ``register_token_shaper``.

    Raises:
        RegistrationError: the name is taken, a knob has no type, or ``clips`` lacks its two knobs.
    """

    def register(function: Function) -> Function:
        more = {"sequence_ratio": sequence_ratio, "clips": clips}
        schema = POLICY_LOSSES.enter(name, function, reads, **more)
        floats = [knob for knob, info in schema.model_fields.items() if info.annotation is float]
        if clips and not {"low", "high"} <= set(floats):
            del POLICY_LOSSES[name]
            raise RegistrationError(
                f"policy loss {name}: clips=True needs the knobs low: float and high: float"
            )
        return function

    return register
