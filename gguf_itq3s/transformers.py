"""ITQ3_S and ternary weights in Transformers: models that are quantized while they load, and GGUF files kept packed.

    from gguf_itq3s.transformers import ITQ3SConfig
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=ITQ3SConfig())

Importing this module registers the quantization method ``itq3_s`` with Transformers, which the ``config.json`` of a
saved model names too. Adapters are trained by PEFT as it is: to it the layers are linear layers.
"""

from transformers import __version__ as _version

_LEAST = (5, 23)  # those before leave packed weights that they have loaded at zero

try:
    if tuple(int(part) for part in _version.split(".")[:2]) < _LEAST:
        raise ImportError(f"this is {_version}")
    from .torch.config import ITQ3SConfig
    from .torch.load_gguf import load_gguf
    from .torch.quantizer import ITQ3SQuantizer
except ImportError as error:
    raise ImportError(
        f"gguf_itq3s.transformers needs transformers 5.23 or later ({error}); pip install -U transformers"
    ) from error

__all__ = ["ITQ3SConfig", "ITQ3SQuantizer", "load_gguf"]
