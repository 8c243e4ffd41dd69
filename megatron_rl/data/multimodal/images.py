"""Images of a row: the files behind a column, and their places in the prompt."""

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image

from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.rows import Problems
from megatron_rl.errors import first_line
from megatron_rl.types import Image

PLACE = "<image>"
_DATA_URI = "data:"
_REMEDY = "correct the row, or drop it"
_FORMS = "give paths, {bytes, path} or data:image/...;base64,... URIs"


@dataclass(frozen=True)
class ImageColumn:
    """Reader of the images of a file's rows; every problem goes to ``problems`` with its row.

    Attributes:
        folder: where relative paths start.
        vision: of the model; None: it has no vision tower.
    """

    column: str
    folder: Path
    vision: VisionProcessor | None
    problems: Problems

    def read(self, row: int, value: Any) -> tuple[Image, ...]:
        """``value``: one image or a list of them, in a form of ``_FORMS``; null is none."""
        if value is None or value == []:
            return ()
        items = value if isinstance(value, list) else [value]
        if self.vision is None:
            remedy = "give a vision-language model (Qwen-VL), or set data.columns.images=null"
            what = f"{self.column}: the model of model.path reads no images"
            count = f"{len(items)} image{'s' * (len(items) > 1)}"
            self.problems.add(row, what, count, remedy)
            return ()
        images = [self._image(row, item) for item in items]
        return tuple(image for image in images if image is not None)

    def _image(self, row: int, item: Any) -> Image | None:
        try:
            source = self._source(item)
            content = source.read_bytes() if isinstance(source, Path) else source
            image = _with_header(source, content)
            assert self.vision is not None
            self.vision.grid(image)
        except ValueError as error:
            self.problems.add(row, f"{self.column}: {error}", _shown(item), _REMEDY)
            return None
        except OSError as error:
            what = f"{self.column}: the file cannot be read ({error.strerror})"
            remedy = f"{_REMEDY}; relative paths start at {self.folder}"
            self.problems.add(row, what, _shown(item), remedy)
            return None
        return image

    def _source(self, item: Any) -> Path | bytes:
        """The path or the bytes of an image. Raises ValueError for anything that is no image."""
        if isinstance(item, Mapping):
            # The library datasets writes both, and the path may then be a name alone.
            content = item.get("bytes")
            item = item.get("path") if content is None else content
        if isinstance(item, bytes):
            return item
        if not isinstance(item, str) or not item:
            raise ValueError(f"not an image; {_FORMS}")
        if not item.startswith(_DATA_URI):
            return self.folder / item.removeprefix("file://")
        head, _, body = item.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URI that is not base64")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise ValueError(f"a data URI that is not base64 ({error})") from error


def _with_header(source: Path | bytes, content: bytes) -> Image:
    """Raises ValueError where the bytes are no image that Pillow knows, or one that is cut off as
    far as that is seen without decoding (PNG)."""
    try:
        with PIL.Image.open(io.BytesIO(content)) as opened:
            width, height = opened.size
            opened.verify()
    except PIL.UnidentifiedImageError as error:
        raise ValueError("not an image that Pillow knows") from error
    except (PIL.Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"not a readable image ({first_line(error)})") from error
    return Image(hashlib.sha256(content).hexdigest(), width, height, source)


def _shown(item: Any) -> Any:
    """The item without the bytes of a whole file."""
    if isinstance(item, Mapping):
        return {key: _shown(value) for key, value in item.items()}
    if isinstance(item, bytes):
        return f"{len(item)} bytes"
    return item


def parts_of(content: Any) -> list[dict[str, str]] | None:
    """The content of a message as parts of a chat template: ``<image>`` in a text, and a part of
    type image, become ``{"type": "image"}``; None for content of another form.

    Example: ``"<image>What is it?"`` gives ``[{"type": "image"}, {"type": "text", "text": "What is
    it?"}]``.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return None
    parts: list[dict[str, str]] = []
    for part in content:
        if not isinstance(part, Mapping):
            return None
        # Parquet fills the fields of the other parts with null.
        given = {key for key, value in part.items() if value is not None}
        if part.get("type") == "image" and given == {"type"}:
            parts.append({"type": "image"})
        elif isinstance(part.get("text"), str) and given <= {"type", "text"}:
            parts += _split(part["text"])
        else:
            return None
    return parts


def _split(text: str) -> list[dict[str, str]]:
    # "a<image>b<image>" splits into a, b and an empty text: a place before each but the first.
    first, *others = text.split(PLACE)
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return [part for part in parts if part.get("text") != ""]


def num_places(parts: Sequence[Mapping[str, str]]) -> int:
    return sum(part["type"] == "image" for part in parts)
