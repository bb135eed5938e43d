#!/usr/bin/env python3
"""Run the commands of gguf-itq3s on damaged checkpoints, statistics and GGUF files.

    damage.py gguf|checkpoint|calibration --seconds N --seed N [--found FOLDER]

A case is one command on one damaged model. It ends with exit code 0, or with exit code 1 and one line, and leaves no
file that it did not say it would. A case is kept as JSON, {"command": ..., "damage": [...]}: see :func:`apply`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import one_thread  # noqa: E402, F401

# isort: split
import gguf_itq3s  # noqa: E402, F401  (before anything imports gguf)

# isort: split
import gguf  # noqa: E402

from calibrating import options  # noqa: E402
from checkpoints import NOVEL, SIZES, save_model  # noqa: E402
from gguf_itq3s.calibrate.statistics import calibrate  # noqa: E402
from gguf_itq3s.cli import main as program  # noqa: E402

Damage = list[Any]
SECONDS = 60
#: More than a model of two megabytes may take beyond what the imports take.
MEMORY = 4 << 30

COMMANDS = {
    "gguf": ["inspect", "inspect --json", "verify"],
    "checkpoint": ["plan", "dry-run", "verify"],
    "calibration": ["dry-run", "convert"],
}
#: The weights; beside a file of the plain name Transformers reads no index.
SHARD = "model-00001-of-00001.safetensors"
#: The files of a model that are damaged.
FILES = {
    "gguf": ["model.gguf"],
    "checkpoint": ["config.json", SHARD, "model.safetensors.index.json", "tokenizer_config.json"],
    "calibration": ["calibration/manifest.json", "calibration/*.safetensors"],
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 255, 256, 257, 511, 1.5, -0.0, 1e300, 1e-300, float("nan"), float("inf"),
    2**31, 2**31 - 1, 2**32, 2**53, 2**63, 2**64, 2**70, 10**9, -(2**63), 10**30, "", "a", "256", "\u0000", "../x",
    "/x", "x" * 5000, "\ud800", SHARD, [], {}, [[]], [None], ["a"], [0], [256, 256], [-1], [2**62, 4],
    {"a": 1}, {"": {}}, "F32", "BF16", "I64", "silu", "linear", "yarn", "LlamaForCausalLM", "Qwen2ForCausalLM",
    "MixtralForCausalLM", "gemma", ["Qwen2ForCausalLM"], ["GPT2LMHeadModel"], ["MambaForCausalLM"], ["BertModel"],
    ["T5ForConditionalGeneration"],
]  # fmt: skip
#: Keys that config.json may have.
KEYS = ["rope_scaling", "rope_parameters", "head_dim", "num_local_experts", "num_experts", "quantization_config",
        "text_config", "auto_map", "torch_dtype", "sliding_window", "layer_types", "tie_word_embeddings", "vocab_size",
        "weight_map", "metadata", "__metadata__", "add_bos_token", "added_tokens_decoder", "chat_template"]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the model


def make(folder: Path) -> Path:
    """A model of one layer, its GGUF file and its statistics."""
    import sentencepiece
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sentencepiece.SentencePieceTrainer.train(
        input=str(NOVEL), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=320, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    # the rows of ffn_down are blocks of 64, not of 256
    sizes = {**SIZES, "vocab_size": 320, "intermediate_size": 320, "num_hidden_layers": 1}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, initializer_range=0.1))
    whole = save_model(model.to(torch.bfloat16), folder / "model", folder)
    (whole / "model.safetensors").rename(whole / SHARD)
    names = [name for name, _ in model.named_parameters()]
    calibrate(options(whole), folder / "calibration")
    with quiet() as said:
        if program(["convert", str(whole), str(folder / "model.gguf"), "--effort", "fast"]) != 0:
            raise RuntimeError(said.read_text())
    shutil.move(folder / "calibration", whole / "calibration")
    shutil.move(folder / "model.gguf", whole / "model.gguf")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, SHARD)}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    return whole


# -------------------------------------------------------------------------------------------------------------- damages


def apply(folder: Path, damage: list[Damage]) -> None:
    """Damage the files of a model.

    ["set", file, path, value], ["delete", file, path]   JSON, or the header of a safetensors file
    ["bytes", file, offset, hexadecimal]                 overwrite; a negative offset counts from the end
    ["cut", file, size], ["remove", file]
    """
    for kind, name, *rest in damage:
        path = folder / name
        if not path.is_file():
            continue
        if kind == "remove":
            path.unlink()
            continue
        data = path.read_bytes()
        if kind == "bytes":
            new = bytes.fromhex(rest[1])
            at = rest[0] % max(1, len(data))
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "cut":
            data = data[: rest[0]]
        else:
            data = write_json(path, data, edit(read_json(path, data), rest[0], kind, rest[1:]))
        path.write_bytes(data)


def read_json(path: Path, data: bytes) -> Any:
    """The JSON of a file; of a safetensors file its header."""
    try:
        if path.suffix == ".safetensors":
            (size,) = struct.unpack("<Q", data[:8])
            data = data[8 : 8 + size]
        return json.loads(data)
    except (ValueError, struct.error, RecursionError):
        return None  # damaged before


def write_json(path: Path, data: bytes, value: Any) -> bytes:
    text = json.dumps(value).encode()
    if path.suffix != ".safetensors":
        return text
    (size,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def edit(value: Any, path: list[Any], kind: str, new: list[Any]) -> Any:
    """Set or delete what is at a path of keys and indices."""
    if not path:
        return new[0] if kind == "set" else None
    key, rest = path[0], path[1:]
    if isinstance(value, list) and isinstance(key, int) and value:
        key %= len(value)
    elif not isinstance(value, dict):
        return value
    if rest:
        inner = value.get(key) if isinstance(value, dict) else value[key]
        value[key] = edit(inner, rest, kind, new)
    elif kind == "set":
        value[key] = new[0]
    elif isinstance(value, list) or key in value:
        del value[key]
    return value


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


def random_damage(part: str, whole: Path, rng: random.Random) -> list[Damage]:
    """One to three damages of the files of a part."""
    damage: list[Damage] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        path = rng.choice(sorted(whole.glob(rng.choice(FILES[part]))))
        name, size = str(path.relative_to(whole)), path.stat().st_size
        head = min(size, header_bytes(path))
        content = read_json(path, path.read_bytes()) if path.suffix in (".json", ".safetensors") else None
        if content is not None and rng.random() < 0.8:
            at = list(rng.choice(list(paths(content))))
            value = rng.choice(ODD)
            if rng.random() < 0.1:
                damage.append(["delete", name, at])
            elif rng.random() < 0.1:
                damage.append(["set", name, [rng.choice(KEYS)], value])
            else:
                damage.append(["set", name, at, value])
        elif rng.random() < 0.05:
            damage.append(["cut", name, rng.randrange(head if rng.random() < 0.5 else size)])
        elif rng.random() < 0.02 and part != "gguf":
            damage.append(["remove", name])
        else:
            at_byte = rng.randrange(head if rng.random() < 0.9 else size)
            number = rng.choice([rng.getrandbits(64), rng.randrange(600), 1 << rng.randrange(64), (1 << 64) - 1])
            damage.append(["bytes", name, at_byte, struct.pack("<Q", number)[: rng.choice([1, 1, 2, 4, 8])].hex()])
    return damage


def header_bytes(path: Path) -> int:
    """Where the numbers of a file begin."""
    if path.suffix == ".gguf":
        return int(gguf.GGUFReader(path).data_offset)
    if path.suffix == ".safetensors":
        return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])
    return path.stat().st_size


# --------------------------------------------------------------------------------------------------------- the commands


class Hang(BaseException):
    """A command took too long; no handler of the program catches this."""


class CaseError(Exception):
    """A command did not end as it should."""


@contextmanager
def quiet() -> Iterator[Path]:
    """What is printed, by C code too, goes to a file."""
    with tempfile.NamedTemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        before = sys.stdout, sys.stderr
        # as Python opens them: stderr takes any string
        sys.stdout = open(file.fileno(), "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(file.fileno(), "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        try:
            yield Path(file.name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)


def arguments(command: str, model: Path, whole: Path, out: Path) -> list[str]:
    """A command line on a damaged model."""
    if command.startswith("inspect"):
        return [*command.split(), str(model / "model.gguf")]
    if command == "plan":
        return ["plan", str(model)]
    if command == "verify":
        return ["verify", str(model / "model.gguf"), "--against", str(model)]
    line = ["convert", str(model), str(out), "--effort", "fast"]
    if command == "dry-run":
        line.append("--dry-run")
    return [*line, "--calibration", str(model / "calibration")] if (model / "calibration").exists() else line


def run_case(part: str, case: dict[str, Any], whole: Path, folder: Path) -> bool:
    """Run a command on the model with a damage; whether it was refused.

    Raises:
        CaseError: it did not end as it should.
    """
    model, out = folder / "model", folder / "out" / "out.gguf"
    for path in (model, out.parent):
        shutil.rmtree(path, ignore_errors=True)
    # what is not damaged is not copied
    damaged = {damage[1] for damage in case["damage"]}
    skipped = {"calibration": {"model.gguf"}, "checkpoint": {"calibration"}, "gguf": {"calibration"}}[part]
    for path in sorted(whole.rglob("*")):
        name = path.relative_to(whole)
        if name.parts[0] in skipped or not path.is_file():
            continue
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        if str(name) in damaged:
            shutil.copyfile(path, model / name)
        else:
            os.symlink(path, model / name)
    out.parent.mkdir()
    apply(model, case["damage"])
    files = sorted(str(path) for path in model.rglob("*"))

    def alarm(_signal: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with quiet() as output:
        signal.alarm(SECONDS)
        try:
            code: object = program(arguments(case["command"], model, whole, out))
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        sys.stdout.flush()
        sys.stderr.flush()
        text = output.read_text(errors="replace")

    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    left = sorted(path.name for path in out.parent.iterdir())
    if code not in (0, 1):
        raise CaseError(f"ended with {code}")
    if "Traceback" in text or "internal error" in text:
        raise CaseError(next(line for line in text.splitlines() if "Traceback" in line or "internal error" in line))
    # what verify and inspect have to say of a file that they could read is their table
    table = (case["command"] == "verify" and text.startswith("tensor ")) or (
        case["command"] == "inspect" and "\nNOT FINITE: " in text
    )
    if len(errors) != code and not (table and not errors):
        raise CaseError(f"exit code {code} with the errors {errors}")
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) << 10 > MEMORY or "out of memory" in text:
        raise CaseError("took gigabytes")
    if left and (code == 1 or case["command"] != "convert"):
        raise CaseError(f"left {left}")
    if sorted(str(path) for path in model.rglob("*")) != files:
        raise CaseError("changed the files of the model")
    return code == 1


def random_case(part: str, whole: Path, rng: random.Random) -> dict[str, Any]:
    command = rng.choice(COMMANDS[part])
    if command == "convert" and rng.random() < 0.8:  # seconds
        command = "dry-run"
    return {"command": command, "damage": random_damage(part, whole, rng)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=sorted(COMMANDS))
    parser.add_argument("--seconds", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--found", type=Path, metavar="FOLDER", help="where a case that fails goes")
    args = parser.parse_args()
    counts = {"cases": 0, "refused": 0}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        whole = make(Path(name))
        rng = random.Random(args.seed)
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            case = random_case(args.part, whole, rng)
            counts["cases"] += 1
            try:
                counts["refused"] += run_case(args.part, case, whole, Path(name) / "case")
            except CaseError as failure:
                text = json.dumps(case)
                kind = str(failure)[:60]
                if kind not in failures:  # one of a kind
                    failures[kind] = text
                    print(f"{failure}: {text[:600]}", flush=True)
                    if args.found:
                        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                        (args.found / f"{digest}.json").write_text(text + "\n")
    if path := os.environ.get("ITQ3S_FUZZ_COUNTS"):
        Path(path).write_text("".join(f"{key} {value}\n" for key, value in counts.items()))
    print(", ".join(f"{value} {key}" for key, value in counts.items()))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
