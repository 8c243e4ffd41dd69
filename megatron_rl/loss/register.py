"""Functions become choices of the configuration: the package's own, and those of plug-ins.

The tables of ``choices.py`` hold what is called, those of ``config/method.py`` the schema of its
knobs, read from the function's signature. Importing this module enters the package's own; a
plug-in registers while it is imported (``--plugin``), and its names are then as good as built-in
ones. Pages with tested examples: ``examples/plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config import method, registry
from megatron_rl.config.pieces import Choices, Named
from megatron_rl.errors import RegistrationError
from megatron_rl.loss import choices
from megatron_rl.loss.batch import EstimatorNeeds
from megatron_rl.loss.choices import Function
from megatron_rl.loss.per_response import advantages, histories, shaping
from megatron_rl.loss.per_token import (
    aggregate,
    demonstrations,
    kl,
    mismatch,
    policy_losses,
    response_losses,
    token_advantages,
)

PLAIN = EstimatorNeeds()
# Their decorators have filled the tables below.
FILES = (
    advantages,
    histories,
    shaping,
    token_advantages,
    policy_losses,
    response_losses,
    demonstrations,
    aggregate,
    kl,
    mismatch,
)


def _own() -> Iterator[tuple[Choices, Mapping[str, choices.Choice]]]:
    """The tables of the configuration, each with the functions whose knobs it describes."""
    yield method.ESTIMATORS, choices.ESTIMATORS
    yield method.SHAPERS, choices.SHAPERS
    yield method.TOKEN_SHAPERS, choices.TOKEN_SHAPERS
    yield method.POLICY_LOSSES, choices.POLICY_LOSSES
    yield method.AGGREGATIONS, choices.AGGREGATIONS
    yield method.KL_WEIGHTS, choices.KL_WEIGHTS
    yield method.CORRECTIONS, choices.CORRECTIONS


def _describe_own() -> None:
    """Gives the configuration the schema of every function of the package."""
    for table, functions in _own():
        for name, choice in functions.items():
            subject = f"{table.what} {name}"
            schema = registry.knob_class(subject, name, choice.function, choice.inputs)
            schema.__module__ = choice.function.__module__
            table[name] = schema
            if isinstance(choice, choices.Estimator):
                _take_domain(schema, choice.needs)
    method.KL_ESTIMATORS.update(dict.fromkeys(kl.ESTIMATORS, Named))


def _take_domain(schema: type[Named], needs: EstimatorNeeds) -> None:
    """What the configuration can check of an estimator's needs before anything runs."""
    schema.unit_rewards = needs.unit_rewards
    schema.check_knobs = staticmethod(needs.check_knobs or _no_problem)
    schema.check_rewards = staticmethod(needs.check_rewards or _no_problem)


def _no_problem(*_: Any, **__: Any) -> None:
    return None


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
        inputs = choices.PER_RESPONSE.inputs_of(function)
        schema = registry.register_piece("estimator", method.ESTIMATORS, name, function, inputs)
        if isinstance(needs.min_group, str) and needs.min_group not in schema.model_fields:
            del method.ESTIMATORS[name]
            raise RegistrationError(
                f"estimator {name}: min_group names the knob {needs.min_group!r}, which it has not"
            )
        _take_domain(schema, needs)
        choices.enter_estimator(name, function, needs)
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
        inputs = choices.SHAPING.inputs_of(function)
        registry.register_piece("shaper", method.SHAPERS, name, function, inputs)
        choices.SHAPERS[name] = choices.choice(choices.SHAPING, function, reads)
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
        inputs = choices.TOKEN_SHAPING.inputs_of(function)
        registry.register_piece("token shaper", method.TOKEN_SHAPERS, name, function, inputs)
        choices.TOKEN_SHAPERS[name] = choices.choice(choices.TOKEN_SHAPING, function, reads)
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
        inputs = choices.PER_TOKEN.inputs_of(function)
        schema = registry.register_piece(
            "policy loss", method.POLICY_LOSSES, name, function, inputs
        )
        floats = [knob for knob, info in schema.model_fields.items() if info.annotation is float]
        if clips and not {"low", "high"} <= set(floats):
            del method.POLICY_LOSSES[name]
            raise RegistrationError(
                f"policy loss {name}: clips=True needs the knobs low: float and high: float"
            )
        choices.enter_policy_loss(name, function, sequence_ratio, clips, reads)
        return function

    return register


_describe_own()
