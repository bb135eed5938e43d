"""The one door to transformers: nothing of a model folder, or of a hub, runs unless the user said so.

A model folder may name Python files in ``auto_map`` of ``config.json`` or ``tokenizer_config.json``. transformers runs
them where ``trust_remote_code`` is true, asks on the terminal where it is not given, and llama.cpp's ``conversion``
package gives it as true. So every call of transformers, and of what calls it, stands inside :func:`.patches.patched`.

Within, the decision of transformers is replaced by the user's, and, without trust, so is every function on the way from
a name to running code: the last of them, ``get_class_in_module``, is the only one that executes a file. A version of
transformers without one of these functions is refused, because nobody could say what it would run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from ..base.errors import UserError

_DECISION: Final = "resolve_trust_remote_code"
#: The way of code from a name to its execution, each imported by name by other modules of transformers.
_LOADERS: Final = ("get_class_from_dynamic_module", "get_cached_module_file", "get_class_in_module")
_TOKENIZERS: Final = "transformers.models.auto.tokenization_auto"
_REMEDY: Final = "read that code, and give --trust-remote-code if it may run on this machine"

Function = Callable[..., Any]


def add_argument(parser: argparse._ActionsContainer) -> None:
    """The option that every command with a checkpoint has."""
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run Python code that the model brings along (default: refuse a model that needs it)",
    )  # fmt: skip


def replacements(folder: Path, trusted: bool) -> dict[str, Function]:
    """What stands in for the functions of transformers, by their names.

    Raises:
        UserError: this version of transformers cannot be kept from running code.
    """
    try:
        module: Any = importlib.import_module("transformers.dynamic_module_utils")
        own = {name: getattr(module, name) for name in (_DECISION, *_LOADERS)}
    except (ImportError, AttributeError) as error:
        version = sys.modules["transformers"].__version__
        what = f"cannot be read safely: transformers {version} may run its code ({error})"
        raise UserError(folder, what, "install another version of transformers") from error
    if trusted:
        return {_DECISION: functools.partial(_decide_trusted, own[_DECISION])}
    replacements: dict[str, Function] = dict.fromkeys(_LOADERS, functools.partial(_refuse, folder))
    # Kernels are compiled code of a hub that config.json can name as "attn_implementation".
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.integrations.hub_kernels")
    return {**replacements, _DECISION: functools.partial(_decide, own[_DECISION], folder), "get_kernel": _no_kernel}


def _decide(own: Function, folder: Path, given: bool | None, name: Any, local: bool, remote: bool, *rest: Any,
            **options: Any) -> bool:  # fmt: skip
    """Without trust: a class of transformers instead of the model's, or none."""
    caller = sys._getframe(1).f_globals.get("__name__")
    if not remote:
        return False
    if given is False:
        # The caller is ready for a refusal in transformers' own form.
        return bool(own(False, name, local, remote, *rest, **options))
    # Another tokenizer than the model's would give other tokens, and nobody would notice.
    if local and caller != _TOKENIZERS:
        return False
    raise _refusal(folder / ("tokenizer_config.json" if caller == _TOKENIZERS else "config.json"))


def _decide_trusted(own: Function, given: bool | None, *rest: Any, **options: Any) -> bool:
    """With trust: no question on the terminal; a caller that declines keeps its way."""
    return bool(own(given is not False, *rest, **options))


def _refusal(file: Path) -> UserError:
    return UserError(file, f"needs Python code of the model to run{_code_named_in(file)}", _REMEDY)


def _refuse(folder: Path, *_: Any, **__: Any) -> NoReturn:
    raise _refusal(folder)


def _no_kernel(name: str, *_: Any, **__: Any) -> NoReturn:
    # transformers goes on without a kernel that it wanted itself and did not find.
    raise FileNotFoundError(f"the kernel {name} runs only with --trust-remote-code")


def _code_named_in(path: Path) -> str:
    """The classes that ``auto_map`` names, in brackets; empty where they cannot be read."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["auto_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    values = list(names.values()) if isinstance(names, Mapping) else [names]
    flat = [name for value in values for name in (value if isinstance(value, list) else [value])]
    found = sorted({name for name in flat if isinstance(name, str) and name.isprintable()})
    return f" ({', '.join(found)[:200]})" if found else ""


def load_weights(load: Function, *args: Any, **options: Any) -> Any:
    """``torch.load`` that never runs what a pickle asks for."""
    return load(*args[:3], **{**options, "weights_only": True})
