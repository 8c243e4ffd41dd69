"""Writes examples/methods: a card for each method, and what all of them share.

    python tools/method_cards.py           writes the pages
    python tools/method_cards.py --check   exit status 1 when a page is not what would be written

The text of a card is the head of its yaml; choices, knobs and needs come from the configuration
itself. A card says where a method differs from the defaults; the defaults and the common metrics
stand once, in README.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import load_method
from megatron_rl.knobs import Choices, Named, Piece
from megatron_rl.loss import Method, ResponseBatch, TokenBatch, choices
from megatron_rl.loss.config import ESTIMATORS, MethodConfig
from megatron_rl.signals import signals_of
from tools.claim_checks import Claim, Outcome, overall
from tools.claims import tried

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "examples" / "methods"
CHOICES = (
    ("estimator", choices.ESTIMATORS),
    ("shaping", choices.SHAPERS),
    ("token_shaping", choices.TOKEN_SHAPERS),
    ("policy_loss", choices.POLICY_LOSSES),
    ("aggregate", choices.AGGREGATIONS),
    ("kl.weights", choices.KL_WEIGHTS),
)
ORDER = ("formula", "paper", "depends on", "reduces to", "choices", "released code")


def head(name: str) -> dict[str, str]:
    """Title and fields of the comment at the top of a method's yaml."""
    lines = [
        line[1:]
        for line in (conf_dir() / "method" / f"{name}.yaml").read_text().splitlines()
        if line.startswith("#")
    ]
    key = "title"
    fields = {key: lines[0].strip()}
    for line in lines[1:]:
        if line.startswith("   "):
            fields[key] += " " + line.strip()
        else:
            key, _, value = line.strip().partition(": ")
            fields[key] = value
    return fields


