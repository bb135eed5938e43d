"""Files that a checkpoint's or a calibration's own lists name."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError


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
    return folder / name
