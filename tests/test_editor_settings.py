"""What editors and the hook before a commit do is what the tests ask for: one width, one version of
ruff."""

from __future__ import annotations

import configparser
import re
import tomllib

import yaml

from tests.packaging.test_setup import constraints
from tests.test_size import REPO


def editor_settings() -> configparser.ConfigParser:
    """.editorconfig, whose first lines stand in no section."""
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (REPO / ".editorconfig").read_text(encoding="utf-8"))
    return parser


def test_editors_have_the_width_of_the_formatter():
    ruff = tomllib.loads((REPO / ".ruff.toml").read_text(encoding="utf-8"))
    settings = editor_settings()
    assert settings["top"]["root"] == "true"
    assert int(settings["*"]["max_line_length"]) == ruff["line-length"]
    assert settings["*"]["charset"] == "utf-8"


def test_hooks_are_local_and_of_the_pinned_version():
    text = (REPO / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    repositories = yaml.safe_load(text)["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-format", "ruff-check"]
    for hook in hooks:
        pins = dict(
            re.fullmatch(r"(.+)==(.+)", pin).groups() for pin in hook["additional_dependencies"]
        )
        assert pins == {name: constraints()[name] for name in pins}
        assert hook["entry"].split()[0] in pins
