"""Functions that a method chooses by name, and the decorators that enter them into the tables.

A signature says everything: arguments before the star are inputs, each named after a field or
property of ``Evidence`` (per response) or ``Terms`` (per token), or after a column that a signal
gives (``megatron_rl/signals``); keyword-only arguments after it are knobs, whose types and defaults
become the schema of a yaml (``knobs.py``). What a function needs of the batch, and where it is
defined, stands in its decorator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_rl.knobs import Choices, Named, new_schema
from megatron_rl.loss.batch import EstimatorNeeds, Knobs
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_token.terms import OPTIONAL, Terms

Function = Callable[..., Any]  # a tensor, or ``Clipped``
Decorator = Callable[[Function], Function]


@dataclass(frozen=True)
class Form:
    """How a function of one kind is called: ``leading`` inputs first, then those of ``source``.

    Example: a shaper is ``f(advantages, evidence, *, knobs)``, or names what it reads of the
    evidence: ``f(advantages, correct, lengths, *, knobs)``.
    """

    source: type
    whole: str  # name of the source itself as an input
    leading: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # of the names, those that a batch may lack

    @cached_property
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
        """The names of a function's inputs; the usual ones where it calls all of them otherwise."""
        leading = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(function).parameters.values()
        # What has a default is meant as a knob, and refused where the knobs are read.
        given = tuple(p.name for p in parameters if p.kind is leading and p.default is p.empty)
        return given if self.names & {*given} else self.usual

    def reads_of(self, inputs: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
        """The columns among the inputs of a function, and ``others``."""
        columns = [name for name in inputs if name not in self.names or name in self.optional]
        return tuple(dict.fromkeys([*columns, *others]))


PER_RESPONSE = Form(Evidence, "evidence")
SHAPING = Form(Evidence, "evidence", ("advantages",))
PER_TOKEN = Form(Terms, "terms", (), OPTIONAL)
TOKEN_SHAPING = Form(Terms, "terms", ("advantages",), OPTIONAL)


@dataclass(frozen=True)
class Choice:
    """A function under a name of a method's yaml.

    Attributes:
        reads: the columns that it reads.
        schema: its knobs, as the configuration checks them.
    """

    function: Function
    inputs: tuple[str, ...]
    form: Form
    reads: tuple[str, ...]
    schema: type[Named]

    def __call__(self, source: Evidence | Terms, knobs: Knobs, *leading: Tensor) -> Any:
        """The function's value, whatever a plug-in returns.

        ``leading`` are the inputs that ``source`` does not hold.
        """
        given: dict[str, Any] = dict(zip(self.form.leading, leading, strict=True))
        given[self.form.whole] = source
        for name in self.inputs:
            if name not in given:
                known = name in self.form.names
                given[name] = getattr(source, name) if known else source.column(name)
        return self.function(*[given[name] for name in self.inputs], **knobs)


@dataclass(frozen=True)
class Estimator(Choice):
    """Evidence -> one advantage per response."""

    needs: EstimatorNeeds


@dataclass(frozen=True)
class PolicyLoss(Choice):
    """Terms -> what is minimized, per token."""

    sequence_ratio: bool  # log_ratio is the response's mean, not the token's
    clips: bool  # to [1 - low, 1 + high] of its knobs, so that clipped shares are logged


class FunctionTable(Choices):
    """The functions of one kind, each a ``Choice`` under its name."""

    def __init__(self, what: str, form: Form, kind: type[Choice] = Choice) -> None:
        super().__init__(what)
        self.form = form
        self._kind = kind

    def schema(self, name: str) -> type[Named]:
        return self[name].schema

    def enter(
        self, name: str, function: Function, reads: Sequence[str] = (), **more: Any
    ) -> type[Named]:
        """Makes ``function`` callable by name; returns the schema of its knobs.

        Args:
            reads: columns that it reads beside its inputs.
            more: further fields of the kind's ``Choice``.

        Raises:
            RegistrationError: the name is taken, or the signature is not of the kind's form.
        """
        inputs = self.form.inputs_of(function)
        schema = new_schema(self, name, function, inputs)
        columns = self.form.reads_of(inputs, reads)
        self[name] = self._kind(function, inputs, self.form, columns, schema, **more)
        return schema


ESTIMATORS = FunctionTable("estimator", PER_RESPONSE, Estimator)
SHAPERS = FunctionTable("shaper", SHAPING)
TOKEN_SHAPERS = FunctionTable("token shaper", TOKEN_SHAPING)
POLICY_LOSSES = FunctionTable("policy loss", PER_TOKEN, PolicyLoss)
AGGREGATIONS = FunctionTable("aggregation", PER_TOKEN)
KL_WEIGHTS = FunctionTable("KL weight", PER_RESPONSE)
CORRECTIONS = FunctionTable("mismatch correction", PER_TOKEN)


def _entering(table: FunctionTable, name: str | None = None, **more: Any) -> Decorator:
    """Enters a function into ``table`` under ``name``, or its own."""

    def enter(function: Function) -> Function:
        table.enter(name or function.__name__, function, **more)
        return function

    return enter


def estimator(**needs: Any) -> Decorator:
    """Enters one advantage per response under the function's name; ``needs``: EstimatorNeeds."""
    wanted = EstimatorNeeds(**needs)
    return _entering(ESTIMATORS, reads=wanted.reads, needs=wanted)


def policy_loss(*, sequence_ratio: bool = False, clips: bool = False) -> Decorator:
    """Enters what is minimized at each token under the function's name; see ``PolicyLoss``."""
    return _entering(POLICY_LOSSES, sequence_ratio=sequence_ratio, clips=clips)


def correction(name: str) -> Decorator:
    """Enters weights of the policy term, chosen by ``mismatch.kind``, under ``name``."""
    return _entering(CORRECTIONS, name)


shaper = _entering(SHAPERS)  # advantages -> advantages
token_shaper = _entering(TOKEN_SHAPERS)  # advantages of tokens -> advantages of tokens
aggregation = _entering(AGGREGATIONS)  # the weight of each token
kl_weight = _entering(KL_WEIGHTS)  # the factor of kl.coef at each response
