"""Which files of a folder hold the model's weights, and that they are there and whole.

The choice is that of Transformers, so that every command reads the weights that ``from_pretrained`` loads.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from .files import listed_file
from .validation import ADAPTER, UNREADABLE, check_counts_by_shapes, check_no_adapter, read_json

#: Transformers' order (``modeling_utils._get_resolved_checkpoint_files``).
_ORDER: Final = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_WEIGHTS: Final = re.compile(r"(model.*\.safetensors|pytorch_model.*\.bin)")
_NUMBERED: Final = re.compile(r"-(\d+)-of-(\d+)\.")
_INDEX: Final = ".index.json"


@dataclass(frozen=True)
class Shards:
    """The weight files of a folder.

    Attributes:
        folder: where they are.
        files: those that are read; not each need be there.
        index: the list that names them, None without one.
        weight_map: tensor -> name of its file, as that says.
        unread: further weight files.
    """

    folder: Path
    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict, repr=False)
    unread: tuple[Path, ...] = ()

    def note(self) -> str:
        """What is to be said of further weight files, nothing where there are none: a tensor that is there twice."""
        if (self.folder / ADAPTER).is_file():
            return "the adapter in it, which Transformers would load, is left out; convert-lora makes a file of it"
        if not self.unread:
            return ""
        places = {name: path for path in self.files for name in _shapes(path)}
        for path in self.unread:
            try:
                names = _shapes(path).keys()
            except UserError:  # it is not read
                continue
            if twice := sorted(names & places.keys()):
                here = places[twice[0]].name
                return f"{twice[0]} is in {here}, which is read, and in {path.name}, which is not"
        return f"{self.unread[0].name} is not read, {(self.index or self.files[0]).name} is"


def find(folder: Path, config: Mapping[str, Any]) -> Shards:
    """The weight files as Transformers chooses them: one file before an index, safetensors before pickles.

    Where there is none of its names, the files of any other (those of a variant, shards whose index is lost) are taken
    for one model, as llama.cpp's converter does.

    Raises:
        UserError: the index is damaged, or a list names a file outside the folder.
    """
    present = sorted(path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name) and not path.is_dir())
    own = config.get("transformers_weights")
    order = [folder / name for name in _ORDER] if own is None else [listed_file(folder, own, folder / "config.json")]
    first = next((path for path in order if path.is_file()), None)
    if first is None and own is not None:
        raise UserError(order[0], "is named in config.json but not there", "download it")
    if first is None:
        safe = [path for path in present if path.suffix == ".safetensors"]
        return Shards(folder, tuple(safe or present))
    index = first if first.name.endswith(_INDEX) else None
    weight_map = {} if index is None else read_weight_map(index)
    files = [first] if index is None else sorted(folder / name for name in set(weight_map.values()))
    return Shards(folder, tuple(files), index, weight_map, tuple(path for path in present if path not in files))


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of an index, names of files in its folder.

    Raises:
        UserError: it is damaged, or names anything else.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(index, "has no weight_map", UNREADABLE)
    for name in weight_map.values():
        listed_file(index.parent, name, index)
    return weight_map


def stored_tensors(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name of every tensor in safetensors files -> its file and shape; no weights are read.

    Raises:
        UserError: a file is truncated or corrupt.
    """
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as shard:
                stored |= {name: (path, tuple(shard.get_slice(name).get_shape())) for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:  # noqa: PERF203 - the error names the shard
            raise UserError(path, f"is truncated or corrupt ({error})", "download it again") from error
    return stored


def check(folder: Path, config: Mapping[str, Any]) -> Shards:
    """The weight files; all that the index and the numbering promise are there, and readable as far as headers tell.

    The headers are compared with config.json as well; pickles have none.

    Raises:
        UserError: a file is missing, damaged, not named by the index, or holds other tensors than that says; without
            an index, two files hold the same tensor.
    """
    found = find(folder, config)
    if not found.files:
        check_no_adapter(folder)
        raise UserError(folder, "holds no model*.safetensors or pytorch_model*.bin", "download the weights")
    _check_there(found)
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in found.files:
        here = _shapes(path)
        if found.index is not None:
            expected = {name for name, file in found.weight_map.items() if file == path.name}
            if lost := sorted(expected - here.keys()):
                what = "is listed in the index but not in this shard"
                raise UserError(path, what, "download the shard again", lost[0])
            if extra := sorted(here.keys() - expected):
                what = "is in this shard but not in the index"
                raise UserError(path, what, "take the index of these shards", extra[0])
        elif twice := sorted(here.keys() & shapes.keys()):
            what = f"is in {places[twice[0]].name} too, and nothing says which is the model's"
            raise UserError(path, what, "keep the files of one model, or its index", twice[0])
        places |= dict.fromkeys(here, path)
        shapes |= here
    check_counts_by_shapes(folder / "config.json", config, shapes)
    return found


def tensors(files: Iterable[Path], conversion: Any, *, lazy: bool) -> Iterator[tuple[str, Any]]:
    """Names of all tensors, and functions that give them as upstream's ``conversion`` package has them.

    Args:
        files: safetensors files and pickles.
        conversion: the package.
        lazy: whether they are read when they are wanted.
    """
    kind = conversion.base.LazyTorchTensor

    def given(make: Any, tensor: Any) -> Any:
        return make(tensor) if lazy else kind.to_eager(make(tensor))

    for path in files:
        if path.suffix == ".safetensors":
            part, make = gguf.utility.SafetensorsLocal(path).tensors, kind.from_local_tensor
        else:
            part, make = _unpickled(path), kind.from_eager
        yield from ((name, partial(given, make, tensor)) for name, tensor in part.items())


def _check_there(found: Shards) -> None:
    """Every file that a list names is there, and so are those that the numbering tells of, no more and no less."""
    listed = found.index and found.index.name
    if missing := [path for path in found.files if not path.is_file()]:
        count = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
        what = f"is named in {listed} but not there{count}" if listed else "is a link to a file that is not there"
        raise UserError(missing[0], what, "download it")
    for path in found.files:
        match = _NUMBERED.search(path.name)
        for number in range(1, int(match[2]) + 1 if match else 0):
            assert match is not None
            wanted = path.with_name(path.name.replace(match[0], f"-{number:0{len(match[1])}d}-of-{match[2]}."))
            if wanted in found.unread:
                raise UserError(wanted, f"is not listed in {listed}", "take the index that belongs to the shards")
            if found.index is None and wanted not in found.files:
                raise UserError(wanted, "this shard is not there", "download it")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a file.

    Raises:
        UserError: it is damaged, or a pickle of other things.
    """
    if path.suffix == ".safetensors":
        return {name: shape for name, (_, shape) in stored_tensors([path]).items()}
    try:
        return {name: tuple(tensor.shape) for name, tensor in _unpickled(path).items()}
    except (pickle.UnpicklingError, AttributeError) as error:
        what = "holds other things than weights, which are not loaded, or is corrupt"
        raise UserError(path, what, "convert it to safetensors where it may run its code") from error
    except Exception as error:  # pickles fail in many ways
        raise UserError(path, f"is truncated or corrupt ({type(error).__name__})", "download it again") from error


def _unpickled(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
