#!/usr/bin/env python3
"""Measure what norm folding, importance matrices and calibration are worth, on a model and its outlier twins.

    scripts/calibration_table.py models/demo-llama --novels novels.txt.xz --valid wiki.valid.tokens.txt \\
        --test wiki.test.raw --work build/calibration

For each model: mean KL divergence of its F16 file's predictions to those of each quantized file (llama-perplexity),
every matrix of a layer in the named type, embeddings in F16. Importance matrix and calibration come from the same text,
half from the novels and half from the validation split; the test split is only evaluated on. A second text, the
reference topics in Python's own library (technical prose, another domain than the calibration text), is a held-out
check.

Finished parts are kept in ``--work``; the same command continues. Ends with the tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from make_twins import TWINS, make_twin, read_model, write_model

from gguf_itq3s import calibrate, convert

if TYPE_CHECKING:
    import torch

BIN = Path(__file__).resolve().parents[1] / "build" / "bin"
EMBEDDING = "f16"
TEXTS = {"wikitext": "WikiText-2 test", "topics": "Python reference topics (held out)"}


@dataclass(frozen=True)
class Row:
    """One way to quantize.

    Attributes:
        label: as in the table.
        bits: bits a weight.
        quantize: llama-quantize type, or None for our converter.
        statistics: none, ``imatrix`` or ``calibration``.
        fold: whether our converter folds norms.
    """

    label: str
    bits: float
    quantize: str | None = None
    statistics: str | None = None
    fold: bool = False


ROWS = {
    "plain": Row("ITQ3_S, nearest codeword, not folded", 3.125),
    "default": Row("**ITQ3_S, default: norms folded, no data**", 3.125, fold=True),
    "imatrix-unfolded": Row("ITQ3_S, importance matrix, not folded", 3.125, statistics="imatrix"),
    "imatrix": Row("**ITQ3_S, `--imatrix`, folded**", 3.125, statistics="imatrix", fold=True),
    "calibrated-unfolded": Row("ITQ3_S, full Hessian, not folded", 3.125, statistics="calibration"),
    "calibrated": Row("**ITQ3_S, `--calibration`, folded**", 3.125, statistics="calibration", fold=True),
    "quantize-imatrix": Row("ITQ3_S, `llama-quantize --imatrix`", 3.125, quantize="ITQ3_S", statistics="imatrix"),
    "iq3_s": Row("IQ3_S", 3.4375, quantize="IQ3_S"),
    "iq3_s-imatrix": Row("IQ3_S, importance matrix", 3.4375, quantize="IQ3_S", statistics="imatrix"),
    "q3_k": Row("Q3_K", 3.4375, quantize="Q3_K_S"),
    "q3_k-imatrix": Row("Q3_K, importance matrix", 3.4375, quantize="Q3_K_S", statistics="imatrix"),
}
# Measured in this order: what the ratios need comes first.
ORDER = (
    "default", "iq3_s", "calibrated", "q3_k", "imatrix",
    "iq3_s-imatrix", "q3_k-imatrix", "plain", "calibrated-unfolded", "imatrix-unfolded", "quantize-imatrix",
)  # fmt: skip


def tool(name: str, *args: str | Path) -> str:
    """Run a built tool; its output."""
    done = subprocess.run(
        [str(BIN / name), *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    output = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    if done.returncode:
        raise SystemExit(f"error: {name} {' '.join(map(str, args))}: {output[-800:]}")
    return output


def calibration_text(args: argparse.Namespace) -> Path:
    """Half novels, half validation split, excerpts spread evenly over both."""
    path: Path = args.work / "calibration.txt"
    if not path.exists():
        novels = calibrate.read_text(args.novels)
        valid = re.sub(r" @([-,.])@ ", r"\1", calibrate.read_text(args.valid)).replace("<unk>", "")
        size = args.tokens * 5 // 2
        pieces = []
        for text in (novels, valid):
            length = 6000
            count = max(1, size // length)
            starts = np.linspace(0, max(0, len(text) - length), count).astype(int)
            pieces += [text[text.find(" ", start) + 1 : start + length] for start in starts]
        path.write_text("\n".join(pieces))
    return path


def evaluation_texts(args: argparse.Namespace) -> dict[str, Path]:
    """The texts that files are measured on."""
    topics = args.work / "topics.txt"
    if not topics.exists():
        topics.write_text("\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    texts = {"wikitext": args.test, "topics": topics}
    return {name: texts[name] for name in args.texts}


def measure(folder: Path, model: Path, args: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    """All rows of one model; ``results`` maps row -> text -> mean KLD and is written after each."""
    folder.mkdir(parents=True, exist_ok=True)
    text, f16 = calibration_text(args), folder / "f16.gguf"
    threads = ["-t", str(args.threads)]
    common = {"threads": args.threads, "pure": True, "token_embedding_type": EMBEDDING, "output_tensor_type": EMBEDDING}
    if not f16.exists():
        convert.convert(convert.Options(model, f16, outtype="f16"))
    texts = evaluation_texts(args)
    in_torch = {}
    if args.torch:
        in_torch = {name: TorchEvaluator(model, f16, path, args.chunks) for name, path in texts.items()}
    for name, path in texts.items():
        if args.torch:
            continue
        base = folder / f"{name}.kld"
        if not base.exists():
            partial = base.with_suffix(".partial")
            tool("llama-perplexity", "-m", f16, "-f", path, "-c", "512", "--chunks", str(args.chunks),
                 "--kl-divergence-base", partial, *threads)  # fmt: skip
            partial.replace(base)
    imatrix = folder / "importance.gguf"
    if not imatrix.exists():
        tool("llama-imatrix", "-m", f16, "-f", text, "-c", "512", "--chunks", str(args.tokens // 512), "-o", imatrix,
             "--output-frequency", "100000", *threads)  # fmt: skip
    hessians = folder / "hessians"
    calibrate.calibrate(calibrate.Options(model, [text], hessians, tokens=args.tokens, context=512))
    for key in ORDER:
        row = ROWS[key]
        if key in results and all(name in results[key] for name in texts):
            continue
        out = folder / f"{key}.gguf"
        if row.quantize:
            options: list[str | Path] = ["--imatrix", imatrix] if row.statistics else []
            kept = ["--pure", "--token-embedding-type", EMBEDDING, "--output-tensor-type", EMBEDDING]
            tool("llama-quantize", *options, *kept, f16, out, row.quantize, str(args.threads))
        else:
            convert.convert(
                convert.Options(
                    model, out, fold_norms=row.fold,
                    imatrix=imatrix if row.statistics == "imatrix" else None,
                    calibration=hessians if row.statistics == "calibration" else None, **common,
                )
            )  # fmt: skip
        known = results.get(key, {})
        results[key] = known | {
            name: in_torch[name].kld(out) if in_torch else kld(out, folder / f"{name}.kld", threads)
            for name in texts
            if name not in known
        }
        out.unlink()
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{folder.name}: {row.label}: {results[key]}", file=sys.stderr, flush=True)


def kld(model: Path, base: Path, threads: list[str]) -> float:
    """Mean KL divergence over the windows of ``base``."""
    output = tool("llama-perplexity", "-m", model, "--kl-divergence-base", base, "--kl-divergence", *threads)
    found = re.search(r"^Mean    KLD:\s*(-?[0-9.]+|-?nan)\s+±", output, re.M)
    if not found:
        raise SystemExit(f"error: llama-perplexity printed no mean KLD: {output[-800:]}")
    return float(found[1])


#: Llama's names in transformers and in GGUF.
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


class TorchEvaluator:
    """Mean KL divergence in PyTorch, on dequantized weights in float32: the same windows and positions, and faster."""

    def __init__(self, model: Path, f16: Path, text: Path, chunks: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(model)(text.read_text()[: chunks * 512 * 8]).input_ids
        rows = [ids[:1] + ids[1 + i * 511 : 1 + (i + 1) * 511] for i in range(chunks)]
        self._windows = torch.tensor(rows)
        self._base = self._predictions(f16)

    def kld(self, path: Path) -> float:
        """Of a GGUF file's predictions, over the second halves of the windows."""
        return float((self._base.exp() * (self._base - self._predictions(path))).sum(-1).mean())

    def _predictions(self, path: Path) -> torch.Tensor:
        import gguf
        import torch

        weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
        config = self._model.config
        with torch.inference_mode():
            for name, parameter in self._model.named_parameters():
                key = re.sub(r"model\.layers\.(\d+)\.", r"blk.\1.", name)
                for theirs, ours in _NAMES.items():
                    key = key.replace(theirs, ours)
                value = weights[key].astype(np.float32)
                if ".attn_q." in key or ".attn_k." in key:  # the converter interleaves the halves of a head for RoPE
                    heads = config.num_attention_heads if ".attn_q." in key else config.num_key_value_heads
                    value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
            parts = [self._model(input_ids=rows[None]).logits[:, 256:-1] for rows in self._windows]
        return torch.log_softmax(torch.cat(parts), dim=-1)


