"""All data of a run: several files, weights, and what is said about them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.data.columns import column_roles
from megatron_rl.data.prompts import load_prompts, load_sources
from megatron_rl.data.reading import read_data, training_stream, with_steps
from megatron_rl.data.rows import Problems
from megatron_rl.errors import ConfigError
from tests.unit.data.toy import character_tokenizer, data_config, write

TOKENIZER = character_tokenizer()


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def plain(*prompts: str, answer: str = "1") -> str:
    return lines(*[{"prompt": prompt, "answer": answer} for prompt in prompts])


def config(*overrides: str) -> Config:
    return validate(Config, compose("config", ["model.path=/m", *overrides]), "the configuration")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "eval.jsonl", plain("9", "8"))
    return tmp_path


def read(*overrides: str):
    return read_data(config("data.eval=eval.jsonl", *overrides), TOKENIZER)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_plain_file_of_prompts_and_answers(folder):
    write(folder / "mine.jsonl", plain("1+1", "2+2"))
    data = read("data.train=mine.jsonl")
    assert [prompt.uid for prompt in data.train_prompts] == ["mine:1", "mine:2"]
    assert {prompt.data_source for prompt in data.train_prompts} == {"mine"}
    assert all(dict(prompt.extra) == {} for prompt in data.train_prompts)


def test_columns_that_are_there_are_used_and_those_named_must_be_there(folder):
    row = {"prompt": "a", "answer": "b", "data_source": "gsm8k", "extra": {"level": 2}}
    write(folder / "full.jsonl", lines(row))
    (prompt,) = read("data.train=full.jsonl").train_prompts
    assert (prompt.data_source, dict(prompt.extra)) == ("gsm8k", {"level": 2})
    (prompt,) = read("data.train=full.jsonl", "data.columns.data_source=null").train_prompts
    assert prompt.data_source == "full"
    write(folder / "mine.jsonl", plain("1"))
    with pytest.raises(ValueError, match=r"data\.columns\.extra: no row has this column: 'info'"):
        read("data.train=mine.jsonl", "data.columns.extra=info")
    with pytest.raises(
        ValueError, match=r"columns\.data_source: no .*data\.columns\.data_source=auto"
    ):
        read("data.train=mine.jsonl", "data.columns.data_source=data_source")


def test_columns_of_other_data_sets_are_suggested():
    rows = [(1, {"question": "q", "reward_model": {"ground_truth": "1"}})]
    with pytest.raises(
        ValueError, match=r"did you mean question\? data\.columns\.prompt=question"
    ) as caught:
        column_roles(rows, data_config().columns, Problems("file"))
    assert "data.columns.answer=reward_model.ground_truth" in str(caught.value)


def test_several_files_and_patterns_with_names_of_their_own(folder):
    for name in ("a/train.jsonl", "b/train.jsonl", "c/more_1.jsonl", "c/more_2.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name, plain(f"in {name}"))
    data = read("data.train=[a/train.jsonl,b/train.jsonl,'c/*.jsonl']")
    uids = [prompt.uid for prompt in data.train_prompts]
    assert uids == ["a/train.jsonl:1", "b/train.jsonl:1", "more_1:1", "more_2:1"]
    assert [source.summary() for source in data.train][
        2
    ] == "2 rows of c/*.jsonl (2 files), 2 prompts kept"
    with pytest.raises(ValueError, match=r"a/train\.jsonl: comes twice"):
        read("data.train=[a/train.jsonl,'*/train.jsonl']")


def test_a_list_of_one_and_the_name_alone_are_the_same(folder):
    write(folder / "mine.jsonl", plain(*"abcdefg"))
    streams = [
        training_stream(read(f"data.train={spelling}"), config("data.train=x", "data.eval=y"))
        for spelling in ("mine.jsonl", "[mine.jsonl]", "'m*.jsonl'")
    ]
    assert streams[0].take(20) == streams[1].take(20) == streams[2].take(20)
    assert streams[0].state() == streams[1].state()


def test_weights_decide_the_share_of_each_file(folder):
    write(folder / "a.jsonl", plain("a1", "a2", "a3"))
    write(folder / "b.jsonl", plain(*[f"b{number}" for number in range(40)]))
    overrides = [
        "data.train=[a.jsonl,b.jsonl]",
        "data.train_weights=[0.75,0.25]",
        "data.eval=eval.jsonl",
    ]
    stream = training_stream(read(*overrides), config(*overrides))
    taken = [prompt.uid.split(":")[0] for prompt in stream.take(40)]
    assert taken.count("a") == 30 and taken.count("b") == 10
    assert taken[:4] == ["a", "a", "b", "a"]


def test_held_out_files_take_turns(folder):
    write(folder / "more.jsonl", plain("7"))
    write(folder / "train.jsonl", plain("1"))
    data = read("data.train=train.jsonl", "data.eval=[eval.jsonl,more.jsonl]")
    assert [prompt.uid for prompt in data.held_out_prompts] == ["eval:1", "more:1", "eval:2"]


def test_what_was_read_dropped_and_kept_is_said(folder, caplog):
    write(folder / "train.jsonl", plain("1", "2" * 50, "9", "3"))
    with caplog.at_level(logging.INFO, "megatron_rl"):
        data = read(
            "data.train=train.jsonl", "data.on_long_prompt=drop", "rollout.max_prompt_tokens=20"
        )
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert said == [
        (
            "data.train: 4 rows of train.jsonl, 1 longer than 20 tokens dropped, 1 also in"
            " data.eval dropped, 2 prompts kept"
        ),
        "data.eval: 2 rows of eval.jsonl, 2 prompts kept",
    ]
    assert dict(data.train[0].dropped) == {"longer than 20 tokens": 1, "also in data.eval": 1}
    assert any(
        "its 2 prompts are fewer than batch.prompts_per_step = 128" in text
        for text in warnings(caplog)
    )


def test_training_on_nothing_but_held_out_prompts_is_refused(folder):
    with pytest.raises(ValueError, match=r"every one of its 2 prompts is also in data\.eval"):
        read("data.train=eval.jsonl")


def test_repeated_prompts_and_clashing_answers_are_said(folder, caplog):
    rows = plain("1+1", "2+2", "1+1") + plain("3+3", answer="6") + plain("3+3", answer="7")
    write(folder / "train.jsonl", rows)
    read("data.train=train.jsonl", "batch.prompts_per_step=1")
    said = "\n".join(warnings(caplog))
    assert "1 rows repeat a prompt and its answer (such as train:1, train:3)" in said
    assert "1 prompts come with different answers (train:4, train:5: '6' and '7')" in said


SOURCE = "reasoning_gym:palindrome_generation"


def test_answers_to_a_generated_task_may_differ(folder, caplog):
    rows = [
        {"prompt": "Make a palindrome: i, i, j, j", "answer": answer, "data_source": SOURCE}
        for answer in ("ijji", "jiij")
    ]
    write(folder / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    words = "1 prompts come with different answers"
    read("data.train=train.jsonl", "batch.prompts_per_step=1")
    assert words not in "\n".join(warnings(caplog))
    read("data.train=train.jsonl", "batch.prompts_per_step=1", "reward.verifier=exact")
    assert words in "\n".join(warnings(caplog))


def test_answers_of_gsm8k_name_the_setting_that_reads_them(folder, caplog):
    write(folder / "train.jsonl", plain("1+1", "2+2", answer="1 and 1 is\n#### 2"))
    write(folder / "eval.jsonl", plain("9", answer="#### 9"))
    read("data.train=train.jsonl", "batch.prompts_per_step=1")
    assert """type 'data.answer_after="####"'""" in warnings(caplog)[0]
    caplog.clear()
    read("data.train=train.jsonl", "batch.prompts_per_step=1", "data.answer_after='####'")
    assert warnings(caplog) == []


def test_boxed_answers_name_the_verifier_that_reads_them(folder, caplog):
    write(folder / "train.jsonl", plain("1+1", answer=r"so \boxed{2}"))
    read("data.train=train.jsonl", "batch.prompts_per_step=1", "reward.verifier=number")
    assert "reward.verifier=math" in warnings(caplog)[0]


ENCODINGS = [
    (
        plain("1+1").encode("utf-16"),
        r"t\.jsonl: row 1: not UTF-8 .*UTF-16.*iconv -f UTF-16 -t UTF-8",
    ),
    (plain("1+1").encode("utf-16-le"), r"t\.jsonl: row 1: not UTF-8"),
    (
        plain("1") + '{"prompt": "caf\u00e9", "answer": "1"}\n',
        r"t\.jsonl: row 2: not UTF-8 \(byte 0xe9 at character 16\)",
    ),
    (
        plain("1") + '{"prompt": 1' + "1" * 5000 + "}",
        r"t\.jsonl: row 2: not JSON \(Exceeds the limit",
    ),
    (plain("1") + "[" * 100000, r"t\.jsonl: row 2: not JSON \("),
    (
        plain("1") + '{"prompt": "\\ud83d", "answer": "1"}',
        r"t\.jsonl: row 2: half of a surrogate pair in the prompt",
    ),
    (
        plain("1") + '{"prompt": "x", "answer": "\\ud83d"}',
        r"t\.jsonl: row 2: half of a surrogate pair in the answer",
    ),
]


@pytest.mark.parametrize(("content", "message"), ENCODINGS)
def test_text_that_cannot_be_read_is_named_by_file_and_row(tmp_path, content, message):
    file = tmp_path / "t.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(str(file), data_config(columns={"data_source": "auto"}), TOKENIZER, 99)
    assert not isinstance(caught.value, UnicodeError)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(plain("1+1").encode("utf-8-sig"))
    (prompt,) = load_prompts(
        str(tmp_path / "t.jsonl"), data_config(columns={"data_source": "auto"}), TOKENIZER, 99
    )
    assert TOKENIZER.decode(prompt.token_ids) == "<user>1+1<assistant>"


TEMPLATES = [
    (
        "{% for m in messages %}",
        r"rows 1, 2: the chat template of the model fails \(TemplateSyntaxError: ",
    ),
    (
        "{{ raise_exception('no such role here') }}",
        r"rows 1, 2: .* fails \(TemplateError: no such role here\)",
    ),
    (
        "{% if messages[0].content == 'b' %}{{ 1 / 0 }}{% endif %}",
        r"row 2: .* fails \(ZeroDivisionError: division by zero\)",
    ),
]


@pytest.mark.parametrize(("template", "message"), TEMPLATES)
def test_a_template_that_fails_is_named_with_the_row(tmp_path, template, message):
    file = write(tmp_path / "t.jsonl", plain("a", "b"))
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(
            file, data_config(columns={"data_source": "auto"}), character_tokenizer(template), 99
        )
    assert "t.jsonl" in str(caught.value) and len(str(caught.value).splitlines()) <= 4


def test_images_are_refused_by_name(tmp_path):
    content = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "what is this?"}]
    file = write(
        tmp_path / "t.jsonl",
        lines({"prompt": [{"role": "user", "content": content}], "answer": "1"}),
    )
    with pytest.raises(
        ValueError, match=r"row 1: a message has parts other than text: .*data\.columns\.images"
    ):
        load_prompts(file, data_config(columns={"data_source": "auto"}), TOKENIZER, 99)


def test_an_error_of_many_kinds_stays_short(tmp_path):
    bad = "".join("[" * (number % 40 + 1) + '"' * (number % 3) + "\n" for number in range(400))
    with pytest.raises(ValueError) as caught:
        load_sources(write(tmp_path / "t.jsonl", bad), data_config(), TOKENIZER, 99)
    assert len(str(caught.value).splitlines()) <= 15


BAD_NAMES = [
    (
        ["data.train={a.jsonl: 0.7, b.jsonl: 0.3}"],
        r"data\.train=\[a\.jsonl,b\.jsonl\] data\.train_weights=\[0\.7,0\.3\]",
    ),
    (["data.train=5"], "data.train = 5: give a name, or a list of names"),
    (["data.train=[a.jsonl,5]"], "give a name, or a list of names"),
    (["data.train=a.jsonl", "data.train_weights=[0]"], "greater than 0"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_NAMES)
def test_names_of_another_form_say_how_they_are_written(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config("data.eval=e.jsonl", *overrides)


EPOCHS = ("trainer.num_steps=null", "trainer.num_epochs=3", "data.train=train.jsonl")


def test_an_epoch_has_the_steps_that_its_prompts_fill(folder):
    """Of 11 prompts two are held out; the other nine fill four steps of two, three times."""
    write(folder / "train.jsonl", plain(*map(str, range(10, 19)), "8", "9"))
    epochs = config("data.eval=eval.jsonl", *EPOCHS, "batch.prompts_per_step=2")
    counted = with_steps(epochs, read_data(epochs, TOKENIZER))
    assert (counted.trainer.num_steps, counted.trainer.num_epochs) == (12, 3)
    given = config("data.eval=eval.jsonl", "trainer.num_steps=5", EPOCHS[-1])
    assert with_steps(given, read_data(given, TOKENIZER)) == given


def test_an_epoch_that_fills_no_step_is_refused(folder):
    write(folder / "train.jsonl", plain(*map(str, range(10, 19))))
    epochs = config("data.eval=eval.jsonl", *EPOCHS, "batch.prompts_per_step=10")
    with pytest.raises(ValueError, match="9 prompts"):
        with_steps(epochs, read_data(epochs, TOKENIZER))
