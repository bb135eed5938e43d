"""LoRA adapters on folded and unfolded models: what the built tools predict, and which pairs they refuse."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

import llama
from adapters import change, merged, save_adapter
from divergence import log_probabilities, mean_kld
from gguf_files import metadata
from gguf_itq3s import cli
from gguf_itq3s.checkpoint.rescaling import EXPONENTS, ID, NORMS_FOLDED, SOURCES
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.programs.lora import LoraOptions, convert_lora

#: Models: the bundled one, and random ones with gains far from one.
MODELS = ("bundled", "llama", "gemma")


#: How models are rescaled.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "folded": {"fold_norms": True}, "equalized": {"equalize": True, "context": 64, "tokens": 512},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(uneven: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made(name)``: a folder with an adapter, the model in six files and the adapter in three, made once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            base = llama.MODEL if name == "bundled" else uneven(name)
            folder = folders[name] = tmp_path_factory.mktemp(f"lora-{name}")
            adapter = save_adapter(base, folder / "adapter", size=0.03)
            quiet = io.StringIO()
            for outtype in ("f16", "itq3_s"):
                for kind, how in KINDS.items():
                    out = folder / f"{outtype}-{kind}.gguf"
                    convert(ConvertOptions.of(base, out, outtype=outtype, pure=True, **how), quiet)
            for kind in KINDS:
                out, model = (folder / f"{part}-{kind}.gguf" for part in ("adapter", "f16"))
                convert_lora(LoraOptions(adapter, out, base, model=model), quiet)
        return folders[name]

    return make


def unmarked(path: Path, out: Path) -> Path:
    """A copy without the key, as an earlier version or another converter would have made it."""
    assert cli.main(["new-metadata", "--force", "--remove-metadata", NORMS_FOLDED, str(path), str(out)]) == 0
    return out


@pytest.mark.parametrize("name", MODELS)
def test_adapters_act_as_on_the_unfolded_model(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = made(name)
    plain, folded = ("--lora", folder / "adapter-plain.gguf"), ("--lora", folder / "adapter-folded.gguf")
    base = log_probabilities(folder / "f16-plain.gguf", tmp_path / "base", *plain)
    without = mean_kld(folder / "f16-plain.gguf", base)
    same = mean_kld(folder / "f16-folded.gguf", base, *folded)
    unscaled = mean_kld(unmarked(folder / "f16-folded.gguf", tmp_path / "unmarked.gguf"), base, *plain)
    ours = mean_kld(folder / "itq3_s-plain.gguf", base, *plain), mean_kld(folder / "itq3_s-folded.gguf", base, *folded)
    wrong = mean_kld(unmarked(folder / "itq3_s-folded.gguf", tmp_path / "unmarked-itq3_s.gguf"), base, *plain)
    print(f"{name}: without {without}, F16 {same} for {unscaled}, ITQ3_S {ours} for {wrong}")
    assert without > 0.05 and abs(same) < 1e-5
    assert unscaled > 0.02 and wrong > 1.2 * ours[1]
    # Folded, the rounding is another one, and no worse than by chance.
    assert ours[1] < 1.25 * ours[0]


@pytest.mark.parametrize("name", MODELS)
def test_adapters_act_on_the_equalized_model(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows of B are scaled too: what v and up put out has other sizes there."""
    folder = made(name)
    plain, equalized = (("--lora", folder / f"adapter-{kind}.gguf") for kind in ("plain", "equalized"))
    model = folder / "f16-equalized.gguf"
    base = log_probabilities(folder / "f16-plain.gguf", tmp_path / "base", *plain)
    without, same = mean_kld(model, base), mean_kld(model, base, *equalized)
    bare = tmp_path / "unmarked.gguf"
    keys = [part for key in (SOURCES, EXPONENTS, ID) for part in ("--remove-metadata", key)]
    assert cli.main(["new-metadata", "--force", *keys, str(model), str(bare)]) == 0
    unscaled = mean_kld(bare, base, *plain)
    print(f"{name}: without {without}, scaled {same}, not scaled {unscaled}")
    assert abs(same) < 1e-5 and without > 0.05 and unscaled > 100 * abs(same) + 1e-4


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_an_adapter_is_what_peft_means_by_it(
    rank_stabilised: bool, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same predictions as the checkpoint with the update added to its weights."""
    base = uneven("llama")
    adapter = save_adapter(base, tmp_path / "adapter", rank=4)
    change(adapter, use_rslora=rank_stabilised, lora_alpha=4)
    whole = merged(base, adapter, tmp_path / "merged", 2.0 if rank_stabilised else 1.0)
    quiet = io.StringIO()
    convert(ConvertOptions.of(whole, tmp_path / "whole.gguf", outtype="f16"), quiet)
    convert(ConvertOptions.of(base, tmp_path / "folded.gguf", outtype="f16", fold_norms=True), quiet)
    convert_lora(LoraOptions(adapter, tmp_path / "adapter.gguf", base, model=tmp_path / "folded.gguf"), quiet)
    base_file = log_probabilities(tmp_path / "whole.gguf", tmp_path / "base")
    assert mean_kld(tmp_path / "folded.gguf", base_file) > 0.05
    assert abs(mean_kld(tmp_path / "folded.gguf", base_file, "--lora", tmp_path / "adapter.gguf")) < 1e-5


CONVERT = "convert the adapter with: gguf-itq3s convert-lora ADAPTER out.gguf --base MODEL_DIR --model MODEL.gguf"
RESCALED_MODEL = f"the model's channels are rescaled, and the adapter is for one whose channels are not; {CONVERT}"
RESCALED_ADAPTER = f"the adapter is for a model whose channels are rescaled, and this model's are not; {CONVERT}"
OTHERWISE = f"the adapter is for a model whose channels are rescaled otherwise; {CONVERT}"


@pytest.mark.parametrize("outtype", ["f16", "itq3_s"])
@pytest.mark.parametrize("tool", ["llama-completion", "llama-cli", "llama-server", "llama-export-lora"])
def test_pairs_that_do_not_fit_are_refused(
    tool: str, outtype: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    ways: dict[str, list[str | Path]] = {
        "llama-server": ["--port", "0"], "llama-export-lora": ["-o", tmp_path / "out.gguf"],
    }  # fmt: skip
    arguments = ways.get(tool, ["-p", "The", "-n", "1", "-st"])
    pairs = [("folded", "plain", RESCALED_MODEL), ("plain", "folded", RESCALED_ADAPTER)]
    pairs += [("equalized", "plain", RESCALED_MODEL), ("plain", "equalized", RESCALED_ADAPTER)]
    for model, adapter, line in (*pairs, ("equalized", "folded", OTHERWISE), ("folded", "equalized", OTHERWISE)):
        files = ("-m", made("llama") / f"{outtype}-{model}.gguf", "--lora", made("llama") / f"adapter-{adapter}.gguf")
        done = llama.run(tool, *files, *arguments, check=False)
        said = (done.stdout + done.stderr).splitlines()
        assert done.returncode == 1, said[-5:]
        assert [text for text in said if text.endswith(line)], said[-5:]


def test_llama_quantize_carries_the_mark(made: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "quantized.gguf"
    llama.run("llama-quantize", made("llama") / "f16-folded.gguf", out, "ITQ3_S")
    assert metadata(out)[NORMS_FOLDED] is True
    files = ("-m", out, "--lora", made("llama") / "adapter-plain.gguf")
    done = llama.run("llama-completion", *files, "-p", "The", "-n", "1", "-no-cnv", check=False)
    assert done.returncode == 1 and RESCALED_MODEL in done.stdout + done.stderr


def test_a_mark_that_is_no_bool_is_none(made: Callable[[str], Path], tmp_path: Path) -> None:
    """A file may say anything; a text where the key should be a bool counts as no mark and crashes nothing."""
    folder = made("llama")
    for value, kind in (("true", gguf.GGUFValueType.STRING), ([True], gguf.GGUFValueType.ARRAY)):
        out = tmp_path / f"{kind.name}.gguf"
        reader = gguf.GGUFReader(folder / "adapter-plain.gguf")
        writer = gguf.GGUFWriter(out, "llama")
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_key_value(NORMS_FOLDED, value, kind)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = ("-m", folder / "f16-folded.gguf", "--lora", out)
        done = llama.run("llama-completion", *files, "-p", "The", "-n", "1", "-no-cnv", check=False)
        assert done.returncode == 1 and RESCALED_MODEL in done.stdout + done.stderr
