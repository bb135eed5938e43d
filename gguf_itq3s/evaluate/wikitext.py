"""The evaluation text, WikiText-2 raw test (Merity et al. 2016), and a training split of it for importance matrices.

Looked for in this order: the path in ``WIKITEXT2``; the cache, into which the archive that llama.cpp's own scripts use
is downloaded through huggingface_hub and checked against its hash.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from pathlib import Path
from typing import Final

from ..base.errors import UserError
from ..upstream import cache_dir

VARIABLE: Final = "WIKITEXT2"
TEST_NAME: Final = "wiki.test.raw"
REPOSITORY: Final = "ggml-org/ci"
REVISION: Final = "927b3642933080f1b0e811e2f916e14c292992f9"
ARCHIVE: Final = "wikitext-2-raw-v1.zip"
ARCHIVE_SHA256: Final = "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"

# Splits that importance matrices may be computed on, in order of preference; never the test split.
_TRAINING_NAMES = ("wiki.train.raw", "wiki.valid.raw", "wiki.valid.tokens.txt")


def _folder() -> Path:
    """The folder in the cache that holds the splits, filled by a download if they are not there."""
    cached = cache_dir() / "wikitext-2-raw"
    if not (cached / TEST_NAME).is_file():
        _download(cached)
    return cached


def _download(folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    ways = (
        f"set {VARIABLE} to the path of {TEST_NAME}, give another text (--text), or connect to the network so that "
        f"{REPOSITORY} can be downloaded from the Hugging Face Hub"
    )
    try:
        archive = Path(hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset", revision=REVISION))
    except Exception as error:  # huggingface_hub raises errors of several libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(folder / TEST_NAME, f"is not there, and the download failed ({reason})", ways) from error
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise UserError(archive, f"sha256 is {digest}, expected {ARCHIVE_SHA256}", "delete it and try again")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as archived:
        # The test split last: it marks a complete folder.
        for name in ("wiki.valid.raw", "wiki.train.raw", TEST_NAME):
            partial = folder / f"{name}.partial"
            partial.write_bytes(archived.read(f"wikitext-2-raw/{name}"))
            partial.replace(folder / name)


def test_path() -> Path:
    """Where the test split is.

    Raises:
        UserError: ``WIKITEXT2`` names nothing, or the text is nowhere and cannot be downloaded.
    """
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser()
        path = path / TEST_NAME if path.is_dir() else path
        if not path.is_file():
            raise UserError(path, f"no such file ({VARIABLE}={given})", f"give {VARIABLE} the path of {TEST_NAME}")
        return path
    return _folder() / TEST_NAME


def training_path() -> Path:
    """A split that is not the test split, for importance matrices and calibration: beside the test split, or as it.

    Raises:
        UserError: as :func:`test_path`.
    """
    folder = test_path().parent
    for name in _TRAINING_NAMES:
        if (folder / name).is_file():
            return folder / name
    # The variable named the test split alone, or what is in the cache has lost the others.
    folder = cache_dir() / "wikitext-2-raw"
    if not (folder / _TRAINING_NAMES[0]).is_file():
        _download(folder)
    return folder / _TRAINING_NAMES[0]


def read(path: Path) -> str:
    """The text of a file with line ends as ``\\n`` (copies with ``\\r\\n`` go around).

    ``<unk>`` marks are taken out of WikiText's own files (``wiki.*``); any other file is read as it is.

    Raises:
        UserError: no such file, or no text in UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        what = f"is no text in UTF-8 (byte {error.start})"
        raise UserError(path, what, "save it in UTF-8, or give another text") from error
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror}", "give a text file in UTF-8") from error
    if not text.strip():
        raise UserError(path, "is empty", "give a text file of some pages")
    return re.sub(r" ?<unk>", "", text) if path.name.startswith("wiki.") else text
