#!/usr/bin/env python3
"""The text that --calibrate takes without a file: a mix of prose, dialogue, code, mark-up, lists and languages.

    scripts/tables/calibration_text.py --novels novels.txt.xz --fortunes FOLDER gguf_itq3s/calibrate/text.txt.xz

Prose and dialogue come from English novels of 1850 to 1930, other languages from Debian's packages fortunes-de
(quotations of German authors who died before 1925), fortunes-es (proverbs), fortunes-eo (Zamenhof's Proverbaro) and
fortunes-zh (poems of the Tang and Song dynasties), all in the public domain; code, mark-up and lists are files of this
repository. FOLDER holds the packages, unpacked. What is where is drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: Characters of each kind, and of a piece.
SIZES: Final = {"prose": 380_000, "dialogue": 120_000, "code": 260_000, "mark-up": 150_000, "languages": 190_000}
PIECE: Final = 5_000
QUOTES: Final = "\"'\N{LEFT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}"
#: German authors whose sentences stand in fortunes-de, and who died before 1925.
AUTHORS: Final = (
    "Goethe", "Schiller", "Lichtenberg", "Heine", "Nietzsche", "Schopenhauer", "Lessing", "Kant", "Jean Paul",
    "Novalis", "Ebner-Eschenbach", "Wilhelm Busch", "Fontane", "Hebbel", "Feuerbach", "Hegel", "Herder", "Luther",
    "Bismarck", "Humboldt", "Moltke", "Nestroy",
)  # fmt: skip
CODE: Final = (".py", ".c", ".h", ".cu", ".cuh", ".cpp", ".cmake", ".sh")
MARKUP: Final = (".md", ".json", ".toml", ".svg", ".txt", ".yaml", ".patch")


def pieces(text: str, size: int, rng: random.Random) -> list[str]:
    """Excerpts of whole lines, spread over a text, ``size`` characters in all."""
    count = max(1, size // PIECE)
    stride = max(1, (len(text) - PIECE) // count)
    found = []
    for number in range(count):
        start = number * stride + rng.randrange(max(1, stride - PIECE))
        begin = text.find("\n", start) + 1
        piece = text[begin : begin + PIECE]
        found.append(piece[: piece.rfind("\n")] if piece.count("\n") > 3 else piece.rpartition(" ")[0] or piece)
    return found


def files(endings: Iterable[str], longest: int) -> str:
    """The files of the repository with these endings, one after the other, as far as ``longest`` characters of each."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    names = [
        name for name in listed.split("\0") if name.endswith(tuple(endings)) and not name.startswith("tests/data/")
    ]
    texts = [(ROOT / name).read_text(encoding="utf-8", errors="ignore") for name in sorted(names)]
    return "\n\n".join(text[:longest] for text in texts)


def languages(folder: Path, rng: random.Random) -> str:
    """Sayings and poems that are in the public domain."""

    def sayings(name: str) -> list[str]:
        (path,) = folder.rglob(name)
        return [saying.strip() for saying in re.split(r"\n%+\n", path.read_text(encoding="utf-8", errors="ignore"))]

    german = [saying for saying in sayings("zitate") if any(f"-- {a}" in saying or f" {a}" in saying.rpartition("--")[2]
                                                            for a in AUTHORS)]  # fmt: skip
    chinese = [re.sub(r"\x1b\[[\d;]*m", "", poem) for poem in sayings("tang300") + sayings("song100")]
    shares = {"german": german, "spanish": sayings("refranes.fortunes"), "esperanto": sayings("proverbaro"),
              "chinese": chinese}  # fmt: skip
    blocks = []
    for lines in shares.values():
        rng.shuffle(lines)
        text = "\n\n".join(lines)
        blocks += pieces(text, min(len(text), SIZES["languages"] // len(shares)), rng)
    rng.shuffle(blocks)
    return "\n\n".join(blocks)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="a paragraph a line, .xz")
    parser.add_argument("--fortunes", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    novels = lzma.decompress(args.novels.read_bytes()).decode()
    spoken = "\n".join(line for line in novels.splitlines() if line[:1] in QUOTES and len(line) < 400)
    parts = pieces(novels, SIZES["prose"], rng) + pieces(spoken, SIZES["dialogue"], rng)
    parts += pieces(files(CODE, 40_000), SIZES["code"], rng) + pieces(files(MARKUP, 12_000), SIZES["mark-up"], rng)
    parts += pieces(languages(args.fortunes, rng), SIZES["languages"], rng)
    rng.shuffle(parts)
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    args.out.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{args.out}: {len(text)} characters, {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
