"""Programs, judged by running them against the tests of their prompt in a sandbox.

The program is the last block of the answer that is fenced as Python (or not labelled); without a
fence, the whole answer. It has Python's standard library. The tests of a prompt are ``extra.tests``
where there are any, else its answer, in one of two forms:

- Python source (or a list of such texts). Statements other than definitions, imports and
  assignments are its tests::

      assert add(2, 3) == 5
      assert add("a", "b") == "ab"

- a list of cases ``{"input": "2 3\\n", "output": "5\\n"}``, as a list or as JSON text. The program
  is run as a script for each; what it prints must be the output but for white space at the ends of
  lines and at the end.

Accuracy is 1 when all tests pass; with ``reward.partial_credit`` it is the share that pass. A
program that fails, loops, or takes more memory than ``reward.memory_gib`` is wrong; the tests of a
program share ``reward.timeout_s``.

**What a program can not do to get a verdict.** Its exit code and what it prints say nothing. Output
is compared outside of the sandbox. So is every test of the form ``assert <expression> ==
<literal>`` (either way round): the literal never enters the sandbox, and the value that comes out
is taken apart into Python's own types first, so that an object that equals everything equals
nothing. Any other statement has to be answered with a number drawn for it, which is sent when it is
its turn: leaving early (``sys.exit``, ``os._exit``) passes nothing.

**What remains.** In such other statements a program that replaces the functions they call, or
searches the interpreter it shares with them for the channel of answers, can pass. Write tests as
comparisons with literals, or as input and output, where that matters.
"""

import ast
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.base import Task, Verdict, Verifier
from megatron_rl.rewards.registry import limited, register_verifier
from megatron_rl.rewards.sandbox import Sandbox, refusal

_FENCE = "```"
_LABELS = ("", "python", "py", "python3")
_SHARE_OF_TIME = 0.9  # of reward.timeout_s; the rest is for starting, comparing and cleaning up
_SETUP = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
)


@dataclass(frozen=True)
class Case:
    """One run of a script. Example: ``Case("2 3\\n", "5\\n")``."""

    input: str
    output: str


@dataclass(frozen=True)
class Statement:
    """One test or set-up statement.

    Where it compares an expression with a literal, both are set, so that only the expression is
    evaluated in the sandbox.

    Example: ``Statement("assert f(1) == 2", is_test=True, expression="f(1)", literal="2")``.
    """

    text: str
    is_test: bool
    expression: str | None = None
    literal: str | None = None


_STARTED = Statement("pass", is_test=False)  # fails where the program itself does


def program(answer: str) -> str:
    """The last closed fenced block of Python, or the whole answer. One pass over the lines."""
    last_block: str | None = None
    lines: list[str] | None = None  # of the block that is open
    for line in answer.split("\n"):
        label = line.strip()
        if lines is not None and label == _FENCE:
            last_block = "\n".join(lines)
            lines = None
        elif lines is not None:
            lines.append(line)
        elif label.startswith(_FENCE) and label.removeprefix(_FENCE).strip().lower() in _LABELS:
            lines = []
    # A block that is still open at the end was cut off, and is no program.
    return answer if last_block is None else last_block


def read_tests(task: Task) -> list[Case] | list[Statement]:
    """The tests of a prompt.

    Raises:
        ValueError: there are none, or they are in neither form.
    """
    given: Any = task.extra.get("tests")
    if given is None:
        given = task.answer
    if isinstance(given, str) and re.match(r"\s*\[\s*\{", given):
        given = json.loads(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        if given and all(isinstance(case, Mapping) for case in given):
            return [_case(case) for case in given]
        if not all(isinstance(text, str) for text in given):
            raise ValueError("its tests are neither texts nor {input, output}")
        given = "\n".join(given)
    if not isinstance(given, str):
        raise ValueError(f"its tests are {type(given).__name__}, not a text or a list")
    try:
        statements = [_statement(node) for node in ast.parse(given).body]
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"its tests are not Python ({error})") from error
    if not any(statement.is_test for statement in statements):
        raise ValueError("it has no tests")
    return statements


