"""Checkpoints whose file llama.cpp could not load are refused before any work, by llama.cpp's own loader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import ONE_OF_A_KIND
from damaged import KINDS, drop, dry_run, halve
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import loadable, loader
from gguf_itq3s.cli import main
from gguf_itq3s.codec.native import library_path, tools_folder
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert


@pytest.mark.parametrize("damage", [drop, halve], ids=["missing", "halved"])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_tensor_is_named(llama_copy: Path, name: str, damage: Callable[[Path, str], None]) -> None:
    damage(llama_copy, name)
    with pytest.raises(UserError) as caught:
        dry_run(llama_copy)
    assert KINDS[name] in str(caught.value) or name in str(caught.value)


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_good_models_pass(checkpoint: Callable[[str], Path], name: str) -> None:
    assert dry_run(checkpoint(name)) == loadable.BY_LOADER


def test_what_the_check_takes_llama_cpp_takes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """And the other way round: the check asks for no more than the tools do."""
    out = tmp_path / "out.gguf"
    assert convert(ConvertOptions.of(checkpoint("llama"), out)).check == loadable.BY_LOADER
    for name, good in (("blk.1.ffn_up.weight", True), ("blk.1.ffn_uq.weight", False)):
        out.write_bytes(out.read_bytes().replace(b"blk.1.ffn_up.weight", name.encode()))
        tool = [str(tools_folder() / "llama-bench"), "-m", str(out), "-p", "1", "-n", "0", "-r", "1"]
        assert (subprocess.run(tool, capture_output=True).returncode == 0) == good
        assert (main(["verify", str(out), "--against", str(out)]) == 0) == good


def test_a_library_that_is_no_llama_cpp_is_not_asked() -> None:
    base = library_path()
    assert base is not None
    done = subprocess.run([sys.executable, loader.__file__, str(base), "x.gguf"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, '{"ready": false}\n')


def test_nothing_is_written_where_there_is_no_room_for_the_hole(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a limit on the size of files the loader is not asked; the limit is found when the file is written."""
    out = tmp_path / "out.gguf"
    command = [sys.executable, "-m", "gguf_itq3s.cli", "convert", str(checkpoint("llama")), str(out)]
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(f"error: {out}: cannot be written")) == (1, True)
    assert not list(tmp_path.iterdir())
