"""A GGUF file of a model as a Hugging Face folder with float16 weights, by Transformers' own reading of such files.

A file without an output matrix of its own gives a checkpoint with tied embeddings, one with it an untied one, whatever
the published checkpoint was: quantized, the two matrices are not the same any more.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from gguf_itq3s.base.errors import UserError

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf
import numpy as np
import torch
import transformers
from sentencepiece import sentencepiece_model_pb2

#: Rows of a matrix that are compared after decoding.
_COMPARED: Final = 16
#: Metadata that has to survive beside the numbers of the architecture.
_KEPT: Final = ("tokenizer.ggml.model", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template")


def decode(source: Path, folder: Path) -> None:
    """Write the folder; it appears when it is whole.

    Args:
        source: GGUF file, of a model that Transformers reads.
        folder: to be written: config, tokenizer with its chat template, ``model*.safetensors`` in float16.

    Raises:
        UserError: Transformers cannot read the file.
    """
    transformers.logging.set_verbosity_error()
    remedy = "take a model that Transformers reads from GGUF, or its Hugging Face folder"
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float16
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise UserError(source, f"Transformers cannot read it ({error})", remedy) from error
    model.to(torch.float16)
    # Decoded, it is an ordinary model; Transformers would refuse to save what it holds for quantized.
    model.hf_quantizer = None
    model.config.name_or_path = ""
    for holder in (model, model.config):
        for name in ("quantization_method", "is_quantized", "quantization_config"):
            vars(holder).pop(name, None)
    model.config.architectures = [type(model).__name__]
    save(model, tokenizer, folder, sentencepiece_of(source))


def sentencepiece_of(source: Path) -> bytes | None:
    """The SentencePiece model of a GGUF file, which Transformers makes another kind of tokenizer of; None without."""
    fields = gguf.GGUFReader(source).fields
    if fields["tokenizer.ggml.model"].contents() != "llama":
        return None
    proto: Any = sentencepiece_model_pb2.ModelProto()
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        proto.pieces.add(piece=token, score=score, type=kind)  # GGUF's kinds are those of SentencePiece
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True  # BPE
    prefix = fields.get("tokenizer.ggml.add_space_prefix")
    proto.normalizer_spec.add_dummy_prefix = prefix is None or bool(prefix.contents())
    proto.normalizer_spec.remove_extra_whitespaces = False
    written: bytes = proto.SerializeToString()
    return written


def save(model: Any, tokenizer: Any, folder: Path, sentencepiece: bytes | None = None) -> None:
    """Write a Hugging Face folder that names no place; it appears when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch, folder.name)
        model.save_pretrained(whole, max_shard_size="1GB")
        tokenizer.save_pretrained(whole)
        if sentencepiece is not None:
            (whole / "tokenizer.model").write_bytes(sentencepiece)
        _forget_places(whole)
        whole.replace(folder)


def _forget_places(folder: Path) -> None:
    """Take out of the JSON files where the model was read from."""
    for path in folder.glob("*config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "name_or_path")}
        if kept != config:
            path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def check(source: Path, f16: Path) -> None:
    """Compare an F16 file that was made of the decoded folder with what it was decoded from.

    Both are in llama.cpp's order, so that every tensor must be there under its name, with the first rows of its values,
    and the numbers of the architecture, the end token and the chat template be the same.

    Raises:
        UserError: they differ.
    """
    published, made = gguf.GGUFReader(source), gguf.GGUFReader(f16)
    remedy = "another version of Transformers may read it rightly; please report it"
    ours = {tensor.name: tensor for tensor in made.tensors}
    theirs = {tensor.name: tensor for tensor in published.tensors}
    if ours.keys() != theirs.keys():
        differing = sorted(ours.keys() ^ theirs.keys())
        raise UserError(f16, f"has not the tensors of {source.name}: {', '.join(differing[:4])}", remedy)
    for name, tensor in theirs.items():
        if list(tensor.shape) != list(ours[name].shape):
            raise UserError(f16, f"has the shape {list(ours[name].shape)}, not {list(tensor.shape)}", remedy, name)
        values = [
            np.asarray(gguf.quants.dequantize(np.atleast_2d(t.data)[:_COMPARED], t.tensor_type), dtype=np.float32)
            for t in (tensor, ours[name])
        ]
        if not np.array_equal(values[0].astype(np.float16), values[1].astype(np.float16)):
            raise UserError(f16, f"has other values than {source.name}", remedy, name)
    arch = published.fields["general.architecture"].contents()
    for key, field in published.fields.items():
        if not key.startswith(f"{arch}.") and key not in _KEPT:
            continue
        value, other = field.contents(), made.fields[key].contents() if key in made.fields else None
        same = bool(np.isclose(value, other)) if isinstance(value, float) and other is not None else value == other
        if not same and key != f"{arch}.vocab_size":
            raise UserError(f16, f"has {other!r:.60} for {key}, {source.name} {value!r:.60}", remedy)
