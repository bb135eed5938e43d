"""A Hugging Face model that runs layer by layer: at any time one layer's weights are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import UserError
from ..checkpoint import tokens
from ..checkpoint.patches import patched
from ..checkpoint.source import Checkpoint
from .activations import activations, complete
from .inputs import Layout
from .options import CalibrationOptions
from .ranks import ALONE, Ranks


class Stop(Exception):  # noqa: N818 (a signal, not an error)
    """Raised by a hook, ends a forward pass of which the rest is not wanted; who asked for the pass suppresses it."""


class LayeredModel:
    """A Hugging Face model whose layers are loaded one at a time.

    Args:
        ranks: those that run the same layers, all in the same precision.

    Attributes:
        hidden: width of the activations between them.
        dtype: what activations are kept in between layers, by name.
        in_bfloat16: whether the matrices of layers are in bfloat16, and products with them.
        layout: names of its modules and tensors.
    """

    def __init__(self, options: CalibrationOptions, checkpoint: Checkpoint, ranks: Ranks = ALONE) -> None:
        self.folder, self.device, self.checkpoint = options.model, torch_device(options), checkpoint
        self.dtype = options.dtype
        self.in_bfloat16 = ranks.all(self.dtype == "bfloat16" and quick_bfloat16(self.device))
        try:
            with patched(options.model, options.trust_remote_code) as transformers, torch.device("meta"):
                # Of a multimodal model the text model alone, under whose names the checkpoint's weights are.
                self.config = transformers.AutoConfig.from_pretrained(options.model).get_text_config()
                model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
                # Gradients are of activations alone: that of the output matrix is as large as it is.
                self.model = model.eval().requires_grad_(False)
        except UserError:
            raise
        except Exception as error:  # a config can be wrong in many ways
            raise UserError(options.model, f"transformers cannot run it: {error}", "update transformers") from error
        self.base, self.prefix = decoder_of(self.model)
        self.layers, self.hidden = len(self.base.layers), int(self.config.hidden_size)
        # Norms and biases are few numbers and stay in float32.
        for parameter in self.base.layers.parameters() if self.in_bfloat16 else ():
            if parameter.ndim > 1:
                parameter.data = parameter.data.to(torch.bfloat16)
        self.context = int(getattr(self.config, "max_position_embeddings", 2048))
        self.arch = checkpoint.model.arch
        self.weights = checkpoint.weights
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self.layout = Layout(self.arch, self.layers, self.prefix, self._tensors)

    def gain(self, norm: str) -> np.ndarray:
        """The gain of a norm by its GGUF name, float32 (n,)."""
        return self._tensors[norm].vector()

    def start(
        self, folder: Path, windows: np.ndarray, batches: Sequence[slice | np.ndarray], done: int, rows:
        tuple[np.ndarray, np.ndarray] | None = None,
    ) -> list[dict[int, dict[str, Any]]]:  # fmt: skip
        """Write the inputs of the first layer, unless layers are done, and find out what each layer is called with.

        Args:
            rows: tokens (n,) and what stands in their rows of the embedding instead, float32 (n, hidden).

        Returns:
            For each layer and batch size the keyword arguments besides the activations: masks, positions.

        Raises:
            UserError: the checkpoint lacks the embedding, or that has no row for a token of the text.
        """
        embedding = self.model.get_input_embeddings()
        if (last := int(windows.max())) >= len(embedding.weight):
            token = {last: tokens.beyond(self.folder, last).get(last, "")}
            what = f"has {len(embedding.weight)} rows of its embedding, and the text the token {tokens.named(token)}"
            remedy = "take the tokenizer files of the model, or leave that token out of the text"
            raise UserError(self.folder, what, remedy)
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        embedding.to_empty(device=self.device)
        if hasattr(embedding, "scalar_embed_scale"):  # Gemma's factor, kept as a buffer too
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=self.device)
        self._fill(embedding, name)
        if rows is not None:
            with torch.no_grad():
                embedding.weight[torch.from_numpy(rows[0])] = torch.from_numpy(rows[1]).to(self.device)
        self._make_buffers()
        keywords: list[dict[int, dict[str, Any]]] = [{} for _ in range(self.layers)]
        shape = (*windows.shape, self.hidden)
        target = None if done else activations(folder, 0, shape, "w+", self.dtype, partial=True)
        first: list[torch.Tensor] = []

        def catch(number: int) -> Any:
            def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                kwargs.pop("past_key_values", None)
                keywords[number][hidden_states.shape[0]] = {**kwargs, "use_cache": False}
                if number == 0:
                    first.append(hidden_states)
                if number + 1 == self.layers:
                    raise Stop
                return hidden_states

            return forward

        forwards = {layer: catch(number) for number, layer in enumerate(self.base.layers)}
        with replaced(forwards), torch.no_grad():  # the arguments are used with gradients too
            for batch in batches:
                if done and len(windows[batch]) in keywords[0]:
                    continue
                with suppress(Stop):
                    self.model(input_ids=torch.from_numpy(windows[batch]).to(self.device), use_cache=False)
                hidden = first.pop()
                if target is not None:
                    target[batch] = hidden.float().cpu().numpy()
        if target is not None:
            complete(target, folder, 0, self.dtype)
        embedding.to("meta")
        return keywords

    def load(self, number: int) -> torch.nn.Module:
        """One layer with its weights on the device: in float32, or its matrices in bfloat16."""
        layer = self.base.layers[number]
        layer.to_empty(device=self.device)
        self._fill(layer, f"{self.prefix}.{number}")
        return layer

    def unload(self, number: int) -> None:
        """Forget a layer's weights."""
        self.base.layers[number].to("meta")

    def step(self, layer: torch.nn.Module, hidden: np.ndarray, keywords: dict[str, Any]) -> np.ndarray:
        """Run a layer on float32 (windows, context, hidden)."""
        with torch.inference_mode(), self.products():
            out = layer(torch.from_numpy(np.array(hidden)).to(self.device), **keywords)
        return (out[0] if isinstance(out, tuple) else out).float().cpu().numpy()

    def products(self, *, quick: bool = True) -> AbstractContextManager[object]:
        """A context in which products are in bfloat16 where the model runs in it; the residual stream stays in float32.
        Not ``quick`` within it: for what is not of the model, such as sums over its activations."""
        if not self.in_bfloat16:
            return nullcontext()
        # The cache is for weights in float32, which there are none of.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=quick, cache_enabled=False)

    @property
    def form(self) -> dict[str, str]:
        """By name, what precision decides the result; empty for float32, of which earlier versions know nothing."""
        if self.dtype == "float32":
            return {}
        return {"dtype": self.dtype, "products": "bfloat16" if self.in_bfloat16 else "float32"}

    @contextmanager
    def head(self, weights: Iterable[np.ndarray] | None = None) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """What comes behind the last layer, as long as the context lasts: (windows, context, hidden) -> logits.

        Args:
            weights: float32, the rows of the output matrix in place of the model's, some after the others.
        """
        output, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        names = {module: name for name, module in self.model.named_modules()}
        norms = [module for _, module in self.base.named_children() if "norm" in names[module]]
        for module in (output, *norms):
            module.to_empty(device=self.device)
            tied = module is output and not self.weights.has(f"{names[module]}.weight")
            if module is output and weights is not None:
                with torch.no_grad():
                    rest = module.weight
                    for rows in weights:
                        rest[: len(rows)].copy_(torch.from_numpy(rows))
                        rest = rest[len(rows) :]
                    assert not len(rest)
            else:
                self._fill(module, names[embedding] if tied else names[module])

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(hidden.shape, device=self.device)
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
            behind = dict.fromkeys(self.base.layers, lambda *_, **__: hidden)
            with replaced({embedding: lambda *_, **__: zeros, **behind}):
                return self.model(input_ids=ids, use_cache=False).logits

        try:
            yield logits
        finally:
            for module in (output, *norms):
                module.to("meta")

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.weights.get(f"{prefix}.{name}", parameter.shape))
        if stray := [name for name, _ in module.named_buffers() if name != "embed_scale"]:
            what = f"a layer keeps {stray[0]} outside its weights, which is not handled"
            raise UserError(self.folder, what, "use an importance matrix of llama-imatrix (convert --imatrix)", prefix)

    def _make_buffers(self) -> None:
        """Build the modules with computed tables (rotary positions) again, off the meta device."""
        for name, module in list(self.base.named_children()):
            buffers = [buffer for _, buffer in module.named_buffers()]
            if buffers and not list(module.parameters()) and all(buffer.is_meta for buffer in buffers):
                setattr(self.base, name, type(module)(config=self.config).to(self.device))


