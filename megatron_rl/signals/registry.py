"""The table of signals, and those that a method reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

from megatron_rl.config.schema import Config
from megatron_rl.data.reading import Data
from megatron_rl.errors import RegistrationError, close_names, did_you_mean
from megatron_rl.loss import Method
from megatron_rl.loss.batch import Reading
from megatron_rl.loss.choices import Evidence, Terms, inputs_of
from megatron_rl.passes import LocalBatch, Output, Outputs, TokenScores, TokenView
from megatron_rl.signals.base import Columns, Extension, Signal, SignalSetup, StepView
from megatron_rl.types import Prompt

S = TypeVar("S", bound=type[Signal])
_SIGNALS: dict[str, type[Signal]] = {}  # by column
# Right under top_k and top_p: the most likely token is kept, prompts have the whole vocabulary.
_OF_KEPT_TOKENS = {"entropy", "is_argmax", "prompt_logprobs"}


def register_signal(signal: S) -> S:
    """Decorator of a class derived from ``Signal``: functions of the loss may read its columns.

    Raises:
        RegistrationError: it has no column, or the name of one is taken.
    """
    names = (*signal.columns, *signal.token_columns)
    if not names:
        raise RegistrationError(f"signal {signal.__name__}: has no columns; name what it gives")
    # An entropy is both: the property of that name is the column, without gradient.
    fields = (inputs_of(Evidence) | inputs_of(Terms)) - {"entropy"}
    for name in names:
        if name in fields:
            raise RegistrationError(
                f"signal {signal.__name__}: functions are given a field {name} as it is; give the"
                " column another name"
            )
        other = _SIGNALS.get(name)
        if other is not None:
            raise RegistrationError(
                f"signal {signal.__name__}: the column {name} is that of {other.__module__}."
                f"{other.__name__}; give yours another name"
            )
    _SIGNALS.update(dict.fromkeys(names, signal))
    return signal


@dataclass(frozen=True)
class Signals:
    """The signals of a run."""

    members: tuple[Signal, ...] = ()
    log_entropy: bool = False  # the old policy's entropy is a metric
    reads_reference: bool = False  # the loss reads logprobs of the reference, whatever signals read

    def needs(self, scores: Literal["old", "ref"]) -> bool:
        """Whether a pass over the rollout has to give these before the first update."""
        if scores == "ref" and self.reads_reference:
            return True
        return any(scores in signal.scores for signal in self.members)

    @property
    def score_outputs(self) -> Outputs:
        """Outputs of the pass with the old policy."""
        wanted = [Output("entropy")] if self.log_entropy else []
        wanted += chain.from_iterable(signal.score_outputs for signal in self.members)
        return tuple(dict.fromkeys(wanted))

    @property
    def update_outputs(self) -> Outputs:
        """Outputs of the passes of updates."""
        return tuple(chain.from_iterable(signal.update_outputs for signal in self.members))

    @property
    def extra_tokens(self) -> int:
        """By how much sequences are longer in an update."""
        return sum(signal.extra_tokens for signal in self.members)

    @property
    def num_likely(self) -> int:
        return max((signal.num_likely for signal in self.members), default=0)

    def check(self, prompts: Sequence[Prompt], config: Config) -> None:
        """Raises ValueError where a signal cannot be computed from the training prompts, under
        ``top_k`` and ``top_p`` of the sampler, or with given experts."""
        rollout = config.rollout
        for signal in self.members:
            if rollout.router_replay != "none" and type(signal).extend is not Signal.extend:
                raise ValueError(
                    f"rollout.router_replay = {rollout.router_replay}: the method reads"
                    f" {_first_column(type(signal))}, which adds tokens to updates, and no earlier"
                    " pass has chosen experts for these; set it to none, or choose another method"
                )
            if rollout.is_truncated and not _fits_kept_tokens(signal):
                raise ValueError(
                    f"rollout.top_p = {rollout.top_p:g}, rollout.top_k = {rollout.top_k}: the"
                    f" method reads {_first_column(type(signal))}, which needs the policy's"
                    " probabilities of tokens that the sampler does not keep; set"
                    " rollout.top_p=1.0 rollout.top_k=-1, or choose another method"
                )
            if self.num_likely and type(signal).extend is not Signal.extend:
                raise ValueError(
                    f"method {config.method.name}: reads {_first_column(type(signal))}, which adds"
                    " tokens to updates, and likely_logprobs, which exist only for tokens that were"
                    " sampled; leave one out"
                )
            signal.check(prompts, config)

    def prepare(self, data: Data, setup: SignalSetup) -> Data:
        """Collective; see ``Signal``."""
        for signal in self.members:
            data = signal.prepare(data, setup)
        return data

    def after_rollout(self, view: StepView) -> tuple[Columns, Columns]:
        """Collective: columns of tokens, and others."""
        of_tokens: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for signal in self.members:
            for name, values in signal.after_rollout(view).items():
                (of_tokens if name in signal.token_columns else others)[name] = values
        return of_tokens, others

    def before_minibatch(self, view: StepView) -> Columns:
        """Collective. Each may take a pass of the policy; all ranks ask them in this order."""
        found: dict[str, Any] = {}
        for signal in self.members:
            found |= signal.before_minibatch(view)
        return found

    def extended(self, batch: LocalBatch, step: int) -> Extended:
        """The batch that the policy works on in an update."""
        made: list[Extension] = []
        for signal in self.members:
            extension = signal.extend(batch, step)
            if extension is not None:
                made.append(extension)
                batch = extension.batch
        return Extended(batch, tuple(made))

    def state(self) -> dict[str, Any]:
        """The states of all signals, for a checkpoint."""
        return {type(signal).__name__: signal.state() for signal in self.members}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse; a signal that the checkpoint lacks begins anew."""
        for signal in self.members:
            signal.restore(state.get(type(signal).__name__, {}))


