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
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.config.foreign_keys import name_here, not_supported
from megatron_rl.config.overrides import group_problem, is_group, parse
from megatron_rl.plugins import RegistrationError

Schema = TypeVar("Schema", bound=BaseModel)
# ``resume=auto`` is short for ``resume.checkpoint=auto``: a section written as the key that it is mostly given for.
SHORT = {"resume": "resume.checkpoint"}


SHOWN_PROBLEMS = 12  # a message fits on a screen; the next start shows the rest


class ConfigError(ValueError):
    """A configuration that cannot be used. The message lists every problem: key, value, remedy."""

    def __init__(self, problems: Sequence[str], where: str) -> None:
        self.problems = list(problems)
        shown = self.problems[:SHOWN_PROBLEMS]
        if len(problems) > SHOWN_PROBLEMS:
            shown.append(f"... and {len(problems) - SHOWN_PROBLEMS} more")
        lines = "\n".join(f"  - {problem}" for problem in shown)
        self._where = where
        super().__init__(f"{len(problems)} problem{'s' * (len(problems) != 1)} in {where}:\n{lines}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str], str]]:
        """Rank 0 sends its errors to the other ranks."""
        return ConfigError, (self.problems, self._where)


def conf_dir() -> Path:
    """The folder of Hydra groups: inside the installed package, else beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError([f"no conf/config.yaml in {package} or beside it; reinstall megatron_rl"], "the installation")


_plugin_dirs: list[Path] = []


class _PluginFolders(SearchPathPlugin):
    """Hydra asks this where else options lie: a plug-in's method composes like a built-in one."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in _plugin_dirs:
            search_path.append("megatron_rl plug-in", f"file://{folder}")


def add_config_dir(path: str | Path) -> None:
    """A plug-in's own folder of groups, searched after the package's. Called while it is imported.

    With ``FOLDER/method/mine.yaml`` in it, ``method=mine`` finds that file.

    Example: ``add_config_dir(Path(__file__).parent / "conf")``.

    Raises:
        RegistrationError: no such folder, no group in it, or an option that another folder has.
    """
    folder = Path(path).resolve()
    if folder in _plugin_dirs:
        return
    options = {file.relative_to(folder) for file in folder.glob("*/*.yaml")}
    if not options:
        raise RegistrationError(
            f"add_config_dir({folder}): holds no GROUP/OPTION.yaml, such as method/mine.yaml"
        )
    for other in (conf_dir(), *_plugin_dirs):
        taken = sorted(str(option) for option in options if (other / option).is_file())
        if taken:
            raise RegistrationError(
                f"add_config_dir({folder}): {taken[0]} is in {other} as well; rename yours"
            )
    if not _plugin_dirs:
        Plugins.instance().register(_PluginFolders)
    _plugin_dirs.append(folder)


def compose(config_name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> dict[str, Any]:
    """The composed and resolved configuration as a plain dict.

    Args:
        config_name: file below ``conf/`` without ``.yaml``. A file of a group (``method/apo``) comes without its group key.
        overrides: Hydra overrides. An unknown key is kept here and refused by ``validate``, which knows its neighbours.
        config_dir: a second folder of groups, searched after ``conf/``.

    Raises:
        ConfigError: an override cannot be parsed, or a group has no such option.
    """
    if config_dir and not config_dir.is_dir():
        problem = f"--config-dir {config_dir}: no such folder; give a folder of groups"
        raise ConfigError([problem], "the options")
    groups = [conf_dir(), *_plugin_dirs, *([config_dir.resolve()] if config_dir else [])]
    final = _all_permissive(overrides, groups)
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
        raise ConfigError([_composition_problem(error, overrides)], "the overrides") from error
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


def change_value(values: dict[str, Any], text: str) -> None:
    """Changes one value of a composed configuration, in place.

    Example: ``change_value(values, "rollout.dtype=float32")``.

    Raises:
        ConfigError: ``text`` is no ``key=value``, or names a section.
    """
    try:
        parsed = parse(text, [])
    except ValueError as error:
        raise ConfigError([str(error)], "the overrides") from None
    *sections, leaf = parsed.key_or_group.split(".")
    node = values
    for section in sections:
        node = node.setdefault(section, {})
    if isinstance(node.get(leaf), dict):
        raise ConfigError([f"{text}: {leaf} is a section here; name its keys"], "the overrides")
    node[leaf] = parsed.value()


def check_given(schema: type[BaseModel], values: dict[str, Any], where: str) -> None:
    """As ``validate``, but a key without a value is no problem: to look at what is not complete."""
    try:
        schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        known = sorted(set(known_keys(schema)))
        wrong = [detail for detail in error.errors() if detail["type"] != "missing"]
        problems = [_describe(detail, known) for detail in wrong]
        if problems:
            raise ConfigError(problems, where) from None


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
        sentence = not_supported(key, detail["input"])
        if sentence is not None:
            return f"{key}: unknown key; {sentence}; remove it"
        full = ".".join([key, *_first_leaf(detail["input"])])
        return f"{full}: unknown key{_did_you_mean(full, known)}"
    if detail["type"] == "missing":
        return f"{key}: no value; give {key}=..."
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key} = {detail['input']!r}: {message}"


def _first_leaf(value: Any) -> list[str]:
    """The path to the first leaf of a section: of a section that nobody knows, what is in it says
    more than its name. Empty for a plain value."""
    path: list[str] = []
    while isinstance(value, dict) and value:
        key = next(iter(value))
        path.append(str(key))
        value = value[key]
    return path


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    elsewhere = name_here(key)
    if elsewhere is not None and elsewhere != key:
        return f"; here it is {elsewhere}"
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


def _all_permissive(overrides: Sequence[str], groups: Sequence[Path]) -> list[str]:
    """The overrides as Hydra is given them; raises ConfigError with all that is wrong in them."""
    final, problems = [], []
    for text in overrides:
        try:
            final.append(_permissive(text, parse(text, groups), groups))
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems, "the overrides")
    return final


