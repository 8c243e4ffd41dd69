"""Data files and model directories of the rows: as people have them, and as accidents leave them.

A row says in a few keys what its input is. ``make`` names a function of this module, with further
arguments where it is a list; it gets the data file's path, or for a row of models their folder.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import pickle
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from tests.trials.material import (
    Material,
    edit_json,
    edit_weights,
    plain_rows,
    small,
    toy,
    toy_alone,
    write_model,
    write_rows,
)

REMOVED = "..."  # in place of a value: the key goes
WEIGHTS = "model.safetensors"
Row = Mapping[str, Any]


def words_of(table: str, row: Row, folder: Path, material: Material) -> list[str]:
    """The command line of a row; its files are written into ``folder``, in place of the last's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    more = [word.replace("{folder}", str(folder)) for word in row.get("set", ())]
    if row.get("bare") or "command" in row:
        return [word.replace("{llama}", str(material.model("llama"))) for word in more]
    run_dir = folder / "run"
    if table in ("config", "ranks"):
        if "config" in row:
            more += [f"model.path={changed_model('toy', row, folder, material)}"]
        if "make" in row:
            made(row, material.letters() / "data.jsonl", folder / "data.jsonl")
        start = toy if table == "ranks" else toy_alone
        return start(material, run_dir, *more)
    if table == "data":
        return small(material.model("llama"), data_file(row, folder), run_dir, *more)
    model = changed_model(row.get("family", "llama"), row, folder, material)
    if "path" in row:
        model = Path(row["path"].replace("{folder}", str(folder)))
    return small(model, material.rows(), run_dir, *more)


def made(row: Row, *where: Path) -> None:
    """Calls what ``make`` names."""
    name, *arguments = [row["make"]] if isinstance(row["make"], str) else row["make"]
    getattr(sys.modules[__name__], name)(*where, *arguments)


def data_file(row: Row, folder: Path) -> Path:
    """``row``: what row 3 of eight has in place of its own; ``lines``: what follows four rows."""
    path = folder / row.get("file", "data.jsonl")
    rows: list[Any] = plain_rows(4 if "lines" in row else 8)
    if "row" in row:
        rows[2] = without_removed(rows[2] | row["row"])
    rows += row.get("lines", ())
    if "only" in row:
        rows = [{new: one[old] for new, old in row["only"].items()} for one in rows]
    write_rows(path, row.get("rows", rows))
    if "text" in row:
        path.write_text(row["text"])
    if "make" in row:
        made(row, path)
    return path


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != REMOVED}


def changed_model(family: str, row: Row, folder: Path, material: Material) -> Path:
    """``config`` and ``tokenizer``: keys of their JSON files; ``files``: name -> text."""
    if not row.keys() & {"config", "tokenizer", "files", "remove", "template", "make"}:
        return material.model(family)
    model = material.copy_of(family, folder / "model")
    for name, key in (("config.json", "config"), ("tokenizer_config.json", "tokenizer")):
        values = row.get(key, {})
        edit_json(model / name, **{k: ... if v == REMOVED else v for k, v in values.items()})
    for name, text in row.get("files", {}).items():
        (model / name).write_text(text)
    for name in row.get("remove", ()):
        (model / name).unlink(missing_ok=True)
    if "template" in row:
        # It lives in a file of its own, or in tokenizer_config.json.
        (model / "chat_template.jinja").unlink(missing_ok=True)
        edit_json(model / "tokenizer_config.json", chat_template=row["template"] or ...)
    if "make" in row:
        made(row, model)
    return model


def nothing(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def broken_lines(path: Path, count: int) -> None:
    write_rows(path, [*plain_rows(4), *["{not json"] * count])


def long_answer(path: Path, digits: int) -> None:
    number = "9" * digits
    write_rows(path, [*plain_rows(4), f'{{"prompt": "a", "answer": {number}, "data_source": "s"}}'])


def compressed(path: Path) -> None:
    path.write_bytes(gzip.compress(b"{}\n" * 99))


def encoded(path: Path, encoding: str, text: str = "caf\u00e9 = ") -> None:
    rows = [row | {"prompt": text + row["prompt"]} for row in plain_rows(8)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(content.encode(encoding))


def late_latin1(path: Path) -> None:
    good = write_rows(path, plain_rows(6)).read_bytes()
    path.write_bytes(good + '{"prompt": "caf\u00e9", "answer": "1"}\n'.encode("latin-1"))


def windows_lines(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def no_last_line_end(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip())


def parquet(path: Path, change: str = "") -> None:
    """Eight rows as parquet, spoiled as ``change`` says."""
    rows: list[dict[str, Any]] = [row | {"extra": {"n": 1}} for row in plain_rows(8)]
    if change == "plain":
        rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    elif change == "numbers":
        rows = [row | {"prompt": 3} for row in rows]
    elif change == "dates":
        rows = [row | {"answer": datetime.date(2024, 1, 2)} for row in rows]
    elif change == "null":
        rows[0]["answer"] = None
    table = pyarrow.Table.from_pylist(rows)
    if change == "empty":
        table = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, path)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-100])