@dataclass(frozen=True)
class Extended:
    """A batch with all extensions; the first one is undone last."""

    batch: LocalBatch
    extensions: tuple[Extension, ...]

    def split(self, view: TokenView) -> tuple[TokenView, Columns]:
        found: dict[str, Any] = {}
        for extension in reversed(self.extensions):
            view, columns = extension.split(view)
            found |= columns
        return view, found

    def without(self, scores: TokenScores) -> TokenScores:
        for extension in reversed(self.extensions):
            scores = extension.without(scores)
        return scores


def _fits_kept_tokens(signal: Signal) -> bool:
    """Whether it needs no probabilities but those of the tokens that the sampler keeps, and adds no
    tokens to updates, for which there are no kept ones."""
    names = {output.name for output in (*signal.score_outputs, *signal.update_outputs)}
    return names <= _OF_KEPT_TOKENS and type(signal).extend is Signal.extend


def signals_of(method: Method, seed: int = 0) -> Signals:
    """The signals that give the columns that ``method`` reads.

    Raises:
        ValueError: no signal gives a column, or its reader lacks a knob of the signal.
    """
    readers: dict[type[Signal], list[Reading]] = {}
    for column, readings in method.reads.items():
        if column not in _SIGNALS:
            hint = did_you_mean(close_names(column, _SIGNALS))
            raise ValueError(
                f"method {method.name}: {readings[0].reader} reads {column}, which is no field of"
                f" what it is given, and no signal gives it{'; ' + hint if hint else ''}; load the"
                " plug-in that registers it (--plugin)"
            )
        readers.setdefault(_SIGNALS[column], []).extend(readings)
    always = {"seed": seed, "kl_estimator": method.config.kl.estimator}
    # In the order of the table, whatever order the method reads them in.
    kinds = [kind for kind in dict.fromkeys(_SIGNALS.values()) if kind in readers]
    made = [kind(**_knobs(kind, readers[kind], always)) for kind in kinds]
    log_entropy = method.config.entropy.metric or "entropy" in method.reads
    return Signals(tuple(made), log_entropy, method.reads_reference)


def _knobs(
    kind: type[Signal], readings: Sequence[Reading], always: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a signal's constructor, from the knobs of its readers."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        sources = [each for each in readings if name in each.knobs]
        values = [each.knobs[name] for each in sources]
        if not values and name in always:
            values = [always[name]]
        if not values and parameter.default is parameter.empty:
            raise ValueError(
                f"{readings[0].reader}: reads {_first_column(kind)}, so it needs the knob {name}"
            )
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{' and '.join(each.reader for each in sources)} read {_first_column(kind)} by"
                f" different {name} ({', '.join(map(str, values))}); set them to one value"
            )
        if values:
            found[name] = values[0]
    return found


def _first_column(kind: type[Signal]) -> str:
    return (*kind.columns, *kind.token_columns)[0]
