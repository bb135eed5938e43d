"""The pinned llama.cpp source: fetched once, checked, unpacked into the cache, and put on ``sys.path``.

The source distribution of ``llama-cpp-python`` carries llama.cpp in ``vendor/llama.cpp``. Its ``conversion`` package
reads Hugging Face models and needs the gguf-py beside it, which is ahead of the released ``gguf``. The build in
``ggml-patch/`` uses the same folder.

Only the standard library is imported here, because ``scripts/fetch_llama_cpp.py`` runs this file before anything is
installed.

Environment:
    LLAMA_CPP_DIR: a llama.cpp checkout to use instead of the pinned source.
    GGUF_ITQ3S_CACHE: the cache folder (default ``$XDG_CACHE_HOME/gguf-itq3s`` or ``~/.cache/gguf-itq3s``).
    GGUF_ITQ3S_OUT: where the patched llama.cpp is built (default ``build`` of the checkout; for an installed package a
        folder in the cache).
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

PACKAGE: Final = "llama-cpp-python"
VERSION: Final = "0.3.36"
SHA256: Final = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
#: :func:`tree_hash` of the unpacked source, and of what Python runs of it: a cached source counts only with them.
TREE_SHA256: Final = "879e9e709094441b8666dc6bf29fae4ce087e3a25215f297759a8f6bf1082100"
PYTHON_SHA256: Final = "cb67140cba78cd087f2ece06fdc3465cbe501c287f4cd08e1c83ba7a2d700750"
_PYTHON: Final = ("gguf-py/gguf", "conversion", "convert_lora_to_gguf.py")
#: Set in the environment of a command that was started again with the gguf of a source just fetched.
RESTARTED: Final = "GGUF_ITQ3S_RESTARTED"
SOURCE: Final = f"llama_cpp_python-{VERSION}"


class Release(NamedTuple):
    """A source distribution of ``llama-cpp-python``: the archive's hash, and :func:`tree_hash` of its llama.cpp."""

    version: str
    sha256: str
    tree_sha256: str

    @property
    def name(self) -> str:
        """Of the archive and of the folder in it."""
        return f"llama_cpp_python-{self.version}"


class FetchError(RuntimeError):
    """The pinned source could not be had; the message says what to do."""


class StaleGgufError(FetchError):
    """The source was fetched only now, after another gguf was imported; the program has to start again."""


