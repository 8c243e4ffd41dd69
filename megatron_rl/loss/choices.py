"""Functions that a method chooses by name, and the decorators that enter them into the tables.

A signature says everything: arguments before the star are inputs, each named after a field or
property of ``Evidence`` (per response) or ``Terms`` (per token); keyword-only arguments after it
are knobs, whose types and defaults become the schema of a yaml (``register.py``). What a function
needs of the batch, and where it is defined, stands in its decorator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from megatron_rl.loss.batch import EstimatorNeeds
from megatron_rl.loss.per_response import evidence
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_token.terms import OPTIONAL, Terms

Function = Callable[..., Any]  # a tensor, or ``Clipped``
Knobs = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """How a function of one kind is called: ``leading`` inputs first, then those of ``source``.

    Example: a shaper is ``f(advantages, evidence, *, knobs)``, or names what it reads of the
    evidence: ``f(advantages, correct, lengths, *, knobs)``.
    """

    source: type
    whole: str  # name of the source itself as an input
    leading: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Every input that a function may name."""
        computed = {key for key, value in vars(self.source).items() if isinstance(value, property)}
        stored = {field.name for field in fields(self.source)}
        return {self.whole, *self.leading, *stored, *computed}

    @property
    def usual(self) -> tuple[str, ...]:
        """The inputs of a function that takes the source as a whole."""
        return (*self.leading, self.whole)

    def inputs_of(self, function: Function) -> tuple[str, ...]:
        """The names of a function's inputs; the usual ones where it calls them otherwise."""
        parameters = inspect.signature(function).parameters.values()
        given = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        return given if given and self.names.issuperset(given) else self.usual


PER_RESPONSE = Form(Evidence, "evidence")
SHAPING = Form(Evidence, "evidence", ("advantages",))
PER_TOKEN = Form(Terms, "terms")
TOKEN_SHAPING = Form(Terms, "terms", ("advantages",))


@dataclass(frozen=True)
class Choice:
    """A function under a name of a method's yaml."""

    function: Function
    inputs: tuple[str, ...]
    form: Form

    def __call__(self, source: Evidence | Terms, knobs: Knobs, *leading: Tensor) -> Any:
        """The function's value, whatever a plug-in returns.

        ``leading`` are the inputs that ``source`` does not hold.
        """
        given: dict[str, Any] = dict(zip(self.form.leading, leading, strict=True))
        given[self.form.whole] = source
        for name in self.inputs:
            if name not in given:
                given[name] = getattr(source, name)
        return self.function(*[given[name] for name in self.inputs], **knobs)


@dataclass(frozen=True)
class Estimator(Choice):
    """Evidence -> one advantage per response."""

    needs: EstimatorNeeds


@dataclass(frozen=True)
class Shaper(Choice):
    """Advantages and evidence -> advantages."""

    reads: tuple[str, ...] = ()  # optional fields of ResponseBatch


@dataclass(frozen=True)
class OfTokens(Choice):
    """A function of ``Terms``. ``reads``: optional fields of TokenBatch, by their names."""

    reads: tuple[str, ...]


@dataclass(frozen=True)
class PolicyLoss(OfTokens):
    """Terms -> what is minimized, per token."""

    sequence_ratio: bool  # log_ratio is the response's mean, not the token's
    clips: bool  # to [1 - low, 1 + high] of its knobs, so that clipped shares are logged


ESTIMATORS: dict[str, Estimator] = {}
SHAPERS: dict[str, Shaper] = {}
TOKEN_SHAPERS: dict[str, OfTokens] = {}
POLICY_LOSSES: dict[str, PolicyLoss] = {}
AGGREGATIONS: dict[str, OfTokens] = {}
KL_WEIGHTS: dict[str, Choice] = {}
CORRECTIONS: dict[str, Choice] = {}


def enter_estimator(name: str, function: Function, needs: EstimatorNeeds) -> None:
    """Makes an estimator callable by name; its knobs are described in ``register.py``."""
    inputs = PER_RESPONSE.inputs_of(function)
    ESTIMATORS[name] = Estimator(function, inputs, PER_RESPONSE, needs)


def enter_shaper(name: str, function: Function, reads: Sequence[str] = ()) -> None:
    """Makes a shaper callable by name."""
    inputs = SHAPING.inputs_of(function)
    named = [name for name in evidence.OPTIONAL if name in inputs and name not in reads]
    SHAPERS[name] = Shaper(function, inputs, SHAPING, (*reads, *named))


def enter_token_shaper(name: str, function: Function, reads: Sequence[str] = ()) -> None:
    """Makes a token shaper callable by name."""
    inputs = TOKEN_SHAPING.inputs_of(function)
    read = token_reads(inputs, reads)
    TOKEN_SHAPERS[name] = OfTokens(function, inputs, TOKEN_SHAPING, read)


def enter_policy_loss(
    name: str,
    function: Function,
    sequence_ratio: bool,
    clips: bool,
    reads: Sequence[str] = (),
) -> None:
    """Makes a policy loss callable by name."""
    inputs = PER_TOKEN.inputs_of(function)
    read = token_reads(inputs, reads)
    POLICY_LOSSES[name] = PolicyLoss(function, inputs, PER_TOKEN, read, sequence_ratio, clips)


def token_reads(inputs: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """The optional fields of TokenBatch among the inputs of a function, and ``others``."""
    return tuple(name for name in OPTIONAL if name in inputs or name in others)


def _name(function: Function) -> str:
    return function.__name__


def estimator(**needs: Any) -> Callable[[Function], Function]:
    """Enters one advantage per response under the function's name; ``needs``: EstimatorNeeds."""

    def enter(function: Function) -> Function:
        enter_estimator(_name(function), function, EstimatorNeeds(**needs))
        return function

    return enter


def shaper(function: Function) -> Function:
    """Enters advantages -> advantages under the function's name."""
    enter_shaper(_name(function), function)
    return function


def token_shaper(function: Function) -> Function:
    """Enters advantages of tokens -> advantages of tokens under the function's name."""
    enter_token_shaper(_name(function), function)
    return function


def policy_loss(
    *, sequence_ratio: bool = False, clips: bool = False
) -> Callable[[Function], Function]:
    """Enters what is minimized at each token under the function's name; see ``PolicyLoss``."""

    def enter(function: Function) -> Function:
        enter_policy_loss(_name(function), function, sequence_ratio, clips)
        return function

    return enter


def aggregation(function: Function) -> Function:
    """Enters the weight of each token under the function's name."""
    inputs = PER_TOKEN.inputs_of(function)
    AGGREGATIONS[_name(function)] = OfTokens(function, inputs, PER_TOKEN, token_reads(inputs, ()))
    return function


def kl_weight(function: Function) -> Function:
    """Enters the factor of kl.coef at each response under the function's name."""
    inputs = PER_RESPONSE.inputs_of(function)
    KL_WEIGHTS[_name(function)] = Choice(function, inputs, PER_RESPONSE)
    return function


def correction(name: str) -> Callable[[Function], Function]:
    """Enters weights of the policy term, chosen by ``mismatch.kind``, under ``name``."""

    def enter(function: Function) -> Function:
        CORRECTIONS[name] = Choice(function, PER_TOKEN.inputs_of(function), PER_TOKEN)
        return function

    return enter