def _permissive(text: str, override: Override, groups: Sequence[Path]) -> str:
    """A value override may name any key (validate refuses the wrong ones, all at once); a group override stays as it is."""
    problem = group_problem(text, override, groups)
    if problem is not None:
        raise ConfigError([problem], "the overrides")
    key, option = override.key_or_group, override.value()
    chooses = is_group(override, groups)
    if chooses and isinstance(option, str) and not any((folder / key / f"{option}.yaml").is_file() for folder in groups):
        raise ConfigError([_unknown_option(key, option, groups)], "the overrides")  # Hydra would pass over an optional group
    if key in SHORT and not override.is_delete() and not isinstance(option, dict):
        return f"++{SHORT[key]}={text.partition('=')[2]}"
    if chooses or override.is_delete() or override.is_force_add() or key.startswith("hydra"):
        return text
    return f"++{text.removeprefix('+')}"


def _composition_problem(error: Exception, overrides: Sequence[str]) -> str:
    """An error of Hydra or OmegaConf as the user's: with the key, without the ``++`` put before it."""
    reason = str(error).splitlines()[0].replace("++", "")
    if "more than once in the final defaults list" in reason:
        return f"{reason}; write GROUP=OPTION without +"
    key = getattr(error, "full_key", None)
    if not key:
        return f"{reason}; correct the override"
    mine = next((text for text in overrides if text.lstrip("+").partition("=")[0] == key), key)
    return f"{mine}: {reason}; ${{name}} stands for the value of the key name, which must exist"


def _unknown_option(group: str, option: str, groups: Sequence[Path]) -> str:
    options = sorted({path.stem for folder in groups for path in (folder / group).glob("*.yaml")})
    close = difflib.get_close_matches(option, options, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    sentence = not_supported(option)
    hint = f"{sentence}; " if sentence else hint
    return f"{group}={option}: no such option; {hint}there are {', '.join(options)}"
