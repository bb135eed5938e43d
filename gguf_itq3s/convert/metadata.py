"""The file of ``--metadata``: authorship that replaces the model card's, in upstream's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from gguf import Keys

from ..base.errors import UserError
from ..checkpoint.validation import read_json

_GENERAL: Final = {value for name, value in vars(Keys.General).items() if not name.startswith("_")}
_NUMBERS: Final = {key for key in _GENERAL if key.startswith("general.sampling.")} - {Keys.General.SAMPLING_SEQUENCE}
_LISTS: Final = (Keys.General.TAGS, Keys.General.LANGUAGES)
_OBJECTS: Final = ("general.base_models", "general.datasets")
_TEXTS: Final = frozenset(
    {
        Keys.General.NAME, Keys.General.AUTHOR, Keys.General.VERSION, Keys.General.ORGANIZATION,
        Keys.General.FINETUNE, Keys.General.BASENAME, Keys.General.DESCRIPTION, Keys.General.QUANTIZED_BY,
        Keys.General.SIZE_LABEL, Keys.General.LICENSE_NAME, Keys.General.LICENSE_LINK, Keys.General.URL,
        Keys.General.DOI, Keys.General.UUID, Keys.General.REPO_URL, Keys.General.SOURCE_URL, Keys.General.SOURCE_DOI,
        Keys.General.SOURCE_UUID, Keys.General.SOURCE_REPO_URL, Keys.General.SAMPLING_SEQUENCE,
    }
)  # fmt: skip


def check_metadata(path: Path) -> None:
    """Refuse a file that upstream would pass over, or stumble on after the work.

    Raises:
        UserError: it is not there, is no JSON object, or has a key that is not read or a value of another kind.
    """
    if not path.is_file():
        raise UserError(path, "no such file", "give a JSON file with keys such as general.author")
    for key, value in read_json(path).items():
        if not (known := _kind(key)):
            what, remedy = f"has the key {key!r:.80}, which is not read", "take it out, or correct it"
            raise UserError(path, what, remedy)
        kind, fits = known
        if not fits(value):
            raise UserError(path, f"has {key} {value!r:.80}, which is not {kind}", "correct it")


def _kind(key: str) -> tuple[str, Any] | None:
    """What a value has to be, in words and as a function."""
    if key in _TEXTS:
        return "a text", lambda value: isinstance(value, str)
    if key in _NUMBERS:
        return "a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if key in _LISTS:
        return "a list of texts", lambda value: _all(value, str)
    if key in _OBJECTS:
        return (
            "a list of objects with texts",
            lambda value: (
                _all(value, dict) and all(isinstance(text, str) for entry in value for text in entry.values())
            ),
        )
    return None


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
