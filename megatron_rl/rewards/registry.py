"""Verifiers by name, and which data sources each of them is for.

A plug-in (``--plugin my_verifiers.py``) adds one like this; it is then
``reward.verifier=palindrome``, and with ``sources`` also what ``reward.verifier=auto`` takes for
prompts of these data sources::

    from megatron_rl.rewards import Task, register_verifier

    @register_verifier("palindrome", sources=r"toys/palindromes.*")
    def palindrome(task: Task, answer: str) -> float:
        return float(answer == answer[::-1])

Workers import the same plug-ins. A class with more to it (checks of the prompts, long imports)
derives from ``Verifier``.
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import RegistrationError, close_names, did_you_mean
from megatron_rl.rewards.base import Options, Task, Verdict, Verifier

_classes: dict[str, type[Verifier]] = {}
_sources: list[tuple[re.Pattern[str], str]] = []


def register_verifier(name: str, *, sources: str | None = None) -> Callable[[Any], Any]:
    """Decorator of a class derived from ``Verifier``, or of a function.

    A function takes ``(task, answer)`` and returns an accuracy in [0, 1], or a Verdict.

    Args:
        name: value of ``reward.verifier``.
        sources: regular expression of data sources (the whole name) that ``auto`` gives to this
            verifier. Later registrations go before earlier ones: a plug-in can claim a source.

    Raises:
        RegistrationError: the name is taken by another verifier, or is ``auto``; what is registered
            is neither a Verifier nor a function of two arguments.
    """

    def register(made: Any) -> Any:
        if isinstance(made, type) and not issubclass(made, Verifier):
            raise RegistrationError(
                f"register_verifier({name!r}): {made.__name__} is no Verifier; derive it from that"
            )
        if not isinstance(made, type):
            require_two_arguments(made, f"register_verifier({name!r})", "task, answer")
        verifier = made if isinstance(made, type) else _class_of(name, made)
        # A plug-in that is loaded again registers the same class anew.
        taken = _classes.get(name)
        if name == "auto" or (taken is not None and _origin(taken) != _origin(verifier)):
            owner = "a reserved name"
            if taken is not None:
                owner = f"the name of {'.'.join(_origin(taken))}"
            raise RegistrationError(f"register_verifier({name!r}): {owner}; choose another")
        _classes[name] = verifier
        if sources is not None:
            _sources.insert(0, (re.compile(sources), name))
        return made

    return register


def verifier_class(name: str) -> type[Verifier]:
    """The class registered under ``name``.

    Raises:
        ValueError: there is none; suggests similar names.
    """
    if name in _classes:
        return _classes[name]
    hint = did_you_mean(close_names(name, [*_classes, "auto"], count=2))
    there_are = f"there are auto, {', '.join(sorted(_classes))}"
    advice = " ".join(filter(None, [hint, there_are]))
    raise ValueError(
        f"reward.verifier = {name}: no such verifier; {advice}, and those that a --plugin registers"
    )


def verifier_of_source(data_source: str) -> str | None:
    """The verifier that ``reward.verifier = auto`` gives to ``data_source``; else None."""
    for pattern, name in _sources:
        if pattern.fullmatch(data_source):
            return name
    return None


def _origin(verifier: type[Verifier]) -> tuple[str, str]:
    return verifier.__module__, verifier.__qualname__


def _class_of(name: str, function: Callable[[Task, str], Any]) -> type[Verifier]:
    """A verifier that calls ``function``."""

    class FunctionVerifier(Verifier):
        def verify(self, task: Task, answer: str) -> Verdict:
            judged = function(task, answer)
            if isinstance(judged, Verdict):
                return judged
            return limited(float(judged), self.options)

    FunctionVerifier.__module__ = getattr(function, "__module__", __name__)
    FunctionVerifier.__qualname__ = getattr(function, "__qualname__", name)
    return FunctionVerifier


def require_two_arguments(function: Callable[..., Any], subject: str, names: str) -> None:
    """Raises RegistrationError, a ValueError, where ``function`` cannot be called with two."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise RegistrationError(
            f"{subject}: cannot be called as function({names}) ({error}); give it these two"
        ) from error
    except ValueError:
        return  # written in C: without a signature there is nothing to check


def limited(score: float, options: Options) -> Verdict:
    """A score as a verdict.

    A score outside [0, 1] is 0 with a reason; without ``reward.partial_credit`` a fraction is 0.
    """
    if not (math.isfinite(score) and 0 <= score <= 1):
        return Verdict(0.0, f"score {score} is not within [0, 1]")
    return Verdict(score if options.partial_credit else float(score == 1))