@register_verifier("code")
class CodeVerifier(Verifier):
    reads_prompt = False
    starts_processes = True

    def check(self, tasks: Sequence[Task]) -> list[str]:
        problem = refusal(self.options.sandbox)
        problems = [] if problem is None else [problem]
        for task in tasks:
            try:
                read_tests(task)
            except ValueError as error:
                problems.append(
                    f"{task.uid}: {error}; give extra.tests or the answer Python asserts, or a "
                    "list of {input, output}"
                )
        return problems

    def verify(self, task: Task, answer: str) -> Verdict:
        tests = read_tests(task)
        ends_at = time.monotonic() + _SHARE_OF_TIME * self.options.timeout_s
        source = program(answer)
        passed = []
        if isinstance(tests[0], Case):
            for case in tests:
                passed.append(self._passes_case(source, case, ends_at))
                if not passed[-1] and not self.options.partial_credit:
                    break
        else:
            passed = self._passed_tests(source, tests, ends_at)
        num_tests = sum(isinstance(test, Case) or test.is_test for test in tests)
        return limited(sum(passed) / max(1, num_tests), self.options)

    def _passes_case(self, source: str, case: Case, ends_at: float) -> bool:
        if time.monotonic() >= ends_at:
            return False
        with self._sandbox(source, case.input, ends_at) as sandbox:
            output = sandbox.output()
        return output is not None and _lines(output) == _lines(case.output)

    def _passed_tests(
        self, source: str, statements: Sequence[Statement], ends_at: float
    ) -> list[bool]:
        """Whether each test passes.

        A failed statement ends the program. For the tests after it, where they count, the program
        is started again, with the set-up but without the tests before.
        """
        passed: list[bool] = []
        done = 0
        while done < len(statements) and time.monotonic() < ends_at:
            setup = [statement for statement in statements[:done] if not statement.is_test]
            setup.insert(0, _STARTED)
            done_before = done
            with self._sandbox(source, None, ends_at) as sandbox:
                held = all(_holds(sandbox, statement) for statement in setup)
                while held and done < len(statements):
                    held = _holds(sandbox, statements[done])
                    if statements[done].is_test:
                        passed.append(held)
                    done += 1
            # Where the program or a set-up statement failed, a new start fails again: a new
            # statement, or one of those before, which may need what a test did that a new start
            # leaves out.
            in_setup = done == done_before or not statements[done - 1].is_test
            if not held and (in_setup or not self.options.partial_credit):
                break
        return passed

    def _sandbox(self, source: str, stdin: str | None, ends_at: float) -> Sandbox:
        return Sandbox(
            self.options.sandbox,
            source,
            stdin=stdin,
            memory_bytes=self.options.memory_bytes,
            ends_at=ends_at,
        )


def _holds(sandbox: Sandbox, statement: Statement) -> bool:
    """Whether a statement runs without an exception, or the two sides of a comparison are equal.

    The nonce proves that the statement was reached: a program that exits early cannot know it.
    """
    nonce = secrets.token_hex(16)
    if statement.expression is None or statement.literal is None:
        answer = sandbox.ask({"nonce": nonce, "statement": statement.text})
        return answer == {"nonce": nonce, "done": True}
    answer = sandbox.ask({"nonce": nonce, "expression": statement.expression})
    if answer is None or answer.get("nonce") != nonce or not isinstance(answer.get("value"), str):
        return False
    try:
        return literal(answer["value"]) == literal(statement.literal)
    except (ValueError, SyntaxError, RecursionError, TypeError):
        return False


def literal(text: str) -> Any:
    """A Python literal, or ``set()``, ``inf`` and ``nan`` as ``repr`` writes them.

    Raises:
        ValueError, SyntaxError, RecursionError, TypeError: it is none.
    """
    if text in ("set()", "frozenset()"):
        return set()
    if text in ("inf", "-inf", "nan"):
        return float(text)
    if text.startswith("frozenset("):
        text = text.removeprefix("frozenset(").removesuffix(")")
    return ast.literal_eval(text)


def _lines(text: str) -> list[str]:
    """Of an output, without white space at the ends of lines and at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _case(case: Mapping[str, Any]) -> Case:
    values = [case.get("input"), case.get("output")]
    if not all(isinstance(value, str) for value in values):
        raise ValueError("a case of its tests lacks the text of input or output")
    return Case(str(values[0]), str(values[1]))


def _statement(node: ast.stmt) -> Statement:
    text = ast.unparse(node)
    if isinstance(node, _SETUP):
        return Statement(text, is_test=False)
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        sides = [node.test.left, *node.test.comparators]
        if len(sides) == 2 and isinstance(node.test.ops[0], ast.Eq):
            # ``f(1) == 2``, and ``2 == f(1)``.
            for expression, other in (sides, reversed(sides)):
                if _is_literal(other):
                    return Statement(text, True, ast.unparse(expression), ast.unparse(other))
    return Statement(text, is_test=True)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
