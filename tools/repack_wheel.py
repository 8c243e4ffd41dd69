"""Make a wheel of what a package has in Python, which any Python and any build of torch can use.

torchvision: vLLM and transformers use its transforms, which are Python on torch. The package index
has builds for CUDA alone, whose compiled parts cannot be loaded beside a CPU build of torch;
without them torchvision notices and continues, but for one file that registers shapes of operators
that are then not there.

megatron-core: since 0.17 its wheels are for Python 3.12 and newer, and say that no other will do.
What a training run uses is Python that 3.11 runs as well; the compiled part reads corpora, which
this project does not have.

The version gets a label of its own: no other wheel has it, and pip prefers it to the same version
of the index.

Usage: python repack_wheel.py FOLDER WHEEL ...
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

LABEL = "+python"
REGISTERS_SHAPES = "torchvision/_meta_registrations.py"
TAG = b"Wheel-Version: 1.0\nGenerator: repack_wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def repack(wheel: Path, folder: Path) -> Path:
    """Writes the wheel into ``folder`` and returns its path."""
    source = zipfile.ZipFile(wheel)
    name, released = wheel.name.split("-")[:2]
    old_info = f"{name}-{released}.dist-info"
    version = released.split("+")[0] + LABEL
    new_info = f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in source.namelist():
            if _is_left_out(path):
                continue
            content = _content(path, source.read(path), version)
            path = path.replace(old_info, new_info, 1)
            archive.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{path},sha256={digest.decode()},{len(content)}")
        record.append(f"{new_info}/RECORD,,")
        archive.writestr(f"{new_info}/RECORD", "\n".join(record) + "\n")
    return target


def _is_left_out(path: str) -> bool:
    return path.endswith((".so", "/", ".dist-info/RECORD")) or path.startswith("torchvision.libs/")


def _content(path: str, content: bytes, version: str) -> bytes:
    if path == REGISTERS_SHAPES:
        return b""
    if path.endswith(".dist-info/WHEEL"):
        return TAG
    if path.endswith(".dist-info/METADATA"):
        content = re.sub(rb"(?m)^Requires-Python: .*\n", b"", content, count=1)
        return re.sub(rb"(?m)^Version: .*$", f"Version: {version}".encode(), content, count=1)
    return content


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    for source in sys.argv[2:]:
        print(repack(Path(source), Path(sys.argv[1])))
