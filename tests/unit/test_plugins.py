"""A user's code is imported by name, and what cannot be is one message with the reason."""

from __future__ import annotations

import sys

import pytest

from megatron_rl import plugins
from megatron_rl.errors import concerning, first_line


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(plugins, "_sources", {})


def test_a_file_is_imported_once_and_named_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "counted", 0, raising=False)
    plugins.load_plugins(["mine.py"])
    plugins.load_plugins(["mine.py"])
    assert sys.counted == 1
    assert plugins.loaded() == (str(tmp_path / "mine.py"),)


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "reward.py").write_text(f"def score(): return {number}\n")
    functions = [
        plugins.import_function(f"{tmp_path}/{number}/reward.py:score", "k") for number in (1, 2)
    ]
    assert [function() for function in functions] == [1, 2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "k = score: write path.py:name or package.module:name"),
        ("{}/none.py:f", r"cannot be imported \(FileNotFoundError: no such file .*none.py\)"),
        ("no_such_module_at_all:f", r"cannot be imported \(ModuleNotFoundError"),
        (
            "{}/broken.py:f",
            r"broken.py: cannot be imported \(ZeroDivisionError: division by zero\)",
        ),
        ("{}/leaves.py:f", r"leaves.py: cannot be imported \(SystemExit: 0\), line 2 of leaves"),
        ("{}/good.py:g", r"good.py has no 'g'; correct the name after the colon"),
        ("{}/good.py:NUMBER", "is no function"),
    ],
)
def test_what_cannot_be_used_says_why(tmp_path, spec, message):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "good.py").write_text("NUMBER = 3\ndef f(): return 1\n")
    with pytest.raises(ValueError, match=message):
        plugins.import_function(spec.format(tmp_path), "k")
    assert plugins.import_function(f"{tmp_path}/good.py:f", "k")() == 1


def test_an_error_of_a_library_gets_the_name_of_what_it_concerns():
    message = r"^weights\.safetensors: header too large; copy it again$"
    with (
        pytest.raises(ValueError, match=message) as caught,
        concerning("weights.safetensors", "copy it again"),
    ):
        raise OSError("header too large\nat offset 3")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(KeyError), concerning("a", "b", (OSError,)):
        raise KeyError("x")


def test_first_lines_say_something():
    assert first_line(MemoryError()) == "MemoryError"
    assert first_line(KeyError("num_heads")) == "KeyError: 'num_heads'"
    assert first_line(ValueError("\n  two\nlines")) == "two"
    assert len(first_line(ValueError("x" * 1000))) == 300


def test_installed_packages_are_imported_by_entry_point(tmp_path, monkeypatch):
    """A distribution as pip leaves it: a module, and its entry point in the metadata."""
    (tmp_path / "my_installed_plugin.py").write_text("import sys\nsys.counted = sys.counted + 1\n")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megatron_rl.plugins]\nmine = my_installed_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "counted", 0, raising=False)
    plugins.load_plugins([])
    plugins.load_plugins([])
    assert sys.counted == 1
    assert plugins.loaded() == ()
    assert set(plugins.sources()) == {"my_installed_plugin"}
    (tmp_path / "my_installed_plugin.py").write_text("1 / 0\n")
    monkeypatch.delitem(sys.modules, "my_installed_plugin")
    with pytest.raises(
        ValueError, match=r"^entry point megatron_rl.plugins: mine = my_installed_plugin: cannot"
    ):
        plugins.load_plugins([])
