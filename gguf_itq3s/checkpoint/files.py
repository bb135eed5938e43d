"""Files that a checkpoint's or a calibration's own lists name, and outputs that must not be one of the inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..base.errors import UserError

#: Bytes of a file's name, on every file system in use.
_LONGEST = 255


def listed_file(folder: Path, name: object, place: Path) -> Path:
    """The file of a folder that a list in it (an index, a manifest) names.

    The name alone is judged: what it leads to may be a link to anywhere, because the hub's cache keeps each file as a
    link from its snapshot to a blob outside of it, and whoever makes links in a folder could as well have put the file
    there.

    Args:
        folder: the folder.
        name: what the list says.
        place: the list.

    Raises:
        UserError: it is not the name of a file in that very folder.
    """
    remedy = "take the list that belongs to the files"
    if not isinstance(name, str):
        raise UserError(place, f"names {name!r:.80} as a file", remedy)
    if name in ("", ".", "..") or any(mark in name for mark in ("/", "\\", "\0")) or Path(name).drive:
        raise UserError(place, f"names a file outside of its folder: {name!r:.80}", remedy)
    if len(name.encode(errors="replace")) > _LONGEST:  # the system would refuse to look
        raise UserError(place, f"names a file in {len(name)} characters: {name!r:.80}", remedy)
    return folder / name


def check_output(out: Path, inputs: Iterable[Path | None], *, folder: bool = False) -> None:
    """Refuse an output that would replace an input, before any work.

    A GGUF file in an input folder may be replaced: it is no input of a conversion but the output of an earlier one.

    Args:
        out: the file, or with ``folder`` the folder, to be written.
        inputs: folders and files that are read; None is left out.
        folder: whether ``out`` is a folder.

    Raises:
        UserError: it is an input, by whatever path or link, or a file's name is that of a folder.
    """
    if not out.exists():
        return
    if out.is_dir() and not folder:
        raise UserError(out, "cannot be written: it is a folder", "give the name of a file, or the folder to --outfile")
    remedy = "choose another place for the output"
    for path in inputs:
        if path is None or not path.exists():
            continue
        if out.samefile(path):
            raise UserError(out, "cannot be written: it is the input itself", remedy)
        if path.is_dir() and not out.is_dir() and not _is_gguf(out) and _holds(path, out):
            raise UserError(out, f"cannot be written: it is a file of the input {path}", remedy)


def _holds(folder: Path, file: Path) -> bool:
    """Whether a file is in a folder or below, itself or through a link at either end."""
    if file.resolve().is_relative_to(folder.resolve()) or Path(os.path.abspath(file)).is_relative_to(folder.absolute()):
        return True
    return any(entry.exists() and entry.samefile(file) for entry in folder.iterdir())


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
