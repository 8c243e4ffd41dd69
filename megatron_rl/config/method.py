"""A method by the name of its yaml."""

from collections.abc import Sequence

from megatron_rl.config.load import compose, validate
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.method import Method


def load_method(
    name: str, overrides: Sequence[str] = (), response_limit: int | None = None
) -> Method:
    """The method of ``conf/method/<name>.yaml``.

    Args:
        name: a file of conf/method without ``.yaml``.
        overrides: ``key=value``, relative to the method, e.g. ``kl.coef=0.001`` or
            ``shaping.ass.alpha=0.5``.
        response_limit: longest response in tokens; see ``Method``.

    Raises:
        ConfigError: no such method, or wrong keys or values (all of them in one message).
    """
    values = compose(f"method/{name}", [_prefixed(text) for text in overrides])
    return Method(validate(MethodConfig, values, f"method {name}"), response_limit=response_limit)


def _prefixed(override: str) -> str:
    """The override below the key ``method``, keeping Hydra's prefix."""
    key = override.lstrip("+~")
    return f"{override[: len(override) - len(key)]}method.{key}"
