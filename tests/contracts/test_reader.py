"""The check of contracts finds each kind of lack: a small package, and uses of it that are right
and wrong."""

from __future__ import annotations

import ast
import zipfile

import pytest

from tests.contracts.expressions import Rules
from tests.contracts.reader import Reader
from tests.contracts.sources import Sources
from tests.contracts.vendor import Vendor

FILES = {
    "vllm/__init__.py": (
        """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm.engine import Engine
"""
    ),
    "vllm/engine.py": (
        """
from dataclasses import dataclass
from abc import ABC, abstractmethod
from .parts import Part as Piece

@dataclass
class Settings:
    size: int
    name: str = ""

class Base(ABC):
    def __init__(self, settings: Settings):
        self.settings = settings
        self.piece = Piece()

    @abstractmethod
    def run(self, text, times): ...

    def stop(self): ...

class Engine(Base):
    def run(self, text, times, *, loud=False): ...

    async def finish(self): ...

    @classmethod
    def get(cls) -> "Engine": ...

def make(settings: Settings, **more) -> Engine: ...
"""
    ),
    "vllm/parts.py": "class Part:\n    tag: str\n    def turn(self, by=1): ...\n",
}
START = """
from vllm import Engine
from vllm.engine import Base, Settings, make
engine = Engine(Settings(1))
"""


@pytest.fixture(scope="module")
def vendor(tmp_path_factory) -> Vendor:
    folder = tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Vendor(Sources([folder]))


def problems(vendor: Vendor, text: str, **rules) -> list[str]:
    tree = ast.parse(START + text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = Reader(vendor, Rules(("vllm",), **rules), "a.py", "a", functions).read(tree)
    return [problem.split(": ", 1)[1] for problem in found]


GOOD = """
import vllm.engine as room
engine.run("a", 2, loud=True)
engine.piece.turn(by=2)
engine.settings.name
Engine.get().stop()
make(Settings(size=1), anything=2).finish()
room.Base
"vllm.engine"
getattr(engine, "other", None)
try:
    from vllm.engine import Gone
except ImportError:
    Gone = None

class Mine(Base):
    def run(self, text, times):
        self.settings.size
        super().stop()

def settings():
    fields = dict(size=1)
    fields["name"] = "a"
    return Settings(**fields)
"""
MINE = "class Mine(Base):\n    def run(self, text): ..."
OTHER = "class Mine(Engine):\n    def other(self):\n        "
SETS = "class Mine:\n    def __init__(self):\n        self.e = Engine(Settings(1))\n"
ALL = "all_of_them = [Engine(Settings(i)) for i in x]\nfor e in all_of_them:\n    e.go()"
BUILT = "    fields = dict(size=1)\n    fields |= {'colour': 2}\n    return Settings(**fields)"
RETURNED = "def fields():\n    return {'colour': 2}\nSettings(size=1, **fields())"
BAD = {
    "from vllm.engine import Gone": "there is no vllm.engine.Gone",
    "import vllm.gone": "there is no vllm.gone",
    "engine.go()": "vllm.engine.Engine has no go",
    "engine.run('a', 2, quiet=True)": "vllm.engine.Engine.run takes no quiet",
    "engine.finish(3)": "vllm.engine.Engine.finish takes 0 by position, not 1",
    "Engine.get().go()": "vllm.engine.Engine has no go",
    "engine.piece.turn(to=1)": "vllm.parts.Part.turn takes no to",
    "make(Settings(1)).go": "vllm.engine.Engine has no go",
    "Settings()": "vllm.engine.Settings also needs size",
    "Settings(1, colour=2)": "vllm.engine.Settings takes no colour",
    "x = 'vllm.engine.gone'": "there is no vllm.engine.gone",
    "Engine.gone = 1": "vllm.engine.Engine has no gone",
    "setattr(Engine, 'gone', 1)": "vllm.engine.Engine has no gone",
    "class Mine(Base):\n    pass": "Mine does not define run, abstract in vllm.engine.Base",
    MINE: "run takes ['text'], it is called as vllm.engine.Base.run with ['text', 'times']",
    OTHER + "self.go()": "vllm.engine.Engine give it no go",
    OTHER + "super().stop(1)": "vllm.engine.Base.stop takes 0 by position, not 1",
    SETS + "    def f(self):\n        self.e.go()": "vllm.engine.Engine has no go",
    "def f(e: Engine | None):\n    e.go()": "vllm.engine.Engine has no go",
    ALL: "vllm.engine.Engine has no go",
    "def f():\n" + BUILT: "vllm.engine.Settings takes no colour",
    RETURNED: "vllm.engine.Settings takes no colour",
}


def test_what_is_right_is_not_complained_of(vendor):
    assert problems(vendor, GOOD) == []


@pytest.mark.parametrize("text", BAD)
def test_each_lack_is_found(vendor, text):
    assert problems(vendor, text) == [BAD[text]]


def test_a_mixin_has_what_its_other_base_gives(vendor):
    text = "class Mine:\n    def f(self):\n        self.stop()\n        self.go()"
    assert problems(vendor, text, mixins={"Mine": "vllm.engine.Engine"}) == [
        "vllm.engine.Engine give it no go"
    ]


def test_any_keyword_is_a_field_of_the_class_that_gets_it(vendor):
    forwarded = {"vllm.engine.make": "vllm.engine.Settings"}
    assert problems(vendor, "make(Settings(1), name=2)", forwarded=forwarded) == []
    assert problems(vendor, "make(Settings(1), colour=2)", forwarded=forwarded) == [
        "vllm.engine.make takes no colour"
    ]


def test_a_branch_for_another_version_is_left_aside(vendor):
    text = "if newer():\n    engine.go()\nelse:\n    engine.stop()"
    assert problems(vendor, text, decide=lambda condition: False) == []
    assert problems(vendor, text, decide=lambda condition: True) == ["vllm.engine.Engine has no go"]


def test_wheels_are_read_like_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "vllm-1-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
    packed = Vendor(Sources([tmp_path / "vllm-1-py3-none-any.whl"]))
    assert problems(packed, "engine.go()") == ["vllm.engine.Engine has no go"]
