"""Kills at random points: what is there afterwards is never half a result, and the same call ends in the same bytes."""

from __future__ import annotations

import io
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calibrating import options
from gguf_itq3s import upstream
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from killing import Outcome, Record, content, kill_often


@pytest.mark.parametrize("kind", ["plain", "calibrated"])
def test_conversion(
    kind: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, rounds: int, record: Record
) -> None:
    model, statistics = calibrated("llama")
    out = tmp_path / "out" / "x.gguf"
    given = statistics if kind == "calibrated" else None
    asked = ConvertOptions.of(model, out, effort="fast", pure=True, calibration=given)

    def fresh() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()

    fresh()
    convert(asked)
    whole = content(out.parent)
    assert len(whole) == 1
    found = {"resumed": 0}

    def check(outcome: Outcome) -> None:
        found["resumed"] += "continuing after" in outcome.said
        here = content(out.parent)
        if min(whole) in here:
            assert {name: here.get(name) for name in whole} == whole
        if outcome.code == 0:
            assert here == whole
        assert "Traceback" not in outcome.said

    hits = kill_often(lambda: convert(asked) and 0, rounds, tmp_path, check=check, fresh=fresh)
    record(f"kills of a conversion, {kind}", kills=hits, resumed=found["resumed"], other_bytes=0)
    assert found["resumed"] or rounds < 20, "no kill hit the writing"


def test_calibration(uneven: Callable[[str], Path], tmp_path: Path, rounds: int, record: Record) -> None:
    out = tmp_path / "out"
    asked = options(uneven("llama"))
    calibrate(asked, out)
    whole = content(out)

    def check(outcome: Outcome) -> None:
        if outcome.code == 0:
            assert content(out) == whole
        assert "Traceback" not in outcome.said

    def fresh() -> None:
        shutil.rmtree(out, ignore_errors=True)

    hits = kill_often(lambda: calibrate(asked, out) and 0, rounds, tmp_path, check=check, fresh=fresh)
    record("kills of a calibration", kills=hits, other_bytes=0)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A source distribution of 400 files, fetched from a folder into an empty cache; name -> hash of its files."""
    made = tmp_path / f"{upstream.SOURCE}.tar.gz"
    chance = random.Random(1)
    with tarfile.open(made, "w:gz", compresslevel=1) as tar:
        for number in range(400):
            data = chance.randbytes(20_000)
            info = tarfile.TarInfo(f"{upstream.SOURCE}/vendor/llama.cpp/conversion/{number}.py")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    upstream._unpack(made, tmp_path / "plain")
    tree = tmp_path / "plain" / upstream.SOURCE / "vendor" / "llama.cpp"
    monkeypatch.setattr(upstream, "TREE_SHA256", upstream.tree_hash(tree))
    monkeypatch.setattr(upstream, "PYTHON_SHA256", upstream.tree_hash(tree, upstream._PYTHON))
    monkeypatch.setattr(upstream, "_checked", set())
    monkeypatch.setattr(upstream, "_download", lambda folder, release: Path(shutil.copy(made, folder)))
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    yield content(tree)


def test_unpacking(archive: dict[str, str], tmp_path: Path, rounds: int, record: Record) -> None:
    cache = tmp_path / "cache"

    def check(outcome: Outcome) -> None:
        upstream._checked.clear()
        source = upstream.find_source()
        assert source is None or content(source) == archive
        if outcome.code == 0:
            assert source is not None
            # A kill between the renaming and the end leaves a folder, with no more in it than what was asked of pip.
            others = [p for p in cache.iterdir() if p.name not in (upstream.SOURCE, f"{upstream.SOURCE}.lock")]
            assert not [p for folder in others for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1000]

    def fresh() -> None:
        upstream._checked.clear()
        shutil.rmtree(cache, ignore_errors=True)

    hits = kill_often(lambda: upstream.fetch_source() and 0, rounds, tmp_path, check=check, fresh=fresh)
    record("kills of the unpacking", kills=hits, other_bytes=0)
