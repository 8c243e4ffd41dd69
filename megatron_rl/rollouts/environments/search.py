"""The tool ``search``: BM25 over a local corpus, by the full-text index of SQLite (FTS5)."""

import functools
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from megatron_rl.errors import concerning
from megatron_rl.rollouts.environments.base import EnvironmentSettings

_NUM_FOUND = 3


def search_tool(settings: EnvironmentSettings, query: str) -> str:
    """The documents of ``env.corpus`` that fit best, the best one first."""
    # Words alone, each in quotes: FTS5 would read operators of its query language.
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query)) or '""'
    rows = _opened(settings.corpus).execute(
        "SELECT title, text FROM corpus WHERE corpus MATCH ? ORDER BY bm25(corpus), rowid LIMIT ?",
        (words, _NUM_FOUND),
    )
    most = settings.max_message_characters // _NUM_FOUND
    found = [f"{title}\n{text}".strip()[: most - 2] for title, text in rows]
    return "\n\n".join(found) or "nothing found"


def check_corpus(settings: EnvironmentSettings) -> None:
    """Raises ValueError where it cannot be read, or SQLite has no FTS5."""
    with concerning("env.tools: search", "take a Python whose SQLite has FTS5"), _empty():
        pass
    if not sum(1 for _ in _documents(settings.corpus)):
        raise ValueError(f"env.corpus = {settings.corpus}: is empty; give a file with documents")


def _documents(path: str) -> Iterator[tuple[str, str]]:
    """Title and text of each document. Raises ValueError with the line that is not one."""
    remedy = 'give a file whose lines are {"text": ..., "title": ...}, the title optional'
    with concerning(f"env.corpus = {path}", remedy, (OSError,)):
        lines = Path(path).open(encoding="utf-8")  # noqa: SIM115 (closed below)
    with lines:
        for number, line in enumerate(lines, start=1):
            with concerning(f"env.corpus = {path}: line {number}", remedy):
                row = json.loads(line)
                yield str(row.get("title", "")), str(row["text"])


def _empty() -> closing[sqlite3.Connection]:
    """An index without documents; words are compared by their stems."""
    index = sqlite3.connect(":memory:", isolation_level=None)
    index.execute("CREATE VIRTUAL TABLE corpus USING fts5(title, text, tokenize = 'porter')")
    return closing(index)


@functools.cache
def indexed(path: str) -> bytes:
    """The index of a corpus as bytes, which a process that is forked afterwards has as well."""
    with _empty() as index:
        index.executemany("INSERT INTO corpus VALUES (?, ?)", _documents(path))
        return index.serialize()


@functools.cache
def _opened(path: str) -> sqlite3.Connection:
    """This process's connection: SQLite forbids using one across a fork."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.deserialize(indexed(path))
    return index
