"""``inspect`` and ``verify`` on split files: whole by any part, and one line where the parts do not belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_files import rewritten
from gguf_itq3s.cli import main
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.inspect import contents, verify

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole file and the same in four parts, the first without tensors."""
    folder = tmp_path_factory.mktemp("split")
    convert(ConvertOptions.of(checkpoint("llama"), folder / "whole.gguf", effort="fast"))
    rewritten(folder / "whole.gguf", folder / "x.gguf", lambda *_: None, split_max_tensors=7, small_first_shard=True)
    assert len(list(folder.iterdir())) == 5
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 5))
def test_any_part_stands_for_the_whole(number: int, made: Path, checkpoint: Make, capsys: Any) -> None:
    part, whole = made / f"x-{number:05d}-of-00004.gguf", made / "whole.gguf"
    facts, expected = contents.inspect_file(part), contents.inspect_file(whole)
    assert facts["tensors"] == expected["tensors"] and facts["metadata"] == expected["metadata"]
    assert facts["parts"] == sorted(path.name for path in made.glob("x-*"))
    assert facts["bytes"] == sum(path.stat().st_size for path in made.glob("x-*"))
    assert main(["inspect", str(part)]) == 0
    assert "in 4 files, x-00001-of-00004.gguf the first" in capsys.readouterr().out
    results = verify.compare(part, checkpoint("llama"))
    assert results == verify.compare(whole, checkpoint("llama")) and len(results) == 21
    assert main(["verify", str(part), "--against", str(whole)]) == 0
    assert main(["verify", str(whole), "--against", str(part)]) == 0


def edit(path: Path, **changes: int | None) -> None:
    """Write a part anew with other ``split.*`` numbers, ``_`` for a point; None leaves one out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(None, "llama")
    writer.kv_data = [{}]
    for name, field in reader.fields.items():
        if name.startswith("split."):
            value = changes.get(name.replace(".", "_"), field.contents())
            if value is not None:
                writer.add_int32(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lost(folder: Path) -> None:
    (folder / "x-00003-of-00004.gguf").unlink()


def two_lost(folder: Path) -> None:
    lost(folder)
    (folder / "x-00001-of-00004.gguf").unlink()


def renamed(folder: Path) -> None:
    (folder / "x-00002-of-00004.gguf").rename(folder / "y.gguf")


def swapped(folder: Path) -> None:
    for one, other in ((3, 9), (4, 3), (9, 4)):
        (folder / f"x-{one:05d}-of-00004.gguf").rename(folder / f"x-{other:05d}-of-00004.gguf")


def doubled(folder: Path) -> None:
    shutil.copy(folder / "x-00003-of-00004.gguf", folder / "x-00004-of-00004.gguf")
    edit(folder / "x-00004-of-00004.gguf", split_no=3)


def truncated(folder: Path) -> None:
    path = folder / "x-00004-of-00004.gguf"
    path.write_bytes(path.read_bytes()[:-20000])


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lost, "x-00002", "x-00003-of-00004.gguf: this part is not there; copy or download it beside"),
    "two missing": (two_lost, "x-00002", "x-00001-of-00004.gguf: this part is not there (2 of 4 parts are missing); "),
    "renamed": (renamed, "y", "y.gguf: is part 2 of 4, and its name does not say so; give it the name"),
    "swapped": (swapped, "x-00002", "x-00003-of-00004.gguf: is not part 3 of 4, as its name says; take the parts of"),
    "twice": (doubled, "x-00002", "x-00004-of-00004.gguf: blk."),
    "of another file": (
        lambda f: edit(f / "x-00002-of-00004.gguf", split_tensors_count=22), "x-00003",
        "x-00002-of-00004.gguf: is of a file with another number of tensors than the 21 in the 4 parts; ",
    ),
    "no number": (
        lambda f: edit(f / "x-00002-of-00004.gguf", split_no=None), "x-00002", "x-00002-of-00004.gguf: is part ? of 4",
    ),
    "negative": (
        lambda f: edit(f / "x-00002-of-00004.gguf", split_count=-4), "x-00002",
        "x-00002-of-00004.gguf: has split.count -4",
    ),
    "not split": (
        lambda f: edit(f / "x-00003-of-00004.gguf", split_count=None), "x-00002",
        "x-00003-of-00004.gguf: is not part 3 of 4, as its name says",
    ),
    "truncated": (truncated, "x-00002", "x-00004-of-00004.gguf: is not a complete GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_parts_that_do_not_belong_together(
    name: str, made: Path, checkpoint: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, given, expected = FAULTS[name]
    folder = Path(shutil.copytree(made, tmp_path / "parts"))
    damage(folder)
    (file,) = folder.glob(f"{given}*.gguf")
    for command in (["inspect"], ["verify", "--against", str(checkpoint("llama"))]):
        assert main([*command, str(file)]) == 1
        lines = capfd.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"error: {folder}/{expected}"), lines


def test_json_names_the_parts(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(made / "whole.gguf")]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == ["whole.gguf"]