@contextmanager
def replaced(forwards: Mapping[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with other functions in place of their forward passes."""
    own = {module: module.forward for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in own.items():
            module.forward = forward


def decoder_of(model: Any) -> tuple[Any, str]:
    """The module of a model that has its layers, and the name of their list."""
    base = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    return base, next(name for name, module in model.named_modules() if module is base.layers)


def torch_device(options: CalibrationOptions) -> torch.device:
    """The torch device, once it has held a number; UserError if torch cannot use it."""
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        what = f"cannot be calibrated on --device {options.device}: {error}"
        raise UserError(options.model, what, "give cpu, or a device of this machine's torch such as cuda") from error
    return device


@contextmanager
def quick_products() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices in place of MKL, which uses AVX-512 on Intel's processors alone.

    PyTorch hands float32 products to oneDNN where they may be less precise than float32. oneDNN makes them less precise
    where the processor has tiles for bfloat16 (AMX), so nothing is changed there; elsewhere they are in float32, on
    Zen 5 in half of MKL's time.
    """
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if has_tiles is None or has_tiles() or not hasattr(matmul, "fp32_precision"):
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def quick_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices quicker than float32 ones.

    Of CPUs, those with tiles for it (AMX) or with AVX512-BF16; others convert every number. Of other devices than GPUs
    with CUDA or ROCm nothing is known.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return device.type == "cpu" and any(check is not None and check() for check in checks)
