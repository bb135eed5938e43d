"""The name of the output: given, from a template, or by the GGUF naming convention, as upstream makes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import gguf
from gguf import LlamaFileType

from ..base.errors import UserError
from ..checkpoint.request import Request
from .options import ConvertOptions

# Characters of a default name, so that the end of a partial file's name fits behind it.
_LONGEST: Final = 200


def output_path(options: ConvertOptions, described: gguf.Metadata, ftype: LlamaFileType) -> Path:
    """The file to write.

    Raises:
        UserError: the template has a field that is not known.
    """
    kind, path, repository = ftype.name.partition("_")[2], options.out, options.request.repository
    if path is None and options.folder is None and repository is not None:
        path = Path(_file_name(repository, "-{ftype}.gguf"))
    if path is None:
        return (options.folder or options.model) / _default_name(options.request, described, kind)
    try:
        return path.with_name(gguf.fill_templated_filename(path.name, kind))
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        remedy = "use {ftype}, {FTYPE}, {outtype} or {OUTTYPE} alone"
        raise UserError(path, f"has a field in its name that is not known ({error})", remedy) from error


def is_template(path: Path) -> bool:
    """Whether the name of a file depends on the type that it will have."""
    return "{" in path.name or "}" in path.name


def _default_name(request: Request, described: gguf.Metadata, kind: str) -> str:
    """The name of a file by the GGUF naming convention; a model card's words cannot lead out of the folder."""
    parts = (described.name, described.basename, described.finetune, described.version)
    words = [None if part is None else str(part) for part in parts]
    label = None if described.size_label is None else str(described.size_label)
    if request.vocab_only:
        return _file_name(gguf.naming_convention(*words, None, None, "vocab"))
    if request.mmproj or request.mtp:
        prefix = "mmproj-" if request.mmproj else "mtp-"
        return _file_name(prefix + gguf.naming_convention(*words, None, kind))
    return _file_name(gguf.naming_convention(*words, label, kind))


def _file_name(stem: str, end: str = ".gguf") -> str:
    # A slash is a separator here or elsewhere, a leading dot hides a file, and braces would be fields.
    return re.sub(r"[/\\{}\x00-\x1f\x7f:]", "-", stem).lstrip(".")[:_LONGEST] + end