def cache_dir() -> Path:
    """The folder that keeps what is fetched and built once per machine."""
    if chosen := os.environ.get("GGUF_ITQ3S_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gguf-itq3s"


def checkout() -> Path | None:
    """The repository that this package is a part of; None where the package is installed without it."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "ggml-patch" / "CMakeLists.txt").is_file() else None


def patch_folder() -> Path:
    """The folder with our patches and files for llama.cpp and their build: ``ggml-patch/``, or its copy in the wheel.

    Raises:
        FetchError: the package was installed without it.
    """
    root = checkout()
    folder = root / "ggml-patch" if root else Path(__file__).resolve().parents[1] / "ggml_patch"
    if not (folder / "CMakeLists.txt").is_file():
        raise FetchError(f"{folder}: not there; install gguf-itq3s anew")
    return folder


def build_folder() -> Path:
    """Where the patched llama.cpp is built: its tools and libraries are in ``bin`` below it.

    An installed package has a folder for each content of :func:`patch_folder`, so that a new version does not take the
    tools of an old one.

    Raises:
        FetchError: as :func:`patch_folder`.
    """
    root = checkout()
    if chosen := os.environ.get("GGUF_ITQ3S_OUT"):
        return (root or Path.cwd()) / Path(chosen).expanduser()
    return root / "build" if root else cache_dir() / "tools" / _patch_hash()[:12]


@functools.lru_cache(maxsize=1)
def _patch_hash() -> str:
    return tree_hash(patch_folder())


def library_name() -> str:
    """File name of the base library of ggml on this system."""
    return {"win32": "ggml-base.dll", "darwin": "libggml-base.dylib"}.get(sys.platform, "libggml-base.so")


def build_command() -> str:
    """What builds the patched llama.cpp here, for messages."""
    return "make build" if checkout() else "gguf-itq3s build"


def find_source() -> Path | None:
    """The llama.cpp source that is there already: ``LLAMA_CPP_DIR``, or the unpacked pinned one, or None.

    Of the pinned one, every file that Python runs is compared with its hash (10 ms, once in a process).

    Raises:
        FetchError: ``LLAMA_CPP_DIR`` names a folder that is not a llama.cpp checkout.
    """
    if own := os.environ.get("LLAMA_CPP_DIR"):
        path = Path(own).expanduser().resolve()
        if not (path / "gguf-py" / "gguf").is_dir() or not (path / "ggml").is_dir():
            raise FetchError(f"{path}: not a llama.cpp checkout; correct or unset LLAMA_CPP_DIR")
        return path
    source = cache_dir() / SOURCE / "vendor" / "llama.cpp"
    if source in _checked:
        return source
    if not source.is_dir() or tree_hash(source, _PYTHON) != PYTHON_SHA256:
        return None
    _checked.add(source)
    return source


# Sources whose Python files were compared in this process.
_checked: set[Path] = set()


def fetch_source(*, whole: bool = False) -> Path:
    """Like :func:`find_source`, and fetch the pinned source with pip when it is not there.

    Args:
        whole: compare every file of what is there, as a build from it should (half a second).

    Raises:
        FetchError: pip failed, the archive has another hash, or the cache cannot be written.
    """

    def usable() -> Path | None:
        path = find_source()
        if path is None or not whole or os.environ.get("LLAMA_CPP_DIR"):
            return path
        return path if tree_hash(path) == TREE_SHA256 else None

    if path := usable():
        return path
    _fetch(Release(VERSION, SHA256, TREE_SHA256), usable)
    path = find_source()
    assert path is not None
    return path


def fetch_release(release: Release) -> Path:
    """The llama.cpp of a release, fetched into the cache when it is not there; every file is compared (half a second).

    Raises:
        FetchError: pip failed, the archive has another hash, or the cache cannot be written.
    """
    source = cache_dir() / release.name / "vendor" / "llama.cpp"

    def usable() -> Path | None:
        return source if source.is_dir() and tree_hash(source) == release.tree_sha256 else None

    if not usable():
        _fetch(release, usable)
    return source


def _fetch(release: Release, usable: Callable[[], Path | None]) -> None:
    """Put a release into the cache, unless ``usable`` says that another process has just done so."""
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{release.name}.lock"):
            if usable():  # another process was first
                return
            if (cache / release.name).exists():
                print(f"{cache / release.name} is damaged or of another version and is replaced", file=sys.stderr)
            for left in cache.glob(f"{release.name}.*"):
                if left.is_dir():  # left by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{release.name}.", dir=cache) as scratch:
                unpacked = Path(scratch) / "unpacked"
                archive = _download(Path(scratch), release)
                _unpack(archive, unpacked, release.name)
                archive.unlink()  # a kill just after the renaming leaves the scratch folder, and this is 73 MiB of it
                if (found := tree_hash(unpacked / release.name / "vendor" / "llama.cpp")) != release.tree_sha256:
                    raise FetchError(
                        f"{release.name}: its files have the hash {found}, expected {release.tree_sha256}; "
                        "check the disk"
                    )
                if (cache / release.name).exists():
                    (cache / release.name).rename(Path(scratch) / "replaced")
                (unpacked / release.name).rename(cache / release.name)
    except OSError as error:
        raise FetchError(f"{error.filename or cache}: {error.strerror or error}; set GGUF_ITQ3S_CACHE") from error


def tree_hash(folder: Path, parts: Sequence[str] = (".",)) -> str:
    """SHA-256 over names and contents of these parts of a folder and all below, but for what Python compiled there.

    What is missing adds nothing.
    """
    digest = hashlib.sha256()
    for part in parts:
        files = [(folder, list[str](), [part])] if (folder / part).is_file() else os.walk(folder / part)
        for place, folders, names in files:
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                path = Path(place) / name
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{content} {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, so that two builds do not download at the same time."""
    with path.open("w") as handle:
        try:
            import fcntl
        except ImportError:  # not POSIX: the rename at the end is atomic anyway
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(folder: Path, release: Release) -> Path:
    """Fetch the source distribution into ``folder`` with pip, which compares the hash before it runs any of it.

    pip then runs the build backend for the metadata of a source distribution, even to download it alone; the backend
    comes from the same index. What runs there is the code of the archive with the right hash.
    """
    print(f"fetching {PACKAGE} {release.version} (73 MiB, once)", file=sys.stderr, flush=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={release.version} --hash=sha256:{release.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--requirement", str(requirements)]
    options = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    archive = folder / f"{release.name}.tar.gz"
    if found := re.search(r"^\s*Got\s+([0-9a-f]{64})\s*$", done.stdout, re.MULTILINE):
        raise FetchError(
            f"{archive.name}: sha256 is {found[1]}, expected {release.sha256}; check the package index in use"
        )
    if done.returncode or not archive.is_file():
        reason = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise FetchError(
            f"pip download {PACKAGE}=={release.version}: {reason}; check the network, or set LLAMA_CPP_DIR"
        )
    return archive


def _unpack(archive: Path, folder: Path, name: str = SOURCE) -> None:
    """Unpack the vendored llama.cpp from the archive, and the Python files around it, for who wants to run them."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extraction_filter = tarfile.data_filter
            parts = tuple(f"{name}/{part}/" for part in ("vendor/llama.cpp", "llama_cpp"))
            tar.extractall(folder, [m for m in tar if m.name.startswith(parts)])
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FetchError(f"{archive.name}: {error}; set LLAMA_CPP_DIR to a checkout of llama.cpp") from error


def prefer_vendored_gguf() -> None:
    """Let ``import gguf`` find the gguf-py of the llama.cpp source, if that is there and gguf is not imported yet."""
    try:
        source = find_source()
    except FetchError:  # reported by whoever needs the source
        return
    if source is not None and "gguf" not in sys.modules:
        path = str(source / "gguf-py")
        if path not in sys.path:
            sys.path.insert(0, path)


def gguf_is_vendored() -> bool:
    """Whether the gguf module in use is the one of the llama.cpp source."""
    import gguf

    source = find_source()
    return source is not None and Path(gguf.__file__ or "").resolve().is_relative_to((source / "gguf-py").resolve())


def load_conversion() -> ModuleType:
    """Import the ``conversion`` package of the llama.cpp source, fetching the source if need be.

    Raises:
        FetchError: the source cannot be had.
        StaleGgufError: another gguf is imported already, and the package needs its own.
    """
    source = fetch_source()
    prefer_vendored_gguf()
    if not gguf_is_vendored():
        raise StaleGgufError("gguf was imported before the llama.cpp source was there; start the program again")
    if str(source) not in sys.path:
        sys.path.append(str(source))
    import conversion

    return conversion
