"""Hydra composition -> plain dict -> strict schema, with every error of a configuration reported at once."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Schema = TypeVar("Schema", bound=BaseModel)
# ``resume=auto`` is short for ``resume.checkpoint=auto``: a section written as the key that it is mostly given for.
SHORT = {"resume": "resume.checkpoint"}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message lists every problem: key, value, remedy."""

    def __init__(self, problems: Sequence[str], where: str) -> None:
        self.problems = list(problems)
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problem{'s' * (len(problems) != 1)} in {where}:\n{lines}")


def conf_dir() -> Path:
    """The folder of Hydra groups: inside the installed package, else beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError([f"no conf/config.yaml in {package} or beside it; reinstall megatron_rl"], "the installation")


def compose(config_name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> dict[str, Any]:
    """The composed and resolved configuration as a plain dict.

    Args:
        config_name: file below ``conf/`` without ``.yaml``. A file of a group (``method/apo``) comes without its group key.
        overrides: Hydra overrides. An unknown key is kept here and refused by ``validate``, which knows its neighbours.
        config_dir: a second folder of groups, searched after ``conf/``.

    Raises:
        ConfigError: an override cannot be parsed, or a group has no such option.
    """
    groups = [conf_dir(), *([config_dir.resolve()] if config_dir else [])]
    final = [_permissive(text, groups) for text in overrides]
    if config_dir:
        final.append(f"hydra.searchpath=['file://{groups[-1]}']")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(groups[0]), version_base="1.3"):
            composed = OmegaConf.to_container(hydra_compose(config_name, final), resolve=True)
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        raise ConfigError([_unknown_option(group, option, groups)], "the overrides") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([str(error).splitlines()[0]], "the overrides") from error
    for group in config_name.split("/")[:-1]:
        composed = composed[group]
    return _without_missing(composed)


def validate(schema: type[Schema], values: dict[str, Any], where: str) -> Schema:
    """``values`` as an instance of ``schema``. Strict: 1 is not True, "8" is not 8; a list becomes a tuple.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known key where one is unknown.
    """
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        known = sorted(set(known_keys(schema)))
        raise ConfigError([_describe(detail, known) for detail in error.errors()], where) from None


def known_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaves of a schema, through optional and union fields."""
    for name, info in schema.model_fields.items():
        nested = list(_models_in(info.annotation))
        for model in nested:
            yield from known_keys(model, f"{prefix}{name}.")
        if not nested:
            yield prefix + name


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, typing.Annotated):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)


def _describe(detail: ErrorDetails, known: list[str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{_did_you_mean(key, known)}"
    if detail["type"] == "missing":
        return f"{key}: no value; give {key}=..."
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key} = {detail['input']!r}: {message}"


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(key, known, n=2, cutoff=0.7)
    by_leaf = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    close = close or [by_leaf[match] for match in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)]
    return f"; did you mean {' or '.join(close[:2])}?" if close else "; see --cfg job for all keys"


def _without_missing(values: dict[str, Any]) -> dict[str, Any]:
    """Drops Hydra's ``???`` so that the schema reports the key as missing."""
    kept = {key: _without_missing(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != "???"}


def _permissive(text: str, groups: Sequence[Path]) -> str:
    """A value override may name any key (validate refuses the wrong ones, all at once); a group override stays as it is."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError([f"{text!r}: not an override ({str(error).splitlines()[0]}); write key=value"], "the overrides") from None
    key = override.key_or_group
    is_group = any((folder / key).is_dir() for folder in groups)
    option = override.value()
    if is_group and isinstance(option, str) and not any((folder / key / f"{option}.yaml").is_file() for folder in groups):
        raise ConfigError([_unknown_option(key, option, groups)], "the overrides")  # Hydra would pass over an optional group
    if key in SHORT and not override.is_delete() and not isinstance(option, dict):
        return f"++{SHORT[key]}={text.partition('=')[2]}"
    if is_group or override.is_delete() or override.is_force_add() or key.startswith("hydra"):
        return text
    return f"++{text.removeprefix('+')}"


def _unknown_option(group: str, option: str, groups: Sequence[Path]) -> str:
    options = sorted({path.stem for folder in groups for path in (folder / group).glob("*.yaml")})
    close = difflib.get_close_matches(option, options, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{group}={option}: no such option; {hint}there are {', '.join(options)}"
