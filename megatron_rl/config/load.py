"""Hydra composition -> plain dict -> strict schema, with every error reported at once."""

import contextlib
import functools
import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
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

from megatron_rl.config.cli.foreign_keys import NAMES_HERE, not_supported
from megatron_rl.config.cli.overrides import is_group, options_of, parse
from megatron_rl.errors import ConfigError, RegistrationError, close_names, did_you_mean

Schema = TypeVar("Schema", bound=BaseModel)
# ``resume=auto`` is short for ``resume.checkpoint=auto``: a section written as the key that it is
# mostly given for.
SHORT = {"resume": "resume.checkpoint"}
# Groups that an evaluation of a run may choose anew: what is asked, how, and who judges it.
_ASKED = ("evaluation", "data", "reward")


def conf_dir() -> Path:
    """The folder of Hydra groups: in the installed package, else next to it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    problem = f"no conf/config.yaml in {package} or next to it; reinstall megatron_rl"
    raise ConfigError([problem], "the installation")


_plugin_dirs: list[Path] = []
_given_dirs: list[Path] = []  # of --config-dir, while a configuration is composed


class _MoreFolders(SearchPathPlugin):
    """More folders of options for Hydra: a plug-in's method composes like a built-in one."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in (*_plugin_dirs, *_given_dirs):
            search_path.append("megatron_rl", f"file://{folder}")


@functools.cache
def _search_more_folders() -> None:
    Plugins.instance().register(_MoreFolders)


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
    _search_more_folders()
    _plugin_dirs.append(folder)


def compose(
    config_name: str, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> dict[str, Any]:
    """The composed and resolved configuration as a plain dict.

    Args:
        config_name: file below ``conf/`` or ``config_dir``, without ``.yaml``. A file of a group
            (``method/apo``) comes without its group key.
        overrides: Hydra overrides. An unknown key is kept here and refused by ``validate``, which
            knows its neighbors.
        config_dir: a second folder of groups, searched after ``conf/``.

    Raises:
        ConfigError: an override cannot be parsed, or a group has no such option.
    """
    if config_dir and not config_dir.is_dir():
        problem = f"--config-dir {config_dir}: no such folder; give a folder of groups"
        raise ConfigError([problem], "the options")
    given = [config_dir.resolve()] if config_dir else []
    groups = [conf_dir(), *_plugin_dirs, *given]
    final = _all_permissive(overrides, groups)
    _search_more_folders()
    _given_dirs[:] = given
    # Hydra's state is one for the process, and it refuses to be initialized twice.
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(groups[0]), version_base="1.3"):
            composed = OmegaConf.to_container(hydra_compose(config_name, final), resolve=True)
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        raise ConfigError([_unknown_option(group, option, groups)], "the overrides") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_composition_problem(error, overrides)], "the overrides") from error
    # Of a user's folder: no YAML (which names file, line and column), no text, or a file that
    # includes itself.
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        what = f"not YAML: {' '.join(str(error).split())}"
        if isinstance(error, RecursionError):
            what = "a file names itself in its defaults"
        files = ", ".join(_files_of_user(overrides, groups)) or config_name
        raise ConfigError([f"{files}: {what}; correct the file"], "the options") from error
    # A file of a group comes as {method: {...}}.
    for group in config_name.split("/")[:-1]:
        composed = composed[group]
    return _without_missing(composed)


def _files_of_user(overrides: Sequence[str], groups: Sequence[Path]) -> list[str]:
    """The options that the overrides choose from other folders than the package's."""
    chosen = [override for text in overrides if is_group(override := parse(text, groups), groups)]
    names = [f"{override.key_or_group}/{override.value()}.yaml" for override in chosen]
    files = [folder / name for folder in groups[1:] for name in names]
    return [str(file) for file in files if file.is_file()]


def validate(schema: type[Schema], values: dict[str, Any], where: str) -> Schema:
    """``values`` as an instance of ``schema``.

    Strict: 1 is not True, "8" is not 8. As JSON, because only there a strict tuple takes a list.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known key where one is unknown.
    """
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(_problems(schema, error.errors()), where) from None


