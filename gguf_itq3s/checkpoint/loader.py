"""llama.cpp's own loader on a GGUF file, weights unread: a program of its own, for it may abort or ask for memory.

    python loader.py LIBLLAMA FILE

The answer is one line of JSON: ``{"ready": false}`` where the library is not the one described here, ``{"ready": true,
"error": TEXT}`` with what the loader says of the file, an empty text where it takes it. A loader that aborts gives no
such line but ``{"ready": true}`` first.

Only the standard library is imported here: the start is a third of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys

_ERROR = 4  # enum ggml_log_level
#: Bytes of address space: far more than any vocabulary and list of tensors need.
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


def main(library: str, path: str) -> None:
    """Load the metadata and the shapes of a file and print the answer."""
    said: list[str] = []
    _limit_memory()

    def note(level: int, text: bytes, _data: object) -> None:
        if level == _ERROR:
            said.append(text.decode("utf-8", "replace"))

    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(note)

    try:
        llama = ctypes.CDLL(library)
        llama.llama_model_default_params.restype = ModelParams
        llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        llama.llama_model_load_from_file.restype = ctypes.c_void_p
        llama.llama_log_set(log, None)
        if not llama.ggml_backend_dev_count():  # backends are plug-ins, beside the library
            llama.ggml_backend_load_all_from_path(os.fsencode(os.path.dirname(os.path.abspath(library))))
        params = llama.llama_model_default_params()
    except (OSError, AttributeError):
        ready = False
    else:
        ready = all(getattr(params, name) == value for name, value in _DEFAULTS.items())
    print(json.dumps({"ready": ready}), flush=True)
    if not ready:
        return
    none = (ctypes.c_void_p * 1)()  # the list of devices, which ends at once: the processor alone
    params.devices = ctypes.addressof(none)
    params.n_gpu_layers, params.load_mode, params.no_alloc = 0, 0, True
    params.use_extra_bufts = False
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    error = "" if model else _reason(said)
    print(json.dumps({"ready": True, "error": error}), flush=True)
    os._exit(0)  # nothing is left to be freed in order


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (_MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most), most)
        )


def _reason(said: list[str]) -> str:
    """The sentence of the loader's log that says why, without the names of its functions."""
    lines = [line.strip() for line in said if line.strip()]
    chosen = next((line for line in lines if "error loading model" in line), lines[0] if lines else "no reason given")
    return chosen.rpartition("error loading model: ")[2].removeprefix("check_tensor_dims: ")


if __name__ == "__main__":
    main(*sys.argv[1:])