def differing(piece: Piece, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What is chosen, and every knob that is not at its default, by the key an override takes."""
    for key, info in type(piece).model_fields.items():
        value = getattr(piece, key)
        path = f"{prefix}{key}"
        if path == "name" or (not info.is_required() and same(value, info.get_default(**FACTORY))):
            continue
        if isinstance(value, Named):
            yield f"{path}.name", value.name
            yield from knobs(value, path)
        elif isinstance(value, dict):
            for name, choice in value.items():
                yield from list(knobs(choice, f"{path}.{name}")) or [(f"{path}.{name}", "{}")]
        elif isinstance(value, Piece):
            yield from list(differing(value, f"{path}.")) or [(path, "{}")]
        else:
            yield path, shown(value)


FACTORY = {"call_default_factory": True}


def same(value: object, default: object) -> bool:
    """Whether a field is at its default, which for a choice may be written as in a yaml."""
    if isinstance(value, Piece) and isinstance(default, Mapping):
        return value.model_dump() == default
    return value == default


def knobs(choice: Named, path: str) -> Iterator[tuple[str, str]]:
    """The knobs of a choice that differ from the signature of its function."""
    for knob, value in choice.knobs.items():
        if value != type(choice).model_fields[knob].default:
            yield f"{path}.{knob}", shown(value)


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def defaults_of(table: Choices) -> Iterator[tuple[str, str]]:
    """The choices of a table with their knobs and defaults; those without knobs in one row."""
    plain = []
    for name in table:
        knobs_of = table.schema(name).model_fields.items()
        fields = [(knob, info) for knob, info in knobs_of if knob != "name"]
        if not fields:
            plain.append(name)
        else:
            yield name, ", ".join(f"`{knob}` {default_text(info)}" for knob, info in fields)
    yield ", ".join(plain), ""


def section_defaults() -> Iterator[tuple[str, str]]:
    """The keys beside the choices, with their defaults."""
    for key, info in MethodConfig.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, Named):
            continue
        if isinstance(section, type) and issubclass(section, Piece):
            fields = section.model_fields.items()
            yield from ((f"{key}.{name}", default_text(field)) for name, field in fields)
        elif key not in ("name", "shaping", "token_shaping"):
            yield key, default_text(info)


def default_text(info: FieldInfo) -> str:
    """A field's default; a choice by its name."""
    if info.is_required():
        return "must be set"
    default = info.get_default(**FACTORY)
    return default["name"] if isinstance(default, dict) else shown(default)


def metric_keys(method: Method) -> tuple[list[str], list[str]]:
    """The metrics of a credit and of a loss, from a small batch with every optional field."""
    correct = torch.tensor([True, False, False, False] * 2)
    ones = torch.ones(8, dtype=torch.float64)
    batch = ResponseBatch(
        rewards=correct.double(),
        correct=correct,
        group_ids=torch.arange(2).repeat_interleave(4),
        response_tokens=torch.ones(8, dtype=torch.int64),
        columns={
            **dict.fromkeys(method.reads, ones),
            "progress": torch.tensor(0.5),
            "visits": torch.zeros(8, dtype=torch.int64),
            "is_demonstration": ~correct,
        },
    )
    credit = method.credit(batch)
    tokens = TokenBatch(
        logprobs=-ones,
        old_logprobs=-ones,
        response_index=torch.arange(8),
        loss_mask=~torch.zeros(8, dtype=torch.bool),
        advantages=credit.advantages,
        kl_weights=credit.kl_weights,
        ref_logprobs=-ones,
        sampler_logprobs=-ones,
        correct=correct,
        group_ids=batch.group_ids,
        token_columns={
            "entropy": ones,
            "topk_logprobs": -ones[:, None],
            "likely_logprobs": -ones[:, None],
            "sampler_likely_logprobs": -ones[:, None],
            "teacher_likely_logprobs": -ones[:, None],
            "teacher_logprobs": -ones,
            "is_argmax": correct,
            "later_turns": torch.zeros(8, dtype=torch.int64),
            "turn_advantages": ones,
            "relative_place": ones,
            "nucleus_entropy": ones,
            "masked_logprobs": -2 * ones,
            "token_place": torch.arange(8),
        },
        columns={
            "group_accuracy": ones / 4,
            "log_ratio_sums": 0 * ones,
            "is_demonstration": ~correct,
            "end_logprobs": -ones,
            "peaks": torch.ones(4, dtype=torch.float64),
            "end_index": torch.arange(8),
            "end_start": -ones.sum(),
            "chosen_places": torch.tensor([-1]),
            "was_cut": ~correct,
        },
    )
    return sorted(credit.metrics), sorted(method.loss(tokens).metrics)


def sentence(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) + "."


def card(name: str, config: MethodConfig, common: frozenset[str]) -> str:
    fields = head(name)
    method = Method(config, response_limit=64)
    lines = [f"# {name}: {fields['title']}", ""]
    lines += [f'`method={name}`, or `load_method("{name}")` on its own.', ""]
    lines += [f"**{key.capitalize()}.** {fields[key]}\n" for key in ORDER]
    lines += [f"**Lines.** {', '.join(source_lines(config))}.\n"]
    lines += [f"**Claim.** {line}\n" for line in claims_of(name)]
    lines += [
        "## Choices",
        "",
        "Overrides: `method.<key>=<value>` for the trainer, `<key>=<value>`",
    ]
    lines[-1] += " for `load_method`. All other knobs are at their [defaults](README.md#defaults)."
    lines += ["", "| key | value |", "|---|---|"]
    lines += [f"| `{key}` | {value} |" for key, value in differing(config)]
    lines += ["", "## Needs", "", f"{needs_text(method)}.", ""]
    own = [key for keys in metric_keys(method) for key in keys if key not in common]
    if own:
        lines += ["## Metrics", "", f"Beside the [common ones](README.md#metrics): {sentence(own)}"]
        lines += [""]
    return "\n".join(lines)


def source_lines(config: MethodConfig) -> Iterator[str]:
    """Links to the functions that a method chooses, in the order in which they run."""
    for key, table in CHOICES:
        chosen = operator.attrgetter(key)(config)
        for choice in chosen.values() if isinstance(chosen, dict) else [chosen]:
            if choice.name == "constant":
                continue  # the weight of the KL penalty, where there is none of its own
            function = inspect.unwrap(table[choice.name].function)
            lines, first = inspect.getsourcelines(function)
            file = Path(inspect.getfile(function)).relative_to(ROOT)
            yield f"[{choice.name}](../../{file}#L{first}-L{first + len(lines) - 1})"


@functools.cache
def _tried() -> dict[str, tuple[Claim, list[Outcome]]]:
    return tried()


def claims_of(name: str) -> Iterator[str]:
    """The claims of papers that were tried with this method, and what came out."""
    for folder, (claim, outcomes) in _tried().items():
        is_cell = any(f"method={name}" in overrides for overrides in claim.cells.values())
        if is_cell or name in claim.about:
            yield f"[{claim.title}](../claims/{folder}/README.md): {overall(outcomes)}."


def needs_text(method: Method) -> str:
    signals = signals_of(method)
    wanted = ["the reference's logprobs"] if signals.needs("ref") else []
    wanted += [signal.about for signal in signals.members]
    wanted += ["dynamic sampling"] if method.config.filters.dynamic_sampling else []
    least = f"At least {method.config.min_group} responses per prompt"
    return "; ".join([least, *dict.fromkeys(wanted)])


INTRODUCTION = """\
# Methods

One yaml each in `conf/method`; the cards say equation, the lines that
compute it, choices, limits and deviations. Every method
is compared with a plain implementation (`tests/unit/loss/reference.py`) by
`test_credit_and_loss_equal_the_plain_reference` in `tests/unit/loss/test_methods.py`; the last
column names the tests by hand of its estimator (`tests/unit/loss/test_advantages.py`), of its
shapers (`tests/unit/loss/test_shaping.py`) and of those of tokens
(`tests/unit/loss/test_token_advantages.py`). What a card says of released code is tested, where an
option gives it, by `tests/unit/loss/test_released.py`.

The rule of the defaults: the paper; what it leaves open, the released run; what neither says, our
choice, marked so on the card. Where the released run differs from the paper, the card prints the
overrides that give it.

| method | paper | yaml | tests by hand |
|---|---|---|---|"""

DEFAULTS = """
## Defaults

Knobs stand in the signature of their function in
[megatron_rl/loss](../../megatron_rl/loss/README.md), with type, range and default; a yaml names
what it chooses and where it differs.

| key | choice | knobs and defaults |
|---|---|---|"""


def front_page(configs: dict[str, MethodConfig], methods: dict[str, Method]) -> str:
    lines = [INTRODUCTION]
    for name, config in configs.items():
        fields = head(name)
        link = r"[arXiv \1](https://arxiv.org/abs/\1)"
        paper = re.sub(r"arXiv (\d{4}\.\d{5})", link, fields["paper"].rstrip("."))
        functions = (config.estimator.name, *map(shaper_test, config.shaping))
        functions += tuple(config.token_shaping)
        tests = ", ".join(f"`test_{function}_by_hand`" for function in functions)
        yaml = f"[{name}.yaml](../../conf/method/{name}.yaml)"
        lines.append(f"| [{name}]({name}.md) | {fields['title']}: {paper} | {yaml} | {tests} |")
    lines += ["", f"{len(configs)} methods from {len(ESTIMATORS)} estimators. Written by"]
    lines[-1] += " `python tools/method_cards.py`."
    lines += [DEFAULTS]
    for key, table in CHOICES:
        rows = defaults_of(table)
        lines += [f"| `{key}` | {name} | {texts} |" for name, texts in rows]
    lines += ["", "| key | default |", "|---|---|"]
    lines += [f"| `{key}` | {default} |" for key, default in section_defaults()]
    of_step, of_update = common_metrics(methods)
    lines += ["", "## Metrics", "", f"Of every rollout step: {sentence(of_step)}", ""]
    lines += [f"Of every optimizer step: {sentence(of_update)}", ""]
    return "\n".join(lines)


def common_metrics(methods: dict[str, Method]) -> tuple[list[str], list[str]]:
    """The metrics that every method has, of a rollout step and of an optimizer step."""
    of_step, of_update = zip(*[metric_keys(method) for method in methods.values()], strict=True)
    shared = [set.intersection(*map(set, keys)) for keys in (of_step, of_update)]
    return sorted(shared[0]), sorted(shared[1])


def shaper_test(name: str) -> str:
    return "hard_and_easy_focused" if name in ("hard_focused", "easy_focused") else name


def pages() -> dict[Path, str]:
    names = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
    configs = {name: load_method(name).config for name in names}
    methods = {name: Method(config, response_limit=64) for name, config in configs.items()}
    common = frozenset(key for keys in common_metrics(methods) for key in keys)
    cards = {PAGES / f"{name}.md": card(name, config, common) for name, config in configs.items()}
    return {PAGES / "README.md": front_page(configs, methods), **cards}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in PAGES.glob("*.md") if path not in wanted]
    if check and stale:
        print(f"{len(stale)} pages differ from conf/method; run python tools/method_cards.py")
        return 1
    if check:
        print("cards are up to date")
        return 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in stale:
        if path in wanted:
            path.write_text(wanted[path])
        else:
            path.unlink()
    print(f"{len(stale)} of {len(wanted)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