def check_given(schema: type[BaseModel], values: dict[str, Any], where: str) -> None:
    """Like ``validate``, but missing values are allowed, to inspect an incomplete configuration."""
    try:
        schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        wrong = [detail for detail in error.errors() if detail["type"] != "missing"]
        if wrong:
            raise ConfigError(_problems(schema, wrong), where) from None


def fill_missing(schema: type[BaseModel], values: dict[str, Any]) -> list[str]:
    """Sets what ``values`` lacks to what is composed by default, in place; what was set, as
    ``key = value``. What has no default stays missing."""
    try:
        schema.model_validate_json(json.dumps(values))
        return []
    except ValidationError as error:
        missing = [detail["loc"] for detail in error.errors() if detail["type"] == "missing"]
    added = []
    defaults = compose("config") if missing else {}
    for *sections, leaf in missing:
        node: Any = values
        default: Any = defaults
        # A name of a union's member is among the sections, and no key.
        with contextlib.suppress(KeyError, TypeError):
            for section in sections:
                node, default = node[section], default[section]
            node[leaf] = default[leaf]
            added.append(f"{'.'.join(map(str, [*sections, leaf]))} = {json.dumps(default[leaf])}")
    return added


def _problems(schema: type[BaseModel], details: Sequence[ErrorDetails]) -> list[str]:
    known = sorted(set(known_keys(schema)))
    return [_describe(detail, known) for detail in details]


def change_values(values: dict[str, Any], texts: Sequence[str]) -> None:
    """Changes a composed configuration, in place.

    An option of a group of ``_ASKED`` takes the place of its section before any key is changed, as
    on the command line of a training: ``["evaluation.temperature=1.0", "evaluation=avg_at_16"]``
    leaves a temperature of 1.

    Raises:
        ConfigError: a text is no ``key=value``, names another section, a key below a value, or an
            option that there is not.
    """
    groups = [text for text in texts if text.partition("=")[0] in _ASKED]
    if groups:
        composed = compose("config", groups)
        values |= {key: composed[key] for key in (text.partition("=")[0] for text in groups)}
        # Options of data that are evaluations alone (conf/data/mathvista.yaml) have no train.
        values["data"].setdefault("train", [])
    for text in texts:
        if text not in groups:
            _change_value(values, text)


def _change_value(values: dict[str, Any], text: str) -> None:
    try:
        parsed = parse(text, [])
    except ValueError as error:
        raise ConfigError([str(error)], "the overrides") from None
    *sections, leaf = parsed.key_or_group.split(".")
    node = values
    for section in sections:
        # A section that is not there is made: ``validate`` refuses its keys with their neighbors.
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            problem = f"{text}: {section} is a value here, without keys; correct the key"
            raise ConfigError([problem], "the overrides")
    if isinstance(node.get(leaf), dict):
        raise ConfigError([f"{text}: {leaf} is a section here; name its keys"], "the overrides")
    node[leaf] = parsed.value()


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
    elif typing.get_origin(annotation) in (types.UnionType, typing.Union, typing.Annotated):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)


