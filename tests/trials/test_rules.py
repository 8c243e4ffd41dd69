"""The rules that judge a trial can fail: outputs made up for each verdict."""

from __future__ import annotations

import pytest

from tests.trials.groups import all_cases
from tests.trials.record import Row, record, table
from tests.trials.run import chosen, passed
from tests.trials.verdicts import (
    Dies,
    Ends,
    Outcome,
    Refused,
    Verdict,
    judge,
    message,
    without_torchrun,
)

BOX = """E1121 12:00:00.000000 77 torch/distributed/elastic/multiprocessing/api.py:984] \
failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/v/torch/distributed/run.py", line 995, in <module>
    main()
  File "/v/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 362, in wrapper
    return f(*args, **kwargs)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
megatron_rl.train FAILED
------------------------------------------------------------
Root Cause (first observed failure):
  error_file: <N/A>
============================================================
"""
CLEAR = "error: 1 problem in the configuration:\n  - optim.beta1 = 1.0: must be below 1; lower it\n"
OURS = (
    'Traceback (most recent call last):\n  File "/r/megatron_rl/train.py", line 3, in main\n   '
    " x()\nKeyError: 'y'\n"
)
BETA = Refused((r"optim\.beta1",))


def verdict(
    text: str, *expected: Refused | Ends | Dies, code: int | None = 1, seconds: float = 3.0
) -> str:
    return judge(expected or (BETA,), Outcome(code, text, seconds)).name


@pytest.mark.parametrize(
    ("text", "code", "seconds", "name"),
    [
        (CLEAR, 1, 3.0, "good"),
        ("memory plan: 1 GiB\n" * 20 + CLEAR + BOX, 1, 3.0, "good"),
        (BOX, 1, 3.0, "bad"),  # lost
        (CLEAR, 0, 3.0, "bad"),  # went on
        (CLEAR, None, 90.0, "bad"),  # no end
        (CLEAR, 1, 90.0, "poor"),  # late
        (CLEAR, -9, 3.0, "poor"),
        ("policy: layers of megatron\n" + CLEAR, 1, 3.0, "poor"),  # late
        (OURS + "[rank 0] error: KeyError: optim.beta1, lower it\n", 1, 3.0, "poor"),
        (CLEAR + CLEAR, 1, 3.0, "poor"),  # said twice
        (CLEAR + "  - more\n" * 15, 1, 3.0, "poor"),  # long
        ("error: Invalid beta parameter; lower it\n", 1, 3.0, "poor"),  # no key
        ("error: optim.beta1 is invalid\n", 1, 3.0, "poor"),  # nothing to do
    ],
)
def test_a_refusal_is_one_early_clear_message(text, code, seconds, name):
    assert verdict(text, code=code, seconds=seconds) == name


def test_silence_about_something_harmless_is_poor():
    assert verdict("finished\n", Refused(("x",), harm=False), code=0) == "poor"
    assert verdict("finished\n", Refused(("x",)), code=0) == "bad"


def test_a_command_that_is_promised_must_end_well():
    assert verdict("finished\n", Ends(), code=0) == "good"
    assert verdict(CLEAR, Ends()) == "bad"
    assert verdict("finished\n", Ends(("resumed",)), code=0) == "poor"
    assert verdict("finished\n", Ends(("resumed",), harm=True), code=0) == "bad"
    assert verdict(OURS + "finished\n", Ends(), code=0) == "poor"


def test_what_a_case_finds_itself_counts():
    outcome = Outcome(0, "finished\n", 3.0)
    assert judge([Ends()], outcome.noting(["128 weights are NaN"])).name == "bad"
    assert judge([Ends()], outcome.noting((), ["no prompt in samples.jsonl"])).name == "poor"
    assert judge([Ends()], Outcome(0, "finished\n", 3.0, left=("process x",))).name == "bad"


def test_the_best_of_what_is_allowed_counts():
    assert verdict("optim.beta1 is odd\nfinished\n", BETA, Ends(("beta1",)), code=0) == "good"
    assert verdict(CLEAR, Ends(), BETA) == "good"


def test_a_fault_names_its_cause_and_no_consequence():
    dead = Dies(("SIGKILL",))
    assert verdict("step 1\n" + BOX + "SIGKILL\n", dead) == "good"
    assert verdict("step 1\n", dead) == "bad"
    assert verdict("error: gloo: Connection reset by peer GLHF\nSIGKILL\n", dead) == "poor"
    assert verdict("SIGKILL\n", dead, code=0) == "bad"


def test_the_part_of_torchrun_is_not_ours():
    text = CLEAR + BOX
    assert without_torchrun(text).strip() == CLEAR.strip()
    assert message("notice\n" + text).splitlines() == CLEAR.splitlines()
    assert message(OURS + BOX).splitlines() == OURS.splitlines()


def test_the_program_fails_on_one_bad_or_many_poor():
    case = all_cases()[0]

    def rows(good: int, poor: int, bad: int) -> list[Row]:
        names = ["good"] * good + ["poor"] * poor + ["bad"] * bad
        return [
            Row(case, Verdict(name, ("reason",) if name != "good" else ()), 1.0, "said")
            for name in names
        ]

    assert passed(rows(95, 5, 0))
    assert not passed(rows(94, 6, 0))
    assert not passed(rows(99, 0, 1))
    assert "[not argued]" in table(rows(1, 1, 0))
    assert "[argued: why]" in table([Row(case.arguing("why"), Verdict("poor", ("late",)), 1.0, "")])


def test_the_record_holds_no_path_of_a_machine(tmp_path):
    row = Row(
        all_cases()[0],
        Verdict("bad", (f"lost {tmp_path}/run",)),
        1.0,
        f"error: {tmp_path}/data.jsonl: no \u00e9",
    )
    text = record([row], 60.0)
    assert str(tmp_path) not in text
    assert text.isascii()


def test_every_group_has_cases_and_each_is_chosen_by_name():
    cases = all_cases()
    assert len(cases) >= 80
    assert [case.name for case in chosen([], ["b03r"])] == ["b03r"]
    assert {case.group for case in chosen(["faults"], [])} == {"faults"}