def shown(value: float | None, digits: int = 4) -> str:
    """A number of the table, empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(results: dict[str, dict[str, float]], text: str, key: str, others: tuple[str, ...]) -> float | None:
    """KLD of a row over the least of the others, None where one is missing."""
    if any(text not in results.get(name, {}) for name in (key, *others)):
        return None
    return results[key][text] / min(results[other][text] for other in others)


def tables(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table of every text, and the ratios."""
    models = list(results)
    lines = []
    for text, title in TEXTS.items():
        lines += [
            f"Mean KLD, {title}:",
            "",
            "| | bits | " + " | ".join(models) + " |",
            "| --- |" + " --- |" * (1 + len(models)),
        ]
        for key, row in ROWS.items():
            values = " | ".join(shown(results[model].get(key, {}).get(text)) for model in models)
            lines.append(f"| {row.label} | {row.bits:g} | {values} |")
        ratios = {
            "default / better of IQ3_S and Q3_K": ("default", ("iq3_s", "q3_k")),
            "calibrated / IQ3_S": ("calibrated", ("iq3_s",)),
            "calibrated / better of both with importance matrix": ("calibrated", ("iq3_s-imatrix", "q3_k-imatrix")),
            "`--imatrix` / default": ("imatrix", ("default",)),
        }
        lines += ["", "| ratio | " + " | ".join(models) + " |", "| --- |" + " --- |" * len(models)]
        for label, (key, others) in ratios.items():
            values = " | ".join(shown(ratio(results[model], text, key, others), 3) for model in models)
            lines.append(f"| {label} | {values} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="Hugging Face folder of a small model with Llama's names")
    parser.add_argument("--novels", type=Path, required=True, help="calibration text, plain or .xz")
    parser.add_argument("--valid", type=Path, required=True, help="calibration text: WikiText's validation split")
    parser.add_argument("--test", type=Path, required=True, help="WikiText-2's test split, raw")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--tokens", type=int, default=131072, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=100, help="windows of 512 to evaluate (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", choices=tuple(TEXTS), nargs="+", default=list(TEXTS), help="default: both")
    parser.add_argument("--torch", action="store_true", help="evaluate in PyTorch instead of llama-perplexity")
    parser.add_argument("--only", choices=("model", *TWINS), help="measure one of the three now")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = {"model": args.model_dir}
    for twin in TWINS:
        models[twin] = args.work / "twins" / twin
        if not (models[twin] / "model.safetensors").exists():
            tensors, tied = read_model(args.model_dir)
            write_model(make_twin(tensors, twin, 6, 0, tied), args.model_dir, models[twin])
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in models.items():
        found = args.work / name / "results.json"
        results[name] = json.loads(found.read_text()) if found.exists() else {}
        if args.only in (None, name):
            measure(args.work / name, model, args, results[name])
    print(tables(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