def two_files(path: Path, last_line: str = "") -> None:
    write_rows(path.with_name("a.jsonl"), plain_rows(6))
    end = [last_line] if last_line else []
    write_rows(path.with_name("b.jsonl"), [*plain_rows(6, first=50), *end])


def hub_copy(path: Path) -> None:
    """A data set of the datasets library, as a folder of parquet files."""
    folder = path.with_name("sums") / "data"
    folder.mkdir(parents=True)
    parquet(folder / "train-00000-of-00001.parquet", "plain")


def no_entropy(source: Path, target: Path) -> None:
    """The toy's rows without their visual entropy."""
    rows = [json.loads(line) | {"extra": {}} for line in source.read_text().splitlines()]
    write_rows(target, rows)


def a_file(source: Path, target: Path) -> None:
    target.write_text("x")


def a_run(source: Path, target: Path, config: str) -> None:
    """The folder of a run, with what is said to be its configuration."""
    target.with_name("run").mkdir()
    (target.with_name("run") / "config.json").write_text(config)


def export(source: Path, target: Path) -> None:
    """A HF directory."""
    target.mkdir()
    (target / "config.json").write_text("{}")


def a_named_pipe(source: Path, target: Path) -> None:
    os.mkfifo(target)


def a_link(source: Path, target: Path) -> None:
    target.symlink_to(target.with_name("nowhere"))


def a_linked_step(source: Path, target: Path) -> None:
    checkpoints = target.with_name("run") / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_000004").symlink_to(target)


def own_method(source: Path, target: Path, text: str = "defaults:\n  - mine\n") -> None:
    """A method whose defaults are itself, or any ``text``."""
    folder = target.with_name("conf") / "method"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(text, encoding="latin-1")


def program(source: Path, target: Path) -> None:
    """Python that is to be started, not imported."""
    target.with_name("program.py").write_text("import sys\n\nsys.exit(0)\n")


def again(model: Path, sizes: Mapping[str, int]) -> None:
    """The same model with other sizes, weights included."""
    shutil.rmtree(model)
    write_model(model, "llama", **sizes)


def binary_config(model: Path) -> None:
    (model / "config.json").write_bytes(bytes(range(256)))


def cut(model: Path, name: str, size: int) -> None:
    (model / name).write_bytes((model / name).read_bytes()[:size])


def header_bomb(model: Path) -> None:
    (model / WEIGHTS).write_bytes((2**60).to_bytes(8, "little") + bytes(100))


def empty(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def adapter(model: Path) -> None:
    empty(model)
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (model / "adapter_model.safetensors").write_bytes(b"")


def links(model: Path) -> None:
    model.with_name("link").symlink_to(model)
    model.with_name("loop").symlink_to(model.with_name("loop"))


def pickled(model: Path) -> None:
    torch.save(load_file(model / WEIGHTS), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()


def hostile_pickle(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(harmful_pickle(model.with_name("ran")))


def harmful_pickle(proof: Path) -> bytes:
    """Unpickling it creates the folder ``proof``."""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(proof),)

    return pickle.dumps(Harm())


def tensor(model: Path, name: str, change: str) -> None:
    """One tensor, or with "all" each, changed as ``change`` says."""

    def edit(tensors: dict[str, Any]) -> None:
        for key in list(tensors) if name == "all" else [name]:
            tensors[key] = changed(tensors[key], change)

    edit_weights(model, edit)


def changed(values: torch.Tensor, change: str) -> torch.Tensor:
    values = values.clone()
    if change == "nan":
        values.view(-1)[0] = float("nan")
    elif change == "all_nan":
        values.fill_(float("nan"))
    elif change == "narrow":
        values = values[:, :-8].contiguous()
    else:
        values = values.to(getattr(torch, change))
    return values


def tensors(model: Path, removed: Sequence[str] = (), copies: Mapping[str, str] = {}) -> None:
    """Without some tensors; ``copies``: name of a new one -> that of its source."""

    def edit(found: dict[str, Any]) -> None:
        found.update({new: found[source].clone() for new, source in copies.items()})
        for name in removed:
            del found[name]

    edit_weights(model, edit)


def sharded(model: Path, spoil: str = "") -> None:
    """Two files and an index, which ``spoil`` makes wrong, or leaves ``beside`` the whole file."""
    found = load_file(model / WEIGHTS)
    if spoil != "beside":
        (model / WEIGHTS).unlink()
    names = sorted(found)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    where = {name: files[index >= len(names) // 2] for index, name in enumerate(names)}
    for file in files:
        part = {name: found[name] for name in names if where[name] == file}
        save_file(part, model / file, metadata={"format": "pt"})
    if spoil == "lies":
        where[names[0]] = files[1]
    text = "{" if spoil == "bad" else json.dumps({"metadata": {}, "weight_map": where})
    (model / "model.safetensors.index.json").write_text(text)
