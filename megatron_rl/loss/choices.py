"""Functions that a method chooses by name, and the decorators that enter them into the tables.

A signature says everything: arguments before the star are inputs, each named after a field or
property of ``Evidence`` (per response) or ``Terms`` (per token), or after a column that a signal
gives (``megatron_rl/signals``); ``evidence`` or ``terms`` is the whole of it. Keyword-only
arguments after the star are knobs, whose types and defaults become the schema of a yaml
(``knobs.py``). What a function needs of the batch stands in its decorator.

``register_*`` are for plug-ins, which give a name (``--plugin``; pages with tested examples:
``examples/plugins``). They raise RegistrationError where the name is taken or a knob has no type.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from megatron_rl.errors import RegistrationError
from megatron_rl.knobs import Choices, Named, new_schema
from megatron_rl.loss.batch import EstimatorNeeds, Knobs, Reading
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_token.terms import OPTIONAL, Terms

Function = Callable[..., Any]  # a tensor, or ``Clipped``
Decorator = Callable[[Function], Function]


def inputs_of(source: type[Evidence] | type[Terms]) -> set[str]:
    """What a function may name beside columns: the source as a whole, its fields and properties."""
    computed = {key for key, value in vars(source).items() if isinstance(value, property)}
    return {source.__name__.lower(), *computed, *(field.name for field in fields(source))}


@dataclass(frozen=True)
class Choice:
    """A function under a name of a method's yaml."""

    name: str
    function: Function
    inputs: tuple[str, ...]
    reads: tuple[str, ...]  # the columns that it reads
    schema: type[Named]  # its knobs, as the configuration checks them

    def __call__(self, source: Evidence | Terms, knobs: Knobs, **leading: Tensor) -> Any:
        """The function's value, whatever a plug-in returns.

        ``leading`` are the inputs that take the place of what ``source`` holds.
        """
        given: dict[str, Any] = {type(source).__name__.lower(): source, **leading}
        for name in self.inputs:
            if name not in given:
                known = name not in self.reads or name in OPTIONAL
                given[name] = getattr(source, name) if known else source.column(name)
        return self.function(*[given[name] for name in self.inputs], **knobs)


@dataclass(frozen=True)
class Estimator(Choice):
    """Evidence -> one advantage per response."""

    needs: EstimatorNeeds

    def __post_init__(self) -> None:
        knob = self.needs.min_group
        if isinstance(knob, str) and knob not in self.schema.model_fields:
            raise RegistrationError(
                f"estimator {self.name}: min_group names the knob {knob!r}, which it has not"
            )


@dataclass(frozen=True)
class PolicyLoss(Choice):
    """Terms -> what is minimized, per token.

    Attributes:
        sequence_ratio: ``log_ratio`` is the response's mean, as in GSPO, not the token's.
        clips: the ratio, to [1 - low, 1 + high] of its knobs, so that clipped shares are logged.
            (Bounds that differ from token to token are returned: ``response_losses.Clipped``.)
        sampler_ratio: ``log_ratio`` is against the sampler, not the old policy, so that the loss
            itself corrects for a mismatch; its knob ``weight``, if any, is the kind of correction.
    """

    sequence_ratio: bool
    clips: bool
    sampler_ratio: bool

    def __post_init__(self) -> None:
        knobs = self.schema.model_fields.items()
        floats = {knob for knob, info in knobs if info.annotation is float}
        if self.clips and not {"low", "high"} <= floats:
            raise RegistrationError(
                f"policy loss {self.name}: clips=True needs the knobs low: float and high: float"
            )


class FunctionTable(Choices):
    """The functions of one kind, each a ``Choice`` under its name.

    ``source``: what they are given. ``leading``: inputs that are no field of it.
    """

    def __init__(
        self,
        what: str,
        source: type[Evidence] | type[Terms],
        kind: type[Choice] = Choice,
        leading: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what)
        self._known = {*inputs_of(source), *leading} - {*OPTIONAL}
        self._kind = kind

    def readings(self, chosen: Named) -> Iterator[tuple[str, Reading]]:
        """The columns that a choice reads, each with itself as the reader."""
        for column in self[chosen.name].reads:
            yield column, Reading(f"{self.what} {chosen.name}", chosen.knobs)

    def value(self, chosen: Named, source: Evidence | Terms, **leading: Tensor) -> Any:
        """The value of the chosen function, with its knobs."""
        return self[chosen.name](source, chosen.knobs, **leading)

    def entering(self, name: str | None = None, **more: Any) -> Decorator:
        """Enters a function under ``name``, or its own; ``more``: fields of the kind's choice."""

        def enter(function: Function) -> Function:
            key = name or function.__name__
            positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = inspect.signature(function).parameters.values()
            # What has a default is meant as a knob, and refused where the knobs are read.
            inputs = [p.name for p in parameters if p.kind is positional and p.default is p.empty]
            schema = new_schema(self, key, function, inputs)
            reads = tuple(each for each in inputs if each not in self._known)
            self[key] = self._kind(key, function, tuple(inputs), reads, schema, **more)
            return function

        return enter


ESTIMATORS = FunctionTable("estimator", Evidence, Estimator)
SHAPERS = FunctionTable("shaper", Evidence, leading=("advantages",))
TOKEN_SHAPERS = FunctionTable("token shaper", Terms)
POLICY_LOSSES = FunctionTable("policy loss", Terms, PolicyLoss)
AGGREGATIONS = FunctionTable("aggregation", Terms)
KL_WEIGHTS = FunctionTable("KL weight", Evidence)
CORRECTIONS = FunctionTable("mismatch correction", Terms)

PLAIN = EstimatorNeeds()


def register_estimator(name: str | None = None, *, needs: EstimatorNeeds = PLAIN) -> Decorator:
    """``f(evidence, *, knobs)``, or what it reads by name, ``f(rewards, groups, *, knobs)``, gives
    one advantage per response. Input that does not meet ``needs`` is refused with a message."""
    return ESTIMATORS.entering(name, needs=needs)


def estimator(**needs: Any) -> Decorator:
    """For estimators of the package; ``needs``: fields of EstimatorNeeds."""
    return register_estimator(needs=EstimatorNeeds(**needs))


def register_shaper(name: str | None = None) -> Decorator:
    """``f(advantages, evidence, *, knobs)`` gives the advantages after it, one per response."""
    return SHAPERS.entering(name)


def register_token_shaper(name: str | None = None) -> Decorator:
    """``f(advantages, terms, *, knobs)`` gives the advantages after it, one per token."""
    return TOKEN_SHAPERS.entering(name)


def register_policy_loss(
    name: str | None = None,
    *,
    sequence_ratio: bool = False,
    clips: bool = False,
    sampler_ratio: bool = False,
) -> Decorator:
    """``f(terms, *, knobs)`` gives what is minimized, one value per token, with gradient; see
    ``PolicyLoss``."""
    return POLICY_LOSSES.entering(
        name, sequence_ratio=sequence_ratio, clips=clips, sampler_ratio=sampler_ratio
    )


policy_loss = register_policy_loss  # one of the package, under its own name
shaper = register_shaper()
token_shaper = register_token_shaper()
aggregation = AGGREGATIONS.entering()  # the weight of each token
kl_weight = KL_WEIGHTS.entering()  # the factor of kl.coef at each response
correction = CORRECTIONS.entering  # weights of the policy term, chosen by ``mismatch.kind``
