"""Any text as the value of an override: Hydra's parser and OmegaConf read back what was given."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megatron_rl.config.cli.overrides import as_override
from megatron_rl.config.load import compose

HOSTILE = [
    "runs/ablation/method=grpo,seed=1",
    " a b ",
    'it\'s "quoted"',
    "back\\'slash\\\\'",
    "a\\${b}\\\\${c}\\",
    "choices(a,b)",
    "null",
    "7",
    "",
    "\u00fcber/\u65e5\u672c",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_configuration_holds_the_text_that_was_given(text):
    assert compose("config", [as_override("run_dir", text)])["run_dir"] == text


@settings(max_examples=100)
@given(st.text(alphabet="ab=,'\"\\${}~ ()[]:#%*\u00e9?!@&;|<>\n\t-+0.", max_size=12))
@example("\\${a}\\\\")
def test_any_text_is_read_back(text):
    if text == "???":
        return
    value = OverridesParser.create().parse_override(as_override("k", text)).value()
    plain = value if isinstance(value, str) else value.text
    assert OmegaConf.create({"k": plain}).k == text


def test_what_needs_no_quotes_has_none():
    assert as_override("run_dir", "/shared/runs/a-1_b.c") == "run_dir=/shared/runs/a-1_b.c"
    assert as_override("run_dir", "runs/seed=1") == "run_dir='runs/seed=1'"


def test_the_mark_of_a_missing_value_is_refused():
    with pytest.raises(ValueError, match=r"run_dir = '\?\?\?': .* missing value"):
        as_override("run_dir", "???")
