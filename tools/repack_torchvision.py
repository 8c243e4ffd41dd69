"""Make a wheel of torchvision without its compiled parts, for a CPU build of torch.

vLLM and transformers use the transforms of torchvision, which are Python on torch. The package
index has builds for CUDA alone, whose compiled parts cannot be loaded beside a CPU build of torch;
without them torchvision notices and continues, but for one file that registers shapes of operators
that are then not there. The version gets a label of its own: no other wheel has it, and pip prefers
it to the same version of the index.

Usage: python repack_torchvision.py WHEEL FOLDER
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

LABEL = "+python"
REGISTERS_SHAPES = "torchvision/_meta_registrations.py"
TAG = (
    b"Wheel-Version: 1.0\nGenerator: repack_torchvision\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)


def repack(wheel: Path, folder: Path) -> Path:
    """Writes the wheel into ``folder`` and returns its path."""
    source = zipfile.ZipFile(wheel)
    old_info = next(
        name.split("/")[0] for name in source.namelist() if name.endswith(".dist-info/METADATA")
    )
    released = old_info.removeprefix("torchvision-").removesuffix(".dist-info").split("+")[0]
    version = released + LABEL
    new_info = f"torchvision-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"torchvision-{version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            if _is_left_out(name):
                continue
            content = _content(name, source.read(name), version)
            name = name.replace(old_info, new_info, 1)
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{name},sha256={digest.decode()},{len(content)}")
        record.append(f"{new_info}/RECORD,,")
        archive.writestr(f"{new_info}/RECORD", "\n".join(record) + "\n")
    return target


def _is_left_out(name: str) -> bool:
    return name.endswith((".so", "/", ".dist-info/RECORD")) or name.startswith("torchvision.libs/")


def _content(name: str, content: bytes, version: str) -> bytes:
    if name == REGISTERS_SHAPES:
        return b""
    if name.endswith(".dist-info/WHEEL"):
        return TAG
    if name.endswith(".dist-info/METADATA"):
        return re.sub(rb"(?m)^Version: .*$", f"Version: {version}".encode(), content, count=1)
    return content


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(repack(Path(sys.argv[1]), Path(sys.argv[2])))
