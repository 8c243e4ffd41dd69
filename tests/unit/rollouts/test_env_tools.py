"""Tools: what a call is, what comes back, and what the model is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.pool import WorkerPool
from megatron_rl.rollouts.environments.base import Done, EnvironmentSettings
from megatron_rl.rollouts.environments.search import _opened, indexed
from megatron_rl.rollouts.environments.tools import Tools, calculator, functions_of, read_calls
from megatron_rl.rollouts.environments.worker import EpisodeSetup

OWN = '''
def twice(number: int) -> int:
    """Doubles.

    Args:
        number: Any.
    """
    return 2 * number
'''


def settings(*tools: str) -> EnvironmentSettings:
    return EnvironmentSettings("tools", tools, 50.0, 1 << 30, 100, "rlimits_only")


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def test_calls_are_read_in_order_and_a_bad_one_says_why() -> None:
    calls = read_calls(
        'I compute. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call> and '
        + call('{"name": "b"}')
        + call("{'name': 1}")
        + call('{"name": 3, "arguments": {}}')
        + '<tool_call>{"name": "cut"'
    )
    assert [(one.name, dict(one.arguments)) for one in calls[:2]] == [("a", {"x": 1}), ("b", {})]
    assert [one.problem is None for one in calls] == [True, True, False, False, False]
    assert read_calls("no call at all") == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("6*7", "42"),
        ("(2 + 3) * 4", "20"),
        ("7 // 2 - -1", "4"),
        ("2**10 % 1000", "24"),
        ("1/4", "0.25"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "True + 1", "9**9**9", "'a'*3", "1/0", "1 +", "x", "1j"]
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, SyntaxError)):
        calculator(expression)


def test_results_and_errors_are_messages_of_the_tool(tmp_path) -> None:
    (tmp_path / "own_tool.py").write_text(OWN)
    tools = Tools(settings("calculator", f"{tmp_path}/own_tool.py:twice"))
    text = "".join(
        [
            call('{"name": "calculator", "arguments": {"expression": "6*7"}}'),
            call('{"name": "twice", "arguments": {"number": 4}}'),
            call('{"name": "twice", "arguments": {"amount": 4}}'),
            call('{"name": "thrice", "arguments": {}}'),
            call('{"name": "calculator", "arguments": {"expression": "1/0"}}'),
        ]
    )
    found = tools.step(text, 0)
    assert not isinstance(found, Done)
    contents = [message["content"] for message in found]
    assert contents[:2] == ["42", "8"]
    for words, content in zip(("missing", "no tool 'thrice'", "Zero"), contents[2:], strict=True):
        assert content.startswith("error: ") and words in content
    assert [message["name"] for message in found[:2]] == ["calculator", "twice"]
    assert {message["role"] for message in found} == {"tool"}
    assert tools.step("the answer is 42", 0) == Done()
    assert Tools.num_calls(text) == 5
    many = tools.step(call('{"name": "twice", "arguments": {"number": 1}}') * 10, 0)
    assert not isinstance(many, Done)
    assert [message["content"][:21] for message in many] == ["2"] * 8 + ["error: a turn has at "]


def test_a_script_has_the_names_of_earlier_ones() -> None:
    """Also in a worker that has seen none of them, and behind one that failed or ended."""

    def script(code: str) -> str:
        return call(json.dumps({"name": "python", "arguments": {"code": code}}))

    def printed(earlier: Sequence[str], *codes: str) -> list[str]:
        tools = Tools(settings("python"))
        tools.earlier = earlier
        found = tools.step("".join(map(script, codes)), 0)
        assert not isinstance(found, Done)
        return [message["content"].strip() for message in found]

    first = "import random\nx = random.random()\nprint(x)"
    (drawn,) = printed([], first)
    assert 0 < float(drawn) < 1
    earlier = [script(first), script("y = 1\n1 / 0"), "no call", script("exit()")]
    assert printed(earlier, "print(x)", "y += 1\nprint(y)") == [drawn, "2"]
    assert "ZeroDivisionError" in printed(earlier[:1], "1 / 0")[0]
    assert printed([], "print('a')", "print('b')") == ["a", "b"]


CORPUS = [
    {"title": "Cats", "text": "The cat sat on the mat."},
    {"text": "Dogs and a cat: the cat chases no dog, the cat sleeps."},
    {"title": "Rain", "text": "It rained over Tokyo."},
    {"title": "Long", "text": "zebra " * 100},
]


def test_search_ranks_by_bm25(tmp_path) -> None:
    """By k1 = 1.2 and b = 0.75, 8 words on average: 2 of 7 words have 4.4 / (2 + 1.2 (0.25 + 0.75 *
    7 / 8)) = 1.425 times the weight of the word, 3 of 12 have 6.6 / (3 + 1.65) = 1.419."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in CORPUS[:3]))
    chosen = replace(settings("search"), corpus=str(path))

    def searched(query: str) -> list[str]:
        (found,) = Tools(chosen).step(
            call(json.dumps({"name": "search", "arguments": {"query": query}})), 0
        )
        return found["content"].split("\n\n")

    texts = [f"{one.get('title', '')}\n{one['text']}".strip()[:31] for one in CORPUS]
    assert searched("cats") == texts[:2], "as their stems"
    assert searched('raining OR ("') == [texts[2]], "no language of queries"
    assert searched("zebra") == searched("?!") == ["nothing found"]
    path.write_text("".join(json.dumps(each) + "\n" for each in CORPUS))
    indexed.cache_clear(), _opened.cache_clear()
    assert searched("zebra") == ["Long\n" + ("zebra " * 100)[:26].strip()]


def test_workers_have_the_index_that_was_made_before_them(tmp_path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(CORPUS[0]))
    chosen = replace(settings("search"), corpus=str(path))
    pool = WorkerPool(EpisodeSetup((), chosen), limit=("env.timeout_s", 50.0))
    turn = call('{"name": "search", "arguments": {"query": "cat"}}')
    try:
        (reply,) = pool.judge([(Task("p:1", "4", "toy", {}), 7, [turn])])
    finally:
        pool.close()
    assert reply["messages"][0]["content"] == "Cats\nThe cat sat on the mat."


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ('{"text": "a"}\n{"txt": 1}\n', "line 2: KeyError: 'text'; give a file whose lines"),
    ],
)
def test_a_wrong_corpus_is_named(tmp_path, lines: str | None, words: str) -> None:
    path = tmp_path / "corpus.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(ValueError, match=words):
        Tools.functions(replace(settings("search"), corpus=str(path)))
    for chosen in (settings("search"), replace(settings("calculator"), corpus=str(path))):
        with pytest.raises(ValueError, match="give both"):
            Tools.functions(chosen)


def test_two_tools_of_one_name_are_refused(tmp_path) -> None:
    (tmp_path / "other_tool.py").write_text(OWN.replace("twice", "calculator"))
    with pytest.raises(ValueError, match="two tools are called calculator"):
        functions_of(settings("calculator", f"{tmp_path}/other_tool.py:calculator"), [])
    with pytest.raises(ValueError, match=r"env\.tools"):
        functions_of(settings("nowhere.module:function"), [])