def _describe(detail: ErrorDetails, known: list[str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        sentence = not_supported(key, detail["input"])
        if sentence is not None:
            return f"{key}: unknown key; {sentence}; remove it"
        full = ".".join([key, *_first_leaf(detail["input"])])
        return f"{full}: unknown key{_nearest_keys(full, known)}"
    if detail["type"] == "missing":
        return f"{key}: no value; give {key}=..."
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key} = {detail['input']!r}: {message}"


def _first_leaf(value: Any) -> list[str]:
    """The path to the first leaf of an unknown section: its keys say more than its name."""
    path: list[str] = []
    while isinstance(value, dict) and value:
        path.append(str(next(iter(value))))
        value = value[path[-1]]
    return path


def _nearest_keys(key: str, known: Sequence[str]) -> str:
    """A suggestion in place of ``key``: its name here, else keys with the same last part, or that
    begin with it, else a section or keys that are spelled alike, else one whose last part is."""
    leaf = key.rpartition(".")[2]
    elsewhere = NAMES_HERE.get(leaf)
    if elsewhere is not None and elsewhere != key:
        return f"; here it is {elsewhere}"
    by_leaf: dict[str, list[str]] = {}
    for candidate in known:
        by_leaf.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    sections = {candidate.partition(".")[0] for candidate in known}
    close = by_leaf.get(leaf) or [candidate for candidate in known if candidate.startswith(key)]
    if not close and "." not in key:
        close = close_names(key, sections, cutoff=0.8)
    if not close:
        close = close_names(key, known, count=2, cutoff=0.7)
    if not close:
        close = [by_leaf[match][-1] for match in close_names(leaf, by_leaf, cutoff=0.7)]
    return f"; {did_you_mean(close[:2]) or 'see --cfg job for all keys'}"


def _without_missing(values: dict[str, Any]) -> dict[str, Any]:
    """Drops Hydra's ``???`` so that the schema reports the key as missing."""
    kept = {key: value for key, value in values.items() if value != "???"}
    sections = {key: value for key, value in kept.items() if isinstance(value, dict)}
    return kept | {key: _without_missing(section) for key, section in sections.items()}


def _all_permissive(overrides: Sequence[str], groups: Sequence[Path]) -> list[str]:
    """The overrides as Hydra is given them; raises ConfigError with all that is wrong in them."""
    final = []
    problems = []
    for text in overrides:
        try:
            final.append(_permissive(text, parse(text, groups), groups))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems, "the overrides")
    return final


def _permissive(text: str, override: Override, groups: Sequence[Path]) -> str:
    """The override as Hydra takes it: of a value for any key, known or not, of a group as it is.

    ``validate`` refuses unknown keys, all at once.
    """
    key = override.key_or_group
    option = override.value()
    chooses = is_group(override, groups)
    if chooses and not override.is_delete() and not isinstance(option, str | list):
        raise ValueError(
            f"{text}: {key} is a group of settings; choose one of its options "
            f"({', '.join(options_of(key, groups))}), or set a key in it: {key}.NAME=value"
        )
    # Looked up here, because Hydra passes over an option of an optional group in silence.
    if chooses and isinstance(option, str) and option not in options_of(key, groups):
        raise ValueError(_unknown_option(key, option, groups))
    # "++" sets a key whether or not it is there; with a plain ``key=value`` Hydra refuses the first
    # key that is not, and says nothing of the others.
    if key in SHORT and not override.is_delete() and not isinstance(option, dict):
        _, _, value = text.partition("=")
        return f"++{SHORT[key]}={value}"
    if chooses or override.is_delete() or override.is_force_add():
        return text
    return f"++{text.removeprefix('+')}"


def _composition_problem(error: Exception, overrides: Sequence[str]) -> str:
    """An error of Hydra or OmegaConf with the user's key, without the ``++`` put before it."""
    reason = str(error).splitlines()[0].replace("++", "")
    if "more than once in the final defaults list" in reason:
        return f"{reason}; write GROUP=OPTION without +"
    key = getattr(error, "full_key", None)
    if not key:
        return f"{reason}; correct the override"
    typed = next((text for text in overrides if text.lstrip("+").partition("=")[0] == key), key)
    return f"{typed}: {reason}; ${{name}} stands for the value of the key name, which must exist"


def _unknown_option(group: str, option: str, groups: Sequence[Path]) -> str:
    options = options_of(group, groups)
    there = f"there are {', '.join(options)}"
    if not group:
        return f"--config-name {option}: no such file; {there}"
    hint = not_supported(option)
    hint = f"{hint};" if hint else did_you_mean(close_names(option, options, count=2))
    return f"{group}={option}: no such option; {f'{hint} {there}'.strip()}"
