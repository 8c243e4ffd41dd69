"""A figure of matplotlib as SVG that stands inside a page of HTML."""

from __future__ import annotations

import io
import re
from html import escape

from matplotlib.figure import Figure

from megatron_rl.reporting.comparison.drawing import INK

_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_STYLE_SHEET = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(xlink:href="|url\()#')
_FONT_FAMILY = re.compile(r"font-family: [^;\"]+;?|font: (?P<size>[\d.]+px) [^;\"]+")
_OPENING = re.compile(r"<svg\b[^>]*?viewBox=\"(?P<box>[^\"]+)\"[^>]*>", re.DOTALL)
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as one ``<svg>`` element.

    It has no background and no font of its own, takes the color of the page's text for ``INK``, and
    scales with its box. The same figure gives the same text.

    Args:
        name: begins every id, since those of a page are unique.
        title: what a screen reader says; empty: the element is hidden from it.
    """
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # no XML declaration and DOCTYPE within HTML
    text = _METADATA.sub("", text)
    # A style sheet within a page would hold for all of it.
    text = _STYLE_SHEET.sub("", text)
    text = _ID.sub(rf'id="{name}-\1"', text)
    text = _REFERENCE.sub(rf"\1#{name}-", text)
    text = _FONT_FAMILY.sub(lambda match: _size(match["size"]), text)
    text = text.replace(INK, "currentColor")
    label = 'aria-hidden="true"'
    if title:
        label = f'role="img" aria-label="{escape(title)}"'
    # Without width and height, which matplotlib gives in points: the box of the page decides.
    text = _OPENING.sub(
        lambda match: f'<svg viewBox="{match["box"]}" {label}>',
        text,
        count=1,
    )
    return "\n".join(_plain_path(line) for line in text.splitlines() if line.strip())


def _size(size: str | None) -> str:
    """What stays of a font, of which matplotlib writes size and family: ``font: 9px 'DejaVu'``."""
    return f"font-size: {size}" if size else ""


def _plain_path(line: str) -> str:
    """Coordinates to a hundredth of a point, finer than any screen; text stays."""
    if "</text>" in line:
        return line
    return _LONG_NUMBER.sub(r"\1", line)
