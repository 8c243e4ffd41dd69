"""The mistakes of a user are one message of the tools, with an exit code, and no traceback."""

import importlib
import sys

import pytest

SIZES = ["--train", "tp=2", "--rollout", "tp=2"]
MEMORY = ["experiment=qwen2_5_7b_8gpu", "model.path=/nowhere"]


@pytest.mark.parametrize(
    ("tool", "words", "message"),
    [
        ("plan_sync", ["--model", "{folder}/broken.json", *SIZES], "broken.json: Expecting value"),
        ("plan_sync", ["--model", "{folder}/list.json", *SIZES], "list.json: "),
        (
            "plan_sync",
            ["--model", "{folder}/empty.json", *SIZES],
            "empty.json: KeyError: 'model_type'; give the config.json of a HF model",
        ),
        (
            "plan_memory",
            ["--world-size", "0", "--gpu-gib", "80", *MEMORY],
            "--world-size 0: give the number of processes",
        ),
        (
            "plan_memory",
            ["--world-size", "8", "--gpu-gib", "nan", *MEMORY],
            "--gpu-gib nan: give the memory of a GPU",
        ),
        ("plan_memory", ["--world-size", "8", "--gpu-gib", "80", *MEMORY], "/nowhere"),
        (
            "visual_entropy",
            ["{folder}/none", "--cache", "{folder}/c", "x.png"],
            "none: no config.json there; give a Hugging",
        ),
        ("mutate_loss", ["--sample", "0"], "--sample 0: give a number from 1 to"),
        ("merge_sets", ["--out", "o", "nope=x"], "data=nope: no such option; there are default"),
        ("merge_sets", ["--out", "o", "math={folder}/none.jsonl"], "none.jsonl: no such file"),
        (
            "convert_checkpoint",
            ["to-hf", "{folder}/none", "{folder}/x"],
            "none is not a directory; give a checkpoint",
        ),
    ],
)
def test_a_mistake_is_one_message(tmp_path, capsys, monkeypatch, tool, words, message):
    for name, text in (("broken", '{"a":\n'), ("list", "[]"), ("empty", "{}")):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.setattr(sys, "argv", [tool, *(word.format(folder=tmp_path) for word in words)])
    main = importlib.import_module(f"tools.{tool}").main
    try:
        code = main()
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    if isinstance(code, str):  # what Python itself prints on its way out
        code, said = 1, code
    assert code in (1, 2)
    assert message in said
    assert "Traceback" not in said
