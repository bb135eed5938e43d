"""What each process of a run keeps for itself: folders in the folder of work, on its machine.

Whose share of the text a folder has follows from the number of processes, so its name has that; and the key of the run
stands beside what is kept. What is of another number or another run is taken away, for its owner begins anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..base.journal import write_text
from .ranks import Ranks

_OWN: Final = re.compile(r"rank-\d+-of-(\d+)")


def is_own(name: str) -> bool:
    """Whether a folder of that name is a rank's."""
    return _OWN.fullmatch(name) is not None


def own_folder(folder: Path, ranks: Ranks) -> Path:
    """Where a rank keeps what is its own: a folder of the folder of work, or that itself of a process alone."""
    return folder if ranks.alone else folder / f"rank-{ranks.rank:04d}-of-{ranks.size:04d}"


def keep_own(folder: Path, run: str, ranks: Ranks, kind: str, names: Sequence[str]) -> Path:
    """Have a folder for what is this rank's own: with what it has left of this run, or without.

    Args:
        folder: of work.
        run: key of the run.
        ranks: who takes part.
        kind: of what is kept, of which there may be several in one folder of work.
        names: of its folders.

    Returns:
        As :func:`own_folder`.

    Raises:
        OSError: it cannot be written.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and folder.is_dir():
        for path in folder.iterdir():
            found = _OWN.fullmatch(path.name)
            if found and (ranks.alone or int(found[1]) != ranks.size):
                shutil.rmtree(path, ignore_errors=True)
    own = own_folder(folder, ranks)
    if ranks.alone:
        return own
    note = own / f"{kind}.key"
    if not (note.is_file() and note.read_text(encoding="utf-8", errors="replace") == run):
        for name in names:
            shutil.rmtree(own / name, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        write_text(note, run)
    for name in names:
        (own / name).mkdir(exist_ok=True)
    return own


def leave_own(folder: Path, ranks: Ranks) -> None:
    """Take away what was this rank's own, once all are done."""
    ranks.meet()
    if not ranks.alone:
        shutil.rmtree(own_folder(folder, ranks), ignore_errors=True)
        if not ranks.first:  # on a machine without the first's files the folder is empty now
            with contextlib.suppress(OSError):
                folder.rmdir()
