"""A type checker reads the package with the signatures of torch and of everything else that is
installed; settings in .ty.toml.

What it finds must be what known_type_errors.txt lists, by file and rule: a new error fails, and so
does a listed one that is gone, so that the list can only shrink. After a correction::

    python -m tests.test_types      writes the list anew
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_size import REPO

KNOWN = REPO / "tests" / "known_type_errors.txt"
CONFIG = REPO / ".ty.toml"
HEAD = """\
# Findings of the type checker that are known: file, rule, how often. Most ask for a narrower
# annotation; none fails with what a run produces. The list only shrinks (tests/test_types.py).
"""
# Exit codes of ty: nothing found, something found. All others: it could not check.
CHECKED = (0, 1)
Errors = Counter[tuple[str, str]]  # (file relative to the folder checked, rule)


def findings(target: str, folder: Path) -> list[dict]:
    """What ty says of ``target`` in ``folder``, with the packages of this environment."""
    options = ["--config-file", str(CONFIG), "--python", sys.prefix, "--no-progress"]
    command = [sys.executable, "-m", "ty", "check", *options, "--output-format", "gitlab", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode in CHECKED, done.stdout + done.stderr
    return json.loads(done.stdout)


def counted(found: Sequence[dict]) -> Errors:
    return Counter((one["location"]["path"], one["check_name"]) for one in found)


def written(errors: Errors) -> str:
    lines = [f"{path} {rule} {count}\n" for (path, rule), count in sorted(errors.items())]
    return HEAD + "".join(lines)


def read(text: str) -> Errors:
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return Counter({(path, rule): int(count) for path, rule, count in rows})


def differences(found: Errors, known: Errors) -> list[str]:
    """A line for each file and rule whose number of errors is not the one that is known."""
    return [
        f"{path}: {rule}: {found[path, rule]} found, {known[path, rule]} known"
        for path, rule in sorted({*found, *known})
        if found[path, rule] != known[path, rule]
    ]


def test_the_package_has_no_new_type_errors():
    found = findings("megatron_rl", REPO)
    wrong = differences(counted(found), read(KNOWN.read_text(encoding="utf-8")))
    said = [
        f"{one['location']['path']}:{one['location']['positions']['begin']['line']}: "
        f"{one['description']}"
        for one in found
        if any(line.startswith(f"{one['location']['path']}: ") for line in wrong)
    ]
    assert not wrong, "\n".join([*wrong, "", *said, "", "fewer: python -m tests.test_types"])


# Of a name that is gone, or of a call that no longer fits.
CALLS = {
    *("missing-module-member", "missing-argument", "unknown-argument"),
    "too-many-positional-arguments",
}


@pytest.mark.parametrize("folder", ["tools", "examples"])
def test_programs_use_what_is_there(folder):
    wrong = [one for one in findings(folder, REPO) if one["check_name"] in CALLS]
    assert not wrong, [(one["location"]["path"], one["description"]) for one in wrong]


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import torch\ntorch.zeros(3).tolist(1)\n", "too-many-positional-arguments"),
        ("from megatron_rl.errors import no_such\n", "missing-module-member"),
        ("import torch\ntorch.zeros(3).no_such()\n", "missing-attribute"),
        ("from megatron_rl.types import Prompt\nPrompt(uid='a')\n", "missing-argument"),
        (
            "from jaxtyping import Float\nfrom torch import Tensor\n\n\n"
            'def f(x: Float[Tensor, " tokens"]) -> int:\n    return x\n',
            "invalid-explicit-return",
        ),
    ],
)
def test_a_planted_error_is_found(tmp_path, source, rule):
    """With the signatures of torch, of this package and of jaxtyping's annotations."""
    (tmp_path / "megatron_rl").symlink_to(REPO / "megatron_rl")
    (tmp_path / "planted.py").write_text(source)
    assert ("planted.py", rule) in counted(findings("planted.py", tmp_path))


def test_vendors_behind_fences_may_be_anything(tmp_path):
    source = "from vllm import LLM\nfrom megatron.core import anything\n\nLLM(anything).no_such()\n"
    (tmp_path / "planted.py").write_text(source)
    assert findings("planted.py", tmp_path) == []


def test_the_list_can_only_shrink():
    known = read("# head\n\na.py rule 2\nb.py other 1\n")
    assert differences(known, known) == []
    assert differences(Counter({("a.py", "rule"): 3, ("b.py", "other"): 1}), known) == [
        "a.py: rule: 3 found, 2 known"
    ]
    assert differences(Counter({("a.py", "rule"): 2}), known) == ["b.py: other: 0 found, 1 known"]
    assert differences(known + Counter({("c.py", "new"): 1}), known) == [
        "c.py: new: 1 found, 0 known"
    ]
    assert read(written(known)) == known


if __name__ == "__main__":
    KNOWN.write_text(written(counted(findings("megatron_rl", REPO))), encoding="utf-8")
