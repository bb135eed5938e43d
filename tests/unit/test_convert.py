"""The converter on small checkpoints of several architectures: types, bytes, metadata, memory, resuming."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from checkpoints import ARCHITECTURES, ONE_OF_A_KIND, save_model
from gguf_files import metadata, tensors, types
from gguf_itq3s.base import report
from gguf_itq3s.checkpoint import patches, policy, reading
from gguf_itq3s.cli import main
from gguf_itq3s.codec import native
from gguf_itq3s.codec.blocks import dequantize, quantize
from gguf_itq3s.codec.family import trellis_type
from gguf_itq3s.codec.types import ITQ2_S, ITQ3_N, ITQ3_S
from gguf_itq3s.convert import header
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.output import Output
from gguf_itq3s.convert.pipeline import convert
from selection import some

Make = Callable[[str], Path]
OWN_KEYS = {
    "general.file_type", "itq3s.version", "itq3s.codec", "itq3s.effort", "itq3s.calibrated",
    "itq3s.calibrated_share", "itq3s.norms_folded",
}  # fmt: skip


@pytest.mark.parametrize("name", some(ARCHITECTURES, lambda name: name in ONE_OF_A_KIND, pytest.mark.slow))
def test_f16_equals_upstreams_file(name: str, checkpoint: Make, f16: Make, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    convert(ConvertOptions.of(checkpoint(name), out, outtype="f16"))
    assert out.read_bytes() == f16(name).read_bytes()


@pytest.mark.parametrize("name", some(ARCHITECTURES, lambda name: name == "llama", pytest.mark.slow))
def test_itq3_s_file(name: str, checkpoint: Make, f16: Make, tmp_path: Path) -> None:
    """Every ITQ3_S or ITQ3_N tensor holds the codec's bytes for the weights; all else is as in the F16 file."""
    out = tmp_path / "out.gguf"
    effort = "default" if name == "llama" else "fast"  # what differs between architectures does not depend on it
    convert(ConvertOptions.of(checkpoint(name), out, effort=effort, native=False, fold_norms=False))
    made, stored = tensors(out), tensors(f16(name))
    assert list(made) == list(stored)
    coded = 0
    for tensor_name, tensor in made.items():
        assert tensor.shape.tolist() == stored[tensor_name].shape.tolist()
        if tensor.tensor_type in (ITQ3_S, ITQ3_N):
            fmt = trellis_type(tensor.tensor_type).format
            # The weights are bfloat16 of magnitude 0.1: exact in float16 but for a few subnormal ones.
            weights = stored[tensor_name].data.astype(np.float32)
            error = np.square(dequantize(tensor.data, fmt=fmt) - weights).sum() / np.square(weights).sum()
            assert error < 0.0199, tensor_name
            np.testing.assert_array_equal(tensor.data, quantize(weights, fmt, effort=effort), err_msg=tensor_name)
            coded += 1
        elif tensor.tensor_type == stored[tensor_name].tensor_type:
            np.testing.assert_array_equal(tensor.data, stored[tensor_name].data)
    assert coded >= 8
    ours, theirs = metadata(out), metadata(f16(name))
    assert {key: value for key, value in ours.items() if key not in OWN_KEYS} == {
        key: value for key, value in theirs.items() if key not in OWN_KEYS
    }
    assert ours["general.file_type"] == 510
    assert ours["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert (ours["itq3s.version"], ours["itq3s.codec"], ours["itq3s.effort"]) == (3, "trellis", effort)
    assert ours["itq3s.calibrated"] is False
    field = gguf.GGUFReader(out).fields["itq3s.version"]
    assert field.types == [gguf.GGUFValueType.UINT32]


@pytest.mark.parametrize("outtype", ["tq1_0", "tq2_0"])
def test_ternary_types_are_gguf_pys(outtype: str, checkpoint: Make, f16: Make, tmp_path: Path) -> None:
    convert(ConvertOptions.of(checkpoint("llama"), tmp_path / "out.gguf", outtype=outtype, pure=True))
    stored, qtype = tensors(f16("llama")), Type[outtype.upper()]
    made = tensors(tmp_path / "out.gguf")
    matrices = 0
    assert metadata(tmp_path / "out.gguf")["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{outtype.upper()}"]
    for name, tensor in made.items():
        if len(tensor.shape) > 1:
            assert tensor.tensor_type == qtype
            expected = gguf.quants.quantize(stored[name].data.astype(np.float32), qtype)
            np.testing.assert_array_equal(tensor.data, expected, err_msg=name)
            matrices += 1
    assert matrices == 16


def test_without_the_library_other_types_become_q8_0(
    checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    convert(ConvertOptions.of(checkpoint("llama-odd"), tmp_path / "out.gguf", effort="fast"))
    made = types(tmp_path / "out.gguf")
    assert made["output.weight"] == Type.Q8_0 and made["blk.0.ffn_down.weight"] == ITQ3_N
    assert made["blk.0.attn_q.weight"] == ITQ3_S
    message = capsys.readouterr().err
    assert message.count("note: without the built library: Q6_K -> Q8_0;") == 1
    assert message.count("warning") == 0
    said = "2 matrices whose rows are no multiple of 256 are in ITQ3_N: 3.25 bits a weight where IQ4_NL has 4.5; "
    assert f"{said}25.00 KiB saved\n" in message
    convert(ConvertOptions.of(checkpoint("llama-odd"), tmp_path / "old.gguf", effort="fast", fallback="iq4_nl"))
    assert types(tmp_path / "old.gguf")["blk.0.ffn_down.weight"] == Type.Q8_0
    message = capsys.readouterr().err
    assert message.count("note: without the built library: IQ4_NL -> Q8_0, Q6_K -> Q8_0") == 1
    assert message.count("warning") == 1
    assert "blk.1.ffn_down.weight: 320 columns, ITQ3_S -> Q8_0" in message


@pytest.mark.parametrize("name", some(["llama", "mixtral"], lambda name: name == "llama", pytest.mark.slow))
def test_dry_run_tells_types_and_size_and_writes_nothing(
    name: str, checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    planned = convert(ConvertOptions.of(checkpoint(name), out, dry_run=True, effort="fast"))
    assert main(["convert", str(checkpoint(name)), str(out), "--dry-run", "--effort", "fast"]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    made = convert(ConvertOptions.of(checkpoint(name), out, effort="fast"))
    assert len(made.rows) > 10
    assert [(row.name, row.type, row.bytes) for row in planned.rows] == [
        (row.name, row.type, row.bytes) for row in made.rows
    ]
    assert planned.size == made.size == out.stat().st_size
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        shape = "x".join(map(str, tensor.shape.tolist()))
        assert re.search(rf"^{re.escape(tensor.name)} +{shape} +{tensor.tensor_type.name} ", text, re.MULTILINE)
    assert report.size((tmp_path / "out.gguf").stat().st_size) in text


# ------------------------------------------------------------------------------------------------ policy alone


def small_model(**changes: object) -> policy.Model:
    facts = {"arch": "llama", "layers": 32, "heads": 32, "kv_heads": 32, "experts": 0, "tied": False}
    return policy.Model(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name,shape",
    [
        ("cls.weight", (768, 768)), ("cls.output.weight", (3, 768)), ("blk.0.ssm_alpha.weight", (32, 2048)),
        ("blk.0.ssm_beta.weight", (64, 2048)), ("blk.0.ssm_ba.weight", (64, 2048)), ("blk.0.ssm_x.weight", (48, 512)),
        ("blk.0.ssm_f_a.weight", (128, 2304)), ("blk.0.attn_gate.weight", (32, 4096)),
    ],
)  # fmt: skip
def test_heads_gates_and_few_rows_stay(name: str, shape: tuple[int, ...]) -> None:
    """In the mixes of the trellis types; in llama.cpp's own, whose other choices are llama-quantize's, heads alone."""
    for target in (ITQ3_S, ITQ2_S, ITQ3_N, Type.TQ2_0):
        assert policy.choose(name, shape, Type.F16, target, small_model()).type == Type.F16
        assert policy.choose(name, shape, Type.F16, target, small_model(), pure=True).type == target
    named = policy.Overrides(patterns=[(name, Type.Q8_0)])
    assert policy.choose(name, shape, Type.F16, ITQ3_S, small_model(), overrides=named).type == Type.Q8_0
    stock = policy.choose(name, shape, Type.F16, Type.Q4_K, small_model(), mixed={name: Type.Q4_K}).type
    assert stock == (Type.F16 if name.startswith("cls") else Type.Q4_K)


def test_types_upstream_insists_on_stay() -> None:
    assert policy.choose("blk.0.attn_q.weight", (256, 256), Type.F32, ITQ3_S, small_model()).type == Type.F32
    assert (
        policy.choose("blk.0.ffn_up_exps.weight", (8, 256, 256), Type.MXFP4, ITQ3_S, small_model()).type == Type.MXFP4
    )


# ------------------------------------------------------------------------------------------------ lazy tensors


def test_lazy_evaluation_reads_shared_values_once_and_keeps_nothing() -> None:
    calls: list[str] = []

    def load(name: str) -> np.ndarray:
        calls.append(name)
        return np.full((4, 4), 2.0, dtype=np.float32)

    meta = gguf.LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, (4, 4))
    source = gguf.LazyNumpyTensor(meta=meta, args=("w",), func=load)
    product = source * source + source
    from gguf_itq3s.checkpoint.lazy import value as evaluate

    np.testing.assert_array_equal(evaluate(product), np.full((4, 4), 6.0))
    assert calls == ["w"]
    assert source._data is None and product._data is None
    evaluate(product)
    assert calls == ["w", "w"]


# ------------------------------------------------------------------------------------- memory, stopping, resuming


def wide_checkpoint(folder: Path, tokenizer: Path) -> Path:
    """A Mixtral whose stacked experts are its largest tensors: 64 MiB each in F32, 960 MiB altogether."""
    config = MixtralConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in MixtralForCausalLM(config).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up|down)_proj", name):
            # transformers stacks the experts; checkpoints have them one by one.
            parts = ["w1", "w3"] if match[2] == "gate_up" else ["w2"]
            for expert, part in itertools.product(range(shape[0]), parts):
                size = (shape[1] // len(parts), shape[2])
                weights[f"{match[1]}.block_sparse_moe.experts.{expert}.{part}.weight"] = torch.ones(
                    size, dtype=torch.bfloat16
                )
        else:
            weights[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    shutil.copyfile(tokenizer / "tokenizer.model", folder / "tokenizer.model")
    return folder


def peak(model: Path, out: Path, outtype: str = "f16") -> int:
    """Peak resident memory of a conversion in bytes (VmHWM: ru_maxrss would count the parent's pages at the fork)."""
    program = (
        "import sys; from pathlib import Path; from gguf_itq3s.cli import convert_main as main; "
        "code = main(sys.argv[1:]); status = Path('/proc/self/status').read_text(); "
        "print(status.split('VmHWM:')[1].split()[0]); raise SystemExit(code)"
    )
    command: list[str | Path] = [sys.executable, "-c", program, model, out, "--outtype", outtype, "--threads", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_stays_within_the_two_largest_tensors(checkpoint: Make, tokenizer: Path, tmp_path: Path) -> None:
    """Over the memory of a tiny conversion: at most two F32 copies of the largest tensor, and pieces.

    What glibc keeps of memory that was freed differs by 100 MiB from run to run; the whole model would be 480 MiB more.
    """
    base = peak(checkpoint("mixtral"), tmp_path / "out.gguf")
    model = wide_checkpoint(tmp_path / "wide", tokenizer)
    largest = 4 * 4 * 4096 * 1024
    assert base < 2**30
    for outtype in ("f16", "tq2_0"):
        assert peak(model, tmp_path / "out.gguf", outtype) - base < 2 * largest + 256 * 2**20


#: The command, held after its third tensor: it says so, and waits to be interrupted.
HELD = """
import sys, time
from gguf_itq3s.cli import main
from gguf_itq3s.convert.output import Output

own = Output.write

def write(self, pieces, record):
    own(self, pieces, record)
    if len(self.records) == 3:
        print("held", flush=True)
        while True:  # a signal just before a long sleep would be noticed behind it
            time.sleep(0.1)

Output.write = write
raise SystemExit(main(sys.argv[1:]))
"""


def interrupt(model: Path, out: Path, number: int, *options: str) -> str:
    """Send a signal to a conversion that has three tensors in its journal; returns what was printed on stderr."""
    command = [sys.executable, "-c", HELD, "convert", model, out, "--no-native", "--threads", "1", *options]
    process = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )
    assert process.stdout is not None
    if process.stdout.readline() != "held\n":
        pytest.fail(process.communicate()[1])
    process.send_signal(number)
    message = process.communicate()[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 1)
    assert len(out.with_name(f"{out.name}.partial.journal").read_text().splitlines()) == 1 + 3
    return message


def hear_ctrl_c() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and so are the children of that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(model: Path, out: Path) -> str:
    """The same conversion to its end; what it says on the way."""
    messages = io.StringIO()
    convert(ConvertOptions.of(model, out, native=False, threads=1), messages)
    return messages.getvalue()


def continued(message: str) -> tuple[int, int] | None:
    """After how many tensors, of how many, a conversion says that it continued; None where it says nothing."""
    found = re.search(r"^continuing after (\d+) of (\d+) tensors$", message, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


@pytest.fixture(scope="module")
def uninterrupted(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "out.gguf"
    convert(ConvertOptions.of(checkpoint("llama"), out, native=False))
    return out.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupted_conversion_leaves_no_output_and_continues(
    number: int, checkpoint: Make, uninterrupted: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    message = interrupt(checkpoint("llama"), out, number)
    assert not out.exists()
    assert re.search(
        r"^error: .*out\.gguf: interrupted after 3 of 21 tensors; the same command continues", message, re.M
    )
    assert "Traceback" not in message
    assert continued(finish(checkpoint("llama"), out)) == (3, 21)
    assert out.read_bytes() == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.slow
def test_killed_conversion_continues(checkpoint: Make, uninterrupted: bytes, tmp_path: Path) -> None:
    out, journal = tmp_path / "out.gguf", tmp_path / "out.gguf.partial.journal"
    interrupt(checkpoint("llama"), out, signal.SIGKILL)
    assert not out.exists()
    # A tensor that did not reach the disk whole, and a torn last line.
    (tmp_path / "whole.gguf").write_bytes(uninterrupted)
    last = gguf.GGUFReader(tmp_path / "whole.gguf").tensors[2]
    with (tmp_path / "out.gguf.partial").open("r+b") as partial:
        partial.seek(int(last.data_offset + last.n_bytes) - 64)
        partial.write(b"\xff" * 64)
    with journal.open("a") as lines:
        lines.write('{"name": "torn')
    assert continued(finish(checkpoint("llama"), out)) == (2, 21)
    assert out.read_bytes() == uninterrupted


@pytest.mark.slow
def test_other_options_do_not_continue_a_partial_file(checkpoint: Make, uninterrupted: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    interrupt(checkpoint("llama"), out, signal.SIGINT, "--effort", "fast")
    assert continued(finish(checkpoint("llama"), out)) is None
    assert out.read_bytes() == uninterrupted


def test_another_state_of_the_program_does_not_continue_a_partial_file(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version stays the same while the program is developed; its sources and the C library do not."""
    options = ConvertOptions.of(checkpoint("llama"), tmp_path / "out.gguf")
    source, head = reading.open_checkpoint(checkpoint("llama")), b""
    keys = [header.fingerprint(head, options, source) for _ in range(2)]
    other = checkpoint("llama") / "config.json"
    for owner, name, value in ((header, "sources", lambda: "another"), (native, "library_path", lambda: other)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(header.fingerprint(head, options, source))
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_a_writer_that_comes_just_after_the_last_rename_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process renames its partial file between this one's opening and locking of it."""
    out, lock = tmp_path / "out.gguf", Output._lock
    renames = [lambda: (tmp_path / "out.gguf.partial").replace(out)]
    (tmp_path / "out.gguf.partial").write_bytes(b"whole")

    def late(file: Any) -> bool:
        if renames:
            renames.pop()()
        return lock(file)

    monkeypatch.setattr(Output, "_lock", staticmethod(late))
    with pytest.raises(RuntimeError, match="stopped"), Output(out, b"GGUF", (), "print"):
        assert (out.read_bytes(), (tmp_path / "out.gguf.partial").exists()) == (b"whole", True)
        raise RuntimeError("stopped")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out.gguf", b"whole")]


def test_a_dry_run_reads_no_weights(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ternary matrices are told apart by their first rows; nothing else of a tensor is read before the conversion."""
    monkeypatch.setattr(patches, "_read_bytes", lambda tensor: pytest.fail(f"{tensor} was read"))
    for name in ("llama", "mixtral"):
        options = ConvertOptions.of(checkpoint(name), Path("unused.gguf"), dry_run=True)
        assert convert(options, io.StringIO()).rows


def test_the_first_row_of_a_transposed_matrix_is_not_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    """GPT-2 keeps matrices the other way round; a square one looks the same, so no matrix of it is judged by a row."""
    config = transformers.GPT2Config(vocab_size=512, n_positions=64, n_ctx=64, n_embd=256, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    folder = save_model(model, tmp_path / "gpt2", tokenizer)
    opened = reading.open_shapes(
        folder, {k: tuple(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    )
    opened = replace(opened, files=[folder / "model.safetensors"])
    square = next(tensor for tensor in opened.tensors if tensor.name == "blk.0.attn_output.weight")
    assert square.shape == (256, 256) and opened.first_rows(square) is None
