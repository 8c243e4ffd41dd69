"""The data sets of the papers, a row or two each in their published form, read by their preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.columns import choices_of, letter_of, numbered_images
from megatron_rl.data.prompts import CATEGORIES, load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types import Prompt
from tests.unit.data.pictures import png

PICTURE = {"bytes": png(56, 56), "path": "a.png"}
OTHER = {"bytes": png(84, 84), "path": "b.png"}
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture
def read(tmp_path, seeing_folder, vision):
    tokenizer = load_tokenizer(seeing_folder)

    def read(preset: str, *rows: dict[str, Any]) -> list[Prompt]:
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / "1.png").write_bytes(png(56, 56))
        words = [f"data={preset}", "model.path=m", f"data.train={file}", f"data.eval={file}"]
        config = validate(DataConfig, compose("config", words)["data"], preset)
        return load_prompts(str(file), config, tokenizer, 4000, vision)

    return read


def asked(prompt: Prompt) -> str:
    """The words of the user's turn."""
    return prompt.text.partition(BEFORE)[2].removesuffix(AFTER)


def test_math_keeps_the_solution_whose_box_the_verifier_reads(read):
    solution = r"As $1 + 1 = 2$, the answer is $\boxed{2}$."
    row = {"problem": "1 + 1?", "level": "Level 1", "type": "Algebra", "solution": solution}
    (prompt,) = read("math", row)
    assert (asked(prompt), prompt.answer) == ("1 + 1?", solution)
    assert prompt.extra[CATEGORIES] == ["level=Level 1", "type=Algebra"]


def test_emoset_asks_one_question_of_every_image(read):
    rows = [
        {"image": PICTURE, "emotion": "awe", "label": 2},
        {"image": OTHER, "emotion": "fear", "label": 6},
    ]
    first, second = read("emoset", *rows)
    assert asked(first).startswith(f"{PLACE}Which emotion does this image evoke: amusement,")
    assert [first.answer, second.answer] == ["awe", "fear"]
    assert first.images != second.images


def test_mathvista_has_the_text_of_the_answer_and_shows_the_choices(read):
    skills = ["arithmetic reasoning", "statistical reasoning"]
    common = {"decoded_image": PICTURE, "metadata": {"task": "figure question", "skills": skills}}
    rows = [
        {"query": "Hint\nChoices:\n(A) 3\n(B) 7", "choices": ["3", "7"], "answer": "7"} | common,
        {"query": "How many?", "choices": None, "answer": "1.2"} | common,
    ]
    chosen, free = read("mathvista", *rows)
    assert (chosen.answer, free.answer) == ("B", "1.2")
    assert asked(chosen) == f"{PLACE}Hint\nChoices:\n(A) 3\n(B) 7"
    assert chosen.extra["choices"] == ["3", "7"] and "choices" not in free.extra
    wanted = ["task=figure question", *(f"skills={skill}" for skill in skills)]
    assert chosen.extra[CATEGORIES] == wanted


def test_mathverse_mmstar_and_mmk12_show_their_options(read):
    text = "Which?\nChoices:\nA:2\nB:3"
    subject = {"subject": "Plane Geometry"}
    verse = {"query_cot": text, "image": PICTURE, "answer": "A", "problem_version": "Text Lite"}
    (prompt,) = read("mathverse", verse | {"metadata": subject})
    assert (asked(prompt), prompt.answer) == (f"{PLACE}{text}", "A")
    assert prompt.extra[CATEGORIES] == ["problem_version=Text Lite", "subject=Plane Geometry"]
    star = {"question": text, "image": PICTURE, "answer": "B", "category": "math"}
    (prompt,) = read("mmstar", star | {"l2_category": "geometry"})
    assert (asked(prompt), prompt.answer) == (f"{PLACE}{text}", "B")
    (prompt,) = read("mmk12", {"question": text, "image": PICTURE, "answer": "A"} | subject)
    assert prompt.extra[CATEGORIES] == ["subject=Plane Geometry"]


def test_we_math_has_its_options_in_one_text(read):
    row = {"question": "Area?", "option": "A. 8; B. 16 cm; C. No correct answer", "answer": "B"}
    (prompt,) = read("we_math", row | {"image_path": PICTURE, "key": "2steps_1"})
    assert asked(prompt) == f"{PLACE}Area?\n(A) 8\n(B) 16 cm\n(C) No correct answer"
    assert (prompt.answer, prompt.extra[CATEGORIES]) == ("B", ["key=2steps_1"])
    with pytest.raises(ValueError, match="its letters are not A, B, C and so on"):
        choices_of("A. 8; C. 16")


def test_polymath_asks_in_the_image(read):
    row = {"answer_option": "1, 2, 3, 4", "final_answer": "3", "category": "odd_one_out"}
    (prompt,) = read("polymath", row | {"image": PICTURE})
    wanted = f"{PLACE}Answer the question that the image shows. Options: 1, 2, 3, 4"
    assert (asked(prompt), prompt.answer) == (wanted, "3")


