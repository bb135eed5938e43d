"""The encoder that the options ask for: its search, and the library that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from ..base.errors import UserError
from ..codec import native
from ..rounding import ldlq
from ..rounding.encode import Encoder
from .options import ConvertOptions


def encoder_of(options: ConvertOptions, messages: TextIO) -> Encoder:
    """The encoder of a conversion.

    Args:
        options: of the conversion.
        messages: where warnings go.

    Raises:
        UserError: the search cannot be, or the library is asked for and cannot be used.
    """
    asked = options.encoder
    effort = "default" if asked.effort == "best" else asked.effort
    # With one start scale the widest search takes less time than the default's three with a narrow one, and loses less.
    quick = options.layerwise.calibrate and asked.effort == "default"
    changed = dict(ldlq.WIDEST) if asked.effort == "best" or quick else {}
    changed |= {key: getattr(asked, key) for key in ("segment", "lookahead") if getattr(asked, key) is not None}
    try:
        search = ldlq.Search(effort="fast" if quick else effort, **changed)
        if asked.damping is not None and not asked.damping > 0:
            raise ValueError(f"damping {asked.damping}: it must be more than 0")
    except ValueError as error:
        raise UserError(options.statistics.calibration or options.model, str(error), "change the option") from error
    remedy = f"run {native.build_command()}, or leave --native out"
    try:
        library = native.load()
    except OSError as error:
        if asked.native:
            path = native.library_path() or Path(native.library_name())
            raise UserError(path, f"cannot be loaded: {error}", remedy) from error
        print(f"warning: the C quantizer cannot be used: {error}", file=messages)
        library = None
    if asked.native and library is None:
        raise UserError(native.library_name(), "is not built", remedy)
    return Encoder(effort, asked.codec, max(1, asked.threads), search, library, native=asked.native is not False)
