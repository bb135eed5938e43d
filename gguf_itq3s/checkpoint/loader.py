"""llama.cpp's library on a GGUF file, weights unread: a program of its own, for it may abort or ask for memory.

    python loader.py LIBLLAMA FILE < QUESTION

The question is a JSON object: an empty one asks whether the loader takes the file, one with ``file_type`` which types
llama-quantize would give its tensors (:func:`quantize`). The answer is one line of JSON: ``{"ready": false}`` where the
library is not the one described here, ``{"ready": true, "error": TEXT, "log": TEXT}`` with what the library says of the
file, an error without text where it takes it. A library that aborts gives no such line but ``{"ready": true}`` first.

Only the standard library is imported here: the start is a third of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys

_ERROR = 4  # enum ggml_log_level
_GIVEN = 8  # enum ggml_type: Q8_0, which every row can be given
#: Bytes of address space beside the file: far more than any vocabulary and list of tensors need.
_MEMORY = 16 << 30


class ModelParams(ctypes.Structure):
    """``struct llama_model_params`` of the pinned llama.h."""

    _fields_ = [
        ("devices", ctypes.c_void_p), ("tensor_buft_overrides", ctypes.c_void_p), ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int), ("load_mode", ctypes.c_int), ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32), ("tensor_split", ctypes.c_void_p), ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p), ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool), ("check_tensors", ctypes.c_bool), ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool), ("no_alloc", ctypes.c_bool), ("load_mtp", ctypes.c_bool),
    ]  # fmt: skip


#: What the pinned llama.cpp sets by default: another layout of the structure would hardly show the same.
_DEFAULTS = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1,
    "lazy_mode": 1, "main_gpu": 0, "tensor_split": None, "progress_callback": None,
    "progress_callback_user_data": None, "kv_overrides": None, "vocab_only": False, "check_tensors": False,
    "use_extra_bufts": True, "no_host": False, "no_alloc": False, "load_mtp": False,
}  # fmt: skip


class QuantizeParams(ctypes.Structure):
    """``struct llama_model_quantize_params`` of the pinned llama.h."""

    _fields_ = [
        ("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int), ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool), ("only_copy", ctypes.c_bool), ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool), ("dry_run", ctypes.c_bool), ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p), ("tt_overrides", ctypes.c_void_p), ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    ]  # fmt: skip


class Override(ctypes.Structure):
    """``struct llama_model_tensor_override``."""

    _fields_ = [("pattern", ctypes.c_char_p), ("type", ctypes.c_int)]


class Importance(ctypes.Structure):
    """``struct llama_model_imatrix_data``."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


#: As :data:`_DEFAULTS`.
_QUANTIZE_DEFAULTS = {
    "nthread": 0, "ftype": 7, "allow_requantize": False, "quantize_output_tensor": True, "only_copy": False,
    "pure": False, "keep_split": False, "dry_run": False, "imatrix": None, "kv_overrides": None, "tt_overrides": None,
    "prune_layers": None, "max_buf_size": 8 << 30,
}  # fmt: skip


def main(library: str, path: str) -> None:
    """Load the metadata and the shapes of a file and print the answer."""
    question = json.load(sys.stdin)
    said: list[tuple[int, str]] = []
    _limit_memory(os.path.getsize(path) if question else 0)

    def note(level: int, text: bytes, _data: object) -> None:
        said.append((level, text.decode("utf-8", "replace")))

    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(note)

    try:
        llama = ctypes.CDLL(library)
        llama.llama_model_default_params.restype = ModelParams
        llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        llama.llama_model_load_from_file.restype = ctypes.c_void_p
        llama.llama_model_quantize_default_params.restype = QuantizeParams
        llama.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(QuantizeParams)]
        llama.llama_model_quantize.restype = ctypes.c_uint32
        llama.llama_log_set(log, None)
        if not llama.ggml_backend_dev_count():  # backends are plug-ins, beside the library
            llama.ggml_backend_load_all_from_path(os.fsencode(os.path.dirname(os.path.abspath(library))))
        params, quantization = llama.llama_model_default_params(), llama.llama_model_quantize_default_params()
    except (OSError, AttributeError):
        ready = False
    else:
        pairs = ((params, _DEFAULTS), (quantization, _QUANTIZE_DEFAULTS))
        ready = all(getattr(found, name) == value for found, values in pairs for name, value in values.items())
    print(json.dumps({"ready": ready}), flush=True)
    if not ready:
        return
    if question:
        good = quantize(llama, path, quantization, **question)
    else:
        good = load(llama, path, params)
    error = "" if good else _reason([text for level, text in said if level == _ERROR])
    text = "".join(text for _, text in said) if question else ""
    print(json.dumps({"ready": True, "error": error, "log": text}), flush=True)
    os._exit(0)  # nothing is left to be freed in order


def load(llama: ctypes.CDLL, path: str, params: ModelParams) -> bool:
    """Whether the loader takes a file."""
    none = (ctypes.c_void_p * 1)()  # the list of devices, which ends at once: the processor alone
    params.devices = ctypes.addressof(none)
    params.n_gpu_layers, params.load_mode, params.no_alloc = 0, 0, True
    params.use_extra_bufts = False
    return bool(llama.llama_model_load_from_file(os.fsencode(path), params))


def quantize(
    llama: ctypes.CDLL, path: str, params: QuantizeParams, *, file_type: int, statistics: bool,
    given: list[str], pruned: list[int],
) -> bool:  # fmt: skip
    """Let llama-quantize choose types and say them in its log; nothing is written.

    Args:
        llama: the library.
        path: the file.
        params: the defaults.
        file_type: ``enum llama_ftype``.
        statistics: whether it is to believe that there is an importance matrix.
        given: patterns of the names of tensors whose type is given, and of no matter here.
        pruned: layers that are left out.

    Returns:
        Whether it could.
    """
    overrides = (Override * (len(given) + 1))(*[Override(pattern.encode(), _GIVEN) for pattern in given])
    importance = (Importance * 2)(Importance(b"any", None, 0))
    layers = (ctypes.c_int32 * (len(pruned) + 1))(*pruned, -1)
    params.ftype, params.nthread, params.dry_run = file_type, 1, True
    params.tt_overrides = ctypes.addressof(overrides)
    params.imatrix = ctypes.addressof(importance) if statistics else None
    params.prune_layers = ctypes.addressof(layers)
    return not llama.llama_model_quantize(os.fsencode(path), b"", params)


def _limit_memory(mapped: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MEMORY + mapped
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _reason(said: list[str]) -> str:
    """The sentence of the library's errors that says why, without the names of its functions."""
    lines = [line.strip() for line in said if line.strip()]
    chosen = next((line for line in lines if "error loading model" in line), lines[0] if lines else "no reason given")
    reason = chosen.rpartition("error loading model: ")[2].rpartition("failed to quantize: ")[2]
    return reason.removeprefix("check_tensor_dims: ")


if __name__ == "__main__":
    main(*sys.argv[1:])