def test_scienceqa_answers_by_the_number_of_a_choice(read):
    common = {"question": "Which?", "choices": ["1", "0"], "subject": "s", "topic": "t"}
    rows = [
        {"hint": "See the map.", "image": PICTURE, "answer": 1} | common,
        {"hint": "", "image": None, "answer": 0} | common,
    ]
    seen, text = read("scienceqa", *rows)
    assert asked(seen) == f"{PLACE}See the map.\nWhich?\n(A) 1\n(B) 0"
    assert asked(text) == "Which?\n(A) 1\n(B) 0"
    # As texts 1 and 0 would be A and B.
    assert (seen.answer, text.answer) == ("B", "A")
    with pytest.raises(ValueError, match="row 1: the answer is no number of one of the 2 choices"):
        read("scienceqa", rows[0] | {"answer": 2})


def test_mathv360k_has_conversations(read):
    turns = ["<image>\nHow many?", "The answer is 5"]
    talk = [{"from": who, "value": text} for who, text in zip(("human", "gpt"), turns, strict=True)]
    (prompt,) = read("mathv360k", {"id": "1", "image": PICTURE, "conversations": talk})
    assert (asked(prompt), prompt.answer) == (f"{PLACE}\nHow many?", "5")


def test_mmmu_has_options_as_a_text_and_images_by_number(read):
    images = {f"image_{number}": None for number in range(1, 8)}
    row = {
        "question": "Compare <image 2> with <image 1>.",
        "options": "['$6', \"Ohm's law\"]",
        "answer": "B",
        "subfield": "Physics",
    }
    (prompt,) = read("mmmu", row | images | {"image_1": PICTURE, "image_2": OTHER})
    assert asked(prompt) == f"Compare {PLACE} with {PLACE}.\n(A) $6\n(B) Ohm's law"
    assert [(image.width, image.height) for image in prompt.images] == [(84, 84), (56, 56)]
    assert prompt.answer == "B"


def test_messages_take_their_images_from_one_column(read):
    row = {"question": [{"role": "user", "content": "<image 1>?"}], "options": None, "answer": "B"}
    with pytest.raises(ValueError, match="row 1: a list of image columns needs a prompt that is a"):
        read("mmmu", row | {"subfield": "x"} | {f"image_{n}": PICTURE for n in range(1, 8)})


def test_mathvision_has_one_picture_for_all_marks(read):
    row = {"question": "<image1> like <image2>?", "decoded_image": PICTURE, "answer": "C"}
    row |= {"options": ["A", "B", "C"], "subject": "counting", "level": 2}
    (prompt,) = read("mathvision", row)
    assert asked(prompt).startswith(f"{PLACE} like <image2>?\n(A) A\n")
    assert prompt.answer == "C" and prompt.extra[CATEGORIES] == ["subject=counting", "level=2"]


def test_virl39k_has_paths_and_answers_in_boxes(read):
    common = {"category": "Charts", "source": "x", "image": ["images/1.png"]}
    rows = [
        {"question": "<image>How many?", "answer": r"\boxed{7}"} | common,
        {"question": "Which?", "answer": r"\boxed{B}"} | common,
    ]
    given, first = read("virl39k", *rows)
    assert [asked(given), asked(first)] == [f"{PLACE}How many?", f"{PLACE}Which?"]
    assert [given.answer, first.answer] == [r"\boxed{7}", r"\boxed{B}"]


def test_an_answer_that_is_no_choice_is_named(read):
    row = {"query": "?", "choices": ["3", "7"], "answer": "8", "decoded_image": PICTURE}
    with pytest.raises(ValueError, match="row 1: the answer is neither a letter nor one of the 2"):
        read("mathvista", row | {"metadata": {"task": "t", "skills": ["s"]}})
    with pytest.raises(ValueError, match="not a list of choices, nor the text of one"):
        choices_of("3 and 7")
    assert choices_of(None) == [] and choices_of("[]") == []


@pytest.mark.parametrize(
    ("answer", "choices", "letter"),
    [("7", ["3", "7"], "B"), ("B", ["3", "7"], "B"), ("A", ["C", "A"], "B"), ("C", ["3"], None)],
)
def test_the_letter_of_an_answer(answer, choices, letter):
    assert letter_of(answer, choices) == letter


def test_without_marks_all_images_that_there_are_are_taken():
    row = {"a": 1, "b": None, "c": 3}
    assert numbered_images("?", row, ("a", "b", "c")) == ("?", [1, 3])
    assert numbered_images("<image 3><image1>", row, ("a", "b", "c")) == ("<image><image>", [3, 1])


def test_images_without_a_place_are_refused_with_the_setting(read, tmp_path: Path):
    with pytest.raises(ValueError, match="puts them before the prompt"):
        read("easy_r1", {"problem": "?", "answer": "1", "images": [PICTURE]})
