"""Prompts from files and generators: what is read, and every way in which a source can be wrong."""

from __future__ import annotations

import json
from datetime import date

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.data.prompts import load_prompts, load_sources, without_overlap
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types import HINTS, Prompt
from tests.unit.data.toy import character_tokenizer, data_config, write

TOKENIZER = character_tokenizer()


def text_of(prompt) -> str:
    return TOKENIZER.decode(prompt.token_ids)


def jsonl(folder, *rows) -> str:
    return write(folder / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def load(spec: str, limit: int = 99, tokenizer=TOKENIZER, **changes) -> list[Prompt]:
    return load_prompts(spec, data_config(**changes), tokenizer, limit)


def row(prompt="2+2", answer="4", data_source="toy", **more):
    return {"prompt": prompt, "answer": answer, "data_source": data_source, **more}


def test_rows_of_a_jsonl_file(tmp_path):
    spec = jsonl(tmp_path, row(), row("1+1", 2, extra={"level": 3}))
    first, second = load(spec, 40, columns={"extra": "extra"})
    found = (first.uid, first.answer, first.data_source, dict(first.extra))
    assert found == ("train:1", "4", "toy", {})
    assert (second.uid, second.answer, dict(second.extra)) == ("train:2", "2", {"level": 3})
    assert text_of(first) == "<user>2+2<assistant>"


def test_system_prompt_and_suffix(tmp_path):
    file = jsonl(tmp_path, row())
    (prompt,) = load(file, system_prompt="Be brief.", prompt_prefix="Q: ", prompt_suffix=" Answer:")
    assert text_of(prompt) == "<system>Be brief.<user>Q: 2+2 Answer:<assistant>"


HINTED = {"columns": {"solution": "steps"}, "hint_text": "|", "prompt_suffix": "!"}


def hints(spec: str, limit: int = 99, **changes) -> list[list[str]]:
    """Of each training prompt, beside its ratios."""
    config = data_config(**HINTED | changes)
    (source,) = load_sources(spec, config, TOKENIZER, limit, is_training=True)
    forms = [prompt.extra[HINTS] for prompt in source.prompts]
    assert all(TOKENIZER.decode(each["token_ids"]) == each["text"] for of in forms for each in of)
    assert all([each["ratio"] for each in of] == [0.25, 0.5, 0.75][: len(of)] for of in forms)
    return [[each["text"] for each in of] for of in forms]


def test_a_part_of_the_solution_follows_the_last_message(tmp_path):
    """Of 10 characters 2.5, 5 and 7.5, rounded to even; without the role there are none."""
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    messages += [{"role": "user", "content": "3"}]
    spec = jsonl(tmp_path, row(steps="0123456789"), row(messages, steps="abcd"))
    assert hints(spec) == [
        [f"<user>2+2|{part}!<assistant>" for part in ("01", "01234", "01234567")],
        [f"<user>1<assistant>2<user>3|{part}!<assistant>" for part in ("a", "ab", "abc")],
    ]
    plain = load(spec, prompt_suffix="!")
    assert [text_of(each) for each in plain] == [
        "<user>2+2!<assistant>",
        "<user>1<assistant>2<user>3!<assistant>",
    ]
    config = data_config(**HINTED)
    assert load_prompts(spec, config, TOKENIZER, 99) == plain, "not of held-out prompts"


def test_hints_that_are_too_long_are_left_out_or_refused(tmp_path):
    """22 tokens and those of the hint: 24, 27 and 30; of the second row 23, 24 and 25."""
    rows = (row(steps="0123456789"), row(steps="0123"))
    spec = jsonl(tmp_path, *rows)
    found = hints(spec, 27, on_long_prompt="drop")
    assert [len(of) for of in found] == [2, 3]
    with pytest.raises(
        ValueError, match=r"with a hint of 0\.75: row 1: prompt longer than rollout"
    ):
        hints(spec, 27)


@pytest.mark.parametrize("steps", [None, " ", 3])
def test_a_row_without_a_solution_is_refused(tmp_path, steps):
    spec = jsonl(tmp_path, row(steps="12"), row(steps=steps))
    with pytest.raises(ValueError, match=r"row 2: no text in steps: .*columns\.solution=null"):
        hints(spec)


def test_generated_tasks_have_no_solutions():
    with pytest.raises(ValueError, match="no text in steps"):
        hints("reasoning_gym:chain_sum?size=2&seed=1")


def test_without_template_the_text_is_encoded_as_it_stands(tmp_path):
    file = jsonl(tmp_path, row())
    (prompt,) = load(file, 9, character_tokenizer(None), apply_chat_template=False)
    assert text_of(prompt) == "2+2"


def test_messages_and_dotted_columns_of_a_parquet_file(tmp_path):
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    rows = [
        {
            "prompt": messages,
            "reward_model": {"ground_truth": "4"},
            "data_source": "math_dapo",
            "extra_info": {"index": 7},
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    columns = {"answer": "reward_model.ground_truth", "extra": "extra_info"}
    (prompt,) = load(str(tmp_path / "dapo.parquet"), columns=columns)
    assert text_of(prompt) == "<user>1+1<assistant>2<user>2+2<assistant>"
    found = (prompt.answer, prompt.data_source, dict(prompt.extra), prompt.uid)
    assert found == ("4", "math_dapo", {"index": 7}, "dapo:1")


def test_the_answer_behind_a_marker(tmp_path):
    spec = jsonl(tmp_path, {"question": "q", "answer": "3 #### 4\n#### 1,234 "})
    columns = {"prompt": "question", "data_source": None}
    (prompt,) = load(spec, columns=columns, answer_after="####")
    assert prompt.answer == "1,234"
    (prompt,) = load(spec, columns=columns)
    assert (prompt.answer, prompt.data_source) == ("3 #### 4\n#### 1,234", "train")


BAD_FILES = [
    ("", r"train\.jsonl: the file has no row"),
    ('{"prompt": "1", "prompt": "2"}', r"row 1: not JSON \(two equal keys in one object\)"),
    ("{}\n[1]\nnope\n", r"(?s)row 2: not a JSON object: \[1\].*row 3: not JSON"),
    (
        json.dumps(row(answer=None)) + "\n\n" + json.dumps(row(answer=" ")),
        r"rows 1, 3: no answer .*: None; give the row an answer",
    ),
    (json.dumps(row(answer=True)), r"row 1: no answer"),
    (
        json.dumps({"prompt": "a", "anwser": "b", "data_source": "c"}),
        r"did you mean anwser\? data\.columns\.answer=anwser; there",
    ),
    (
        json.dumps(row(prompt="a" * 50)),
        r"row 1: prompt longer than rollout\.max_prompt_tokens = 40: \(67, .*; raise the limit",
    ),
    (json.dumps(row(prompt=3)), r"row 1: the prompt is neither a text nor a list"),
    (json.dumps(row(prompt=[{"role": "user", "text": "a"}])), r"row 1: the prompt is neither"),
    (
        json.dumps(
            row(prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        ),
        r"row 1: the prompt is neither",
    ),
    (json.dumps(row(prompt=" ")), r"row 1: empty prompt"),
    (json.dumps(row(data_source=3)), r"row 1: data_source is not a text: 3"),
    (json.dumps(row(data_source="\ud83d")), r"row 1: data_source is not a text: '\\ud83d'"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_gives_one_error(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(write(tmp_path / "train.jsonl", content), 40)
    assert str(tmp_path / "train.jsonl") in str(caught.value)


def test_many_bad_rows_are_counted_not_listed(tmp_path):
    with pytest.raises(ValueError, match=r"rows 1, 2, 3, 4, 5, \.\.\. \(9 in all\): no answer"):
        load(jsonl(tmp_path, *[row(answer="")] * 9), 40)


def test_two_system_messages_a_missing_marker_and_other_files_are_refused(tmp_path):
    spec = jsonl(
        tmp_path, row([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    )
    with pytest.raises(ValueError, match=r"set data\.system_prompt=null"):
        load(spec, system_prompt="x")
    with pytest.raises(
        ValueError, match=r"nothing after data\.answer_after = '####' in the answer: '4'"
    ):
        load(spec, answer_after="####")
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        load(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"x\.csv: not a known kind"):
        load(write(tmp_path / "x.csv", "a,b"))
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load(write(tmp_path / "x.parquet", "a,b"))
    with pytest.raises(ValueError, match=r"no chat template; .*data\.apply_chat_template=false"):
        load_prompts(spec, data_config(), character_tokenizer(None), 99)


def test_long_prompts_can_be_dropped_but_not_all(tmp_path):
    spec = jsonl(tmp_path, row("a" * 50), row())
    assert [prompt.uid for prompt in load(spec, 40, on_long_prompt="drop")] == ["train:2"]
    with pytest.raises(ValueError, match="prompt longer than"):
        load(spec, 4, on_long_prompt="drop")


def test_a_prompt_without_a_token_is_named_also_where_long_ones_are_dropped(tmp_path):
    """The characters of the second are none of the tokenizer's."""
    spec = jsonl(tmp_path, row("3 + 4"), row("\u4e09\u56db"))
    with pytest.raises(ValueError, match="row 2: empty prompt: the tokenizer makes no token of it"):
        load(spec, 40, on_long_prompt="drop", apply_chat_template=False)


def test_generated_tasks_take_turns_and_share_a_query():
    chain_sum, gcd = "reasoning_gym:chain_sum", "reasoning_gym:gcd"
    prompts = load("reasoning_gym:chain_sum+gcd?size=3&seed=1", 200)
    assert [prompt.data_source for prompt in prompts] == [chain_sum, gcd] * 3
    assert all(prompt.extra["answer"] == prompt.answer for prompt in prompts)
    other = load("reasoning_gym:chain_sum?size=1&seed=1&max_terms=2+gcd?size=2&seed=4", 200)
    assert [prompt.data_source for prompt in other] == [chain_sum, gcd, gcd]
    assert text_of(other[1]) != text_of(prompts[1]), "the second task has a seed of its own"


def test_a_plus_inside_a_value_starts_no_task():
    spec = (
        "reasoning_gym:simple_equations?size=20&seed=1"
        '&operators=["+"]&operators_weights=[1.0]&max_terms=2'
    )
    prompts = load(spec, 200)
    assert all("-" not in text_of(prompt).split("=")[0] for prompt in prompts)


def test_generating_leaves_the_global_generator_of_numpy_alone():
    numpy.random.seed(1)
    before = numpy.random.get_state()[1].copy()
    load("reasoning_gym:chain_sum+pool_matrix?size=2&seed=1", 9999)
    assert (numpy.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("chain_sun?size=2&seed=1", r"no such task: 'chain_sun'; did you mean chain_sum"),
        (
            "chain_sum?size=2&seed=1&max_digit=1",
            r"unknown key: 'max_digit'; did you mean max_digits\?",
        ),
        ("chain_sum?seed=1", r"size must be a whole number: None; write chain_sum\?size=N&seed=S"),
        (
            "chain_sum?size=2&seed=1&min_terms=9",
            r"its configuration is refused: .*max_terms must be >= min_terms",
        ),
        ("chain_sum?size", r"not of the form key=value: 'size'"),
        ("chain_sum?size=2&seed=1&max_digits=x", r"its configuration is refused"),
    ],
)
def test_a_bad_generator_spec_gives_one_error(query, message):
    with pytest.raises(ValueError, match=message):
        load(f"reasoning_gym:{query}", 200)


def test_held_out_prompts_leave_the_training_set(tmp_path):
    train = load(jsonl(tmp_path, row(), row("1+1", 2), row("3", 3)), 40)
    assert [prompt.uid for prompt in without_overlap(train, train[1:2])] == ["train:1", "train:3"]
    assert without_overlap(train, train) == []


def test_tokenizer_directories(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path = .*absent: no such directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match="no tokenizer in it"):
        load_tokenizer(tmp_path)
    character_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").encode("2+2") == TOKENIZER.encode("2+2")
    (tmp_path / "good/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path / "good")
    without_end = character_tokenizer()
    without_end.eos_token = None
    without_end.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path / "endless")


def test_sequences_lie_flat():
    batch = sequence_batch([((5, 6), (7,)), ((5,), (8, 9))])
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 8, 9]
    assert batch.prompt_lengths.tolist() == [2, 1] and batch.response_lengths.tolist() == [1, 2]
    assert sequence_batch([]).num_responses == 0


def test_a_template_that_leaves_the_prompt_out_is_refused(tmp_path):
    deaf = character_tokenizer("hello")
    with pytest.raises(ValueError, match="makes the same text of all 2 prompts"):
        load_prompts(jsonl(tmp_path, row(), row("1+1", 2)), data_config(), deaf, 40)
    assert len(load(jsonl(tmp_path, row(), row()), 40)) == 2


def test_a_template_that_shows_the_date_shows_that_of_the_run(tmp_path):
    dated = character_tokenizer("{{ strftime_now('%d %m %Y') }} {{ messages[0]['content'] }}")
    spec = jsonl(tmp_path, row())
    (prompt,) = load_prompts(spec, data_config(template_date="2026-02-03"), dated, 99)
    assert prompt.text == "03 02 2026 2+2"
    assert load_prompts(spec, data_config(), dated, 99)[0].text == f"{date.today():%d %m %Y} 2+2"
