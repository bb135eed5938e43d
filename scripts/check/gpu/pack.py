#!/usr/bin/env python3
"""Pack what scripts/check/gpu/gpu_check.sh needs on a machine without a network: the source, a model, a text.

Writes build/gpu-check/: ``llama.cpp.tar.xz`` (the patched source without the backends and tools that are not built),
``demo-itq3_s.gguf`` (models/demo-llama, converted) and ``text.txt`` (WikiText-2 where it is at hand, else the project's
prose). Copy the repository and this folder to the machine with the GPU and run scripts/check/gpu/gpu_check.sh there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.evaluate import wikitext

ROOT: Final = Path(__file__).resolve().parents[3]
LIMIT: Final = 60 * 2**20

#: Folders of the source that take part in the build with CUDA, and what of them does not.
PARTS: Final = ["CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "src", "tests", "tools", "vendor"]
LEFT_OUT: Final = (
    "tools/ui",
    "tools/mtmd/test-1.jpeg",
    "tools/server/bench",
    "tools/server/tests",
    "tools/server/themes",
)
BACKENDS: Final = ("blas", "cpu", "cuda", "vulkan")


class PackError(RuntimeError):
    """Something to pack is not there; the message is one line."""


def wanted(name: str) -> bool:
    """Whether a file of the source, by its path in it, goes into the archive."""
    if name.startswith(LEFT_OUT):
        return False
    if name.startswith("ggml/src/ggml-"):
        backend = name.removeprefix("ggml/src/ggml-").split("/")
        return len(backend) == 1 or backend[0] in BACKENDS
    return True


def patched_tree() -> Path:
    """The pinned source, fetched if it is not there, with our patches and files."""
    tree = ROOT / "build" / "gpu-source"
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    done = subprocess.run(["cmake", f"-DTREE={tree}", f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)])
    if done.returncode:
        raise PackError("the source of llama.cpp could not be patched; the reason stands above")
    return tree


def pack_source(source: Path, target: Path) -> None:
    """The wanted files of ``source`` as a tar.xz, without the owner and time of files, so that it is reproducible."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:xz") as archive:
        for part in PARTS:
            top = source / part
            if not top.exists():
                raise PackError(f"{top}: not in this source of llama.cpp")
            files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
            for path in files:
                name = path.relative_to(source).as_posix()
                if wanted(name):
                    archive.add(path, "llama.cpp/" + name, filter=plain)
    partial.rename(target)


def pack_model(target: Path) -> None:
    """The bundled model in ITQ3_S."""
    command = [sys.executable, str(ROOT / "scripts" / "convert_hf_to_itq3s.py"), str(ROOT / "models" / "demo-llama")]
    partial = target.with_name("partial-" + target.name)
    done = subprocess.run([*command, str(partial)])
    if done.returncode:
        raise PackError("models/demo-llama could not be converted; the reason stands above")
    partial.rename(target)


def pack_text(target: Path) -> None:
    try:
        target.write_bytes(wikitext.test_path().read_bytes())
    except UserError:
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        target.write_text("\n".join(p.read_text() for p in pages if p.exists()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder for the files")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, make in (
            ("llama.cpp.tar.xz", lambda target: pack_source(patched_tree(), target)),
            ("text.txt", pack_text),
            ("demo-itq3_s.gguf", pack_model),
        ):
            print(f"packing {name}", flush=True)
            make(args.out / name)
        tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
        repository = sum(os.path.getsize(ROOT / f) for f in tracked.decode().split("\0") if f and (ROOT / f).exists())
        packed = sum(p.stat().st_size for p in args.out.glob("*.*") if p.is_file())
        print(f"{packed / 2**20:.1f} MiB in {args.out}, {repository / 2**20:.1f} MiB in the repository")
        if packed + repository > LIMIT:
            raise PackError(f"together more than {LIMIT // 2**20} MiB; leave out more of the source")
    except (PackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
