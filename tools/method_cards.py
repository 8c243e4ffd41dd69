"""Writes examples/methods: one card for each method, and the table of papers, from the heads of conf/method/*.yaml.

    python tools/method_cards.py           writes the pages
    python tools/method_cards.py --check   exit status 1 when a page is not what would be written

The text of a card is the head of its yaml; knobs, defaults and needs come from the configuration itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.load import conf_dir
from megatron_rl.config.method import ESTIMATORS, MethodConfig
from megatron_rl.config.pieces import Piece
from megatron_rl.loss import Method, ResponseBatch, TokenBatch, load_method

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "examples" / "methods"
ORDER = ("formula", "paper", "depends on", "reduces to", "choices", "released code")


def head(name: str) -> dict[str, str]:
    """Title and fields of the comment at the top of a method's yaml."""
    lines = [line[1:] for line in (conf_dir() / "method" / f"{name}.yaml").read_text().splitlines() if line.startswith("#")]
    fields = {"title": lines[0].strip()}
    for line in lines[1:]:
        if line.startswith("   "):
            fields[key] += " " + line.strip()
        else:
            key, _, value = line.strip().partition(": ")
            fields[key] = value
    return fields


def leaves(piece: Piece, prefix: str) -> list[tuple[str, object]]:
    """Every knob with its value, by the key an override takes."""
    found: list[tuple[str, object]] = []
    for key in type(piece).model_fields:
        value = getattr(piece, key)
        if isinstance(value, Piece):
            found += leaves(value, f"{prefix}{key}.")
        elif isinstance(value, dict):
            for name, inner in value.items():
                knobs = [leaf for leaf in leaves(inner, f"{prefix}{key}.{name}.") if not leaf[0].endswith(".name")]
                found += knobs or [(f"{prefix}{key}.{name}", "{}")]
        elif prefix + key != "name":
            found.append((prefix + key, value if isinstance(value, str) else json.dumps(value)))
    return found


def metric_keys(method: Method) -> tuple[list[str], list[str]]:
    """The metrics of a credit and of a loss, from a small batch with every optional field."""
    correct, ids = torch.tensor([True, False, False, False] * 2), torch.arange(2).repeat_interleave(4)
    ones = torch.ones(8, dtype=torch.float64)
    batch = ResponseBatch(correct.double(), correct, ids, torch.ones(8, dtype=torch.int64), ~correct, -ones, -ones, ones, ones)
    credit = method.credit(batch)
    tokens = TokenBatch(
        logprobs=-ones, old_logprobs=-ones, response_ids=torch.arange(8), loss_mask=~torch.zeros(8, dtype=torch.bool),
        advantages=credit.advantages, kl_weights=credit.kl_weights, ref_logprobs=-ones, sampler_logprobs=-ones, entropy=ones,
    )  # fmt: skip
    return sorted(credit.metrics), sorted(method.loss(tokens).metrics)


def card(name: str, config: MethodConfig) -> str:
    fields, method = head(name), Method(config, response_limit=64)
    lines = [f"# {name}: {fields['title']}", "", f'`method={name}`, or `load_method("{name}")` on its own.', ""]
    lines += [f"**{key.capitalize()}.** {fields[key]}\n" for key in ORDER]
    lines += ["## Knobs", "", "Overrides are `method.<key>=<value>` for the trainer, `<key>=<value>` for `load_method`.", ""]
    lines += ["| key | value |", "|---|---|", *[f"| `{key}` | {value} |" for key, value in leaves(config, "")], ""]
    needs = method.needs
    asks = [
        ("the reference's logprobs", needs.ref_logprobs),
        ("`extra.visual_entropy` of every prompt (tools/visual_entropy.py)", needs.visual_entropy),
        ("the old policy's mean logprob of every response", needs.response_statistics),
        ("dynamic sampling", needs.dynamic_sampling),
    ]
    wanted = [what for what, asked in asks if asked]
    lines += ["## Needs", "", f"At least {needs.min_group} responses per prompt{''.join('; ' + what for what in wanted)}.", ""]
    for title, keys in zip(("of the rollout step", "of an optimizer step"), metric_keys(method), strict=True):
        lines += [f"## Metrics {title}", "", ", ".join(f"`{key}`" for key in keys) + ".", ""]
    return "\n".join(lines)


def table(configs: dict[str, MethodConfig]) -> str:
    lines = [
        "# Methods",
        "",
        "One yaml each in `conf/method`; the cards say equation, knobs, limits and deviations. Every method is compared with a plain",
        "implementation (`tests/unit/loss/reference.py`) by `test_credit_and_loss_equal_the_plain_reference` in",
        "`tests/unit/loss/test_methods.py`; the last column names the tests by hand of its estimator",
        "(`tests/unit/loss/test_advantages.py`) and of its shapers (`tests/unit/loss/test_shaping.py`).",
        "",
        "| method | paper | yaml | tests by hand |",
        "|---|---|---|---|",
    ]
    for name, config in configs.items():
        fields = head(name)
        paper = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", fields["paper"].rstrip("."))
        tests = ", ".join(f"`test_{piece}_by_hand`" for piece in (config.estimator.name, *map(shaper_test, config.shaping)))
        link = f"[{name}.yaml](../../conf/method/{name}.yaml)"
        lines.append(f"| [{name}]({name}.md) | {fields['title']}: {paper} | {link} | {tests} |")
    lines += ["", f"{len(configs)} methods from {len(ESTIMATORS)} estimators. Written by `python tools/method_cards.py`.", ""]
    return "\n".join(lines)


def shaper_test(name: str) -> str:
    return "hard_and_easy_focused" if name in ("hard_focused", "easy_focused") else name


def pages() -> dict[Path, str]:
    names = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
    configs = {name: load_method(name).config for name in names}
    return {PAGES / "README.md": table(configs), **{PAGES / f"{name}.md": card(name, config) for name, config in configs.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, wanted = parser.parse_args(arguments).check, pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in PAGES.glob("*.md") if path not in wanted]
    if check:
        print(f"{len(stale)} pages differ from conf/method; run python tools/method_cards.py" if stale else "cards are up to date")
        return 1 if stale else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(wanted[path]) if path in wanted else path.unlink()
    print(f"{len(stale)} of {len(wanted)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
