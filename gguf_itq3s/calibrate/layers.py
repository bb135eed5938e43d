"""A Hugging Face model that runs layer by layer: at any time one layer's weights are in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ..base.errors import UserError
from ..checkpoint import tokens
from ..checkpoint.patches import patched
from ..checkpoint.source import Checkpoint
from ..checkpoint.weights import Parameters
from .activations import activations, complete
from .inputs import Layout
from .options import BY_IMATRIX, CalibrationOptions
from .ranks import ALONE, Ranks
from .shared import KEYWORD, SharedStates

#: What layers are given to keep keys, values and states in, by name.
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


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
        causal = checkpoint.writer.kv_data[0].get(f"{checkpoint.model.arch}.attention.causal")
        if causal is not None and not causal.value:
            what = (
                f"is no language model that goes from left to right ({checkpoint.model.arch}), and cannot be calibrated"
            )
            raise UserError(options.model, what, BY_IMATRIX)
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
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(options.model, f"transformers cannot run it: {reason}", "update transformers") from error
        self.blocks, self.prefix = blocks_of(self.model, options.model)
        self.layers, self.hidden = len(self.blocks), int(self.config.hidden_size)
        # Norms and biases are few numbers and stay in float32.
        for parameter in self.blocks.parameters() if self.in_bfloat16 else ():
            if parameter.ndim > 1:
                parameter.data = parameter.data.to(torch.bfloat16)
        self.context = int(getattr(self.config, "max_position_embeddings", 2048))
        self.arch = checkpoint.model.arch
        self.weights = Parameters(checkpoint.weights, self.model)
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self.layout = Layout(self.arch, self.prefix, self.layers, self._tensors, self.weights)
        self._computed = self._compute()
        names = {module: name for name, module in self.model.named_modules()}
        ends = (names.get(end) for end in (self.model.get_output_embeddings(), self.model.get_input_embeddings()))
        output, embedding = (f"{name}.weight" for name in ends)
        self._tied = {output: embedding, **getattr(self.model, "all_tied_weights_keys", {})}
        self._outputs = 0  # the length of the tuple that a layer puts out; 0 where it is no tuple

    def gain(self, norm: str) -> np.ndarray:
        """The gain of a norm by its GGUF name, float32 (n,)."""
        return self._tensors[norm].vector()

    def start(
        self, folder: Path, windows: np.ndarray, batches: Sequence[slice | np.ndarray], done: int, rows:
        tuple[np.ndarray, np.ndarray] | None = None,
    ) -> list[Keywords]:  # fmt: skip
        """Write the inputs of the first layer, unless layers are done, and find out what each layer is called with.

        Args:
            rows: tokens (n,) and what stands in their rows of the embedding instead, float32 (n, hidden).

        Returns:
            For each layer the keyword arguments besides the activations: masks, positions.

        Raises:
            UserError: the checkpoint lacks the embedding, or that has no row for a token of the text.
        """
        embedding = self.model.get_input_embeddings()
        if (last := int(windows.max())) >= len(embedding.weight):
            token = {last: tokens.beyond(self.folder, last).get(last, "")}
            what = f"has {len(embedding.weight)} rows of its embedding, and the text the token {tokens.named(token)}"
            remedy = "take the tokenizer files of the model, or leave that token out of the text"
            raise UserError(self.folder, what, remedy)
        outside = self._outside(self.model.get_output_embeddings())
        self._fill(outside)
        if rows is not None:
            with torch.no_grad():
                embedding.weight[torch.from_numpy(rows[0])] = torch.from_numpy(rows[1]).to(self.device)
        dtype = torch.bfloat16 if self.in_bfloat16 else torch.float32
        states = dtype if getattr(self.config, "num_kv_shared_layers", 0) else None
        keywords = [Keywords(len(windows), self.device, states) for _ in range(self.layers)]
        shape = (*windows.shape, self.hidden)
        target = None if done else activations(folder, 0, shape, "w+", self.dtype, partial=True)
        first: list[torch.Tensor] = []

        def catch(number: int) -> Any:
            own = inspect.signature(self.blocks[number].forward)

            def forward(*args: Any, **kwargs: Any) -> Any:
                found = own.bind(*args, **kwargs)
                hidden = next(iter(found.arguments.values()))
                if number == 0:
                    if hidden.ndim != 3:
                        what = "cannot be calibrated: its layers put out more than one stream"
                        raise UserError(self.folder, what, BY_IMATRIX)
                    first.append(hidden)
                if hidden.shape != first[-1].shape:
                    raise _OtherFormError
                keywords[number].add(here, _besides(own, found), hidden)
                if number + 1 == self.layers:
                    raise Stop
                return self._put_out(hidden)

            return forward

        forwards = {layer: catch(number) for number, layer in enumerate(self.blocks)}
        with replaced(forwards), torch.no_grad():  # the arguments are used with gradients too
            for batch in batches:
                if done and all(of.has(len(windows[batch])) for of in keywords):
                    continue
                here, tokens_here = batch, torch.from_numpy(windows[batch]).to(self.device)
                for outputs in dict.fromkeys((self._outputs, 0, 1, 2)):
                    self._outputs = outputs
                    try:
                        with suppress(Stop):
                            self.model(input_ids=tokens_here, use_cache=False)
                        break
                    except (_OtherFormError, ValueError) as error:  # too many to unpack
                        first.clear()
                        problem = error
                else:
                    what, remedy = f"transformers cannot run it: {problem}", "update transformers"
                    raise UserError(self.folder, what, remedy) from problem
                hidden = first.pop()
                if target is not None:
                    target[batch] = hidden.float().cpu().numpy()
        if target is not None:
            complete(target, folder, 0, self.dtype)
        self._forget(outside)
        return keywords

    def load(self, number: int) -> torch.nn.Module:
        """One layer with its weights on the device: in float32, or its matrices in bfloat16."""
        layer = self.blocks[number]
        self._fill({f"{self.prefix}.{number}.{path}".rstrip("."): module for path, module in layer.named_modules()})
        return layer

    def unload(self, number: int) -> None:
        """Forget a layer's weights."""
        self.blocks[number].to("meta")

    def step(self, layer: torch.nn.Module, hidden: np.ndarray, keywords: dict[str, Any]) -> np.ndarray:
        """Run a layer on float32 (windows, context, hidden)."""
        with torch.inference_mode(), self.products():
            out = layer(torch.from_numpy(np.array(hidden)).to(self.device), **keywords)
        self._outputs = len(out) if isinstance(out, tuple) else 0
        return (out[0] if self._outputs else out).float().cpu().numpy()

    def _put_out(self, hidden: torch.Tensor) -> Any:
        """Activations as a layer of the model puts them out."""
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden

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
        outside = self._outside(embedding)
        self._fill(outside)
        if weights is not None:
            with torch.no_grad():
                rest = output.weight
                for rows in weights:
                    rest[: len(rows)].copy_(torch.from_numpy(rows))
                    rest = rest[len(rows) :]
                assert not len(rest)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(hidden.shape, device=self.device)
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
            behind = dict.fromkeys(self.blocks, lambda *_, **__: self._put_out(hidden))
            with replaced({embedding: lambda *_, **__: zeros, **behind}):
                return self.model(input_ids=ids, use_cache=False).logits

        try:
            yield logits
        finally:
            self._forget(outside)

    def _compute(self) -> dict[str, torch.Tensor]:
        """The tables that the model computes and no checkpoint has, by name, as its own initialization makes them."""
        names = [name for name, _ in self.model.named_buffers() if name not in self.model.state_dict()]
        places = [(self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        on_meta = [module._buffers[name] for module, name in places]
        for (module, name), buffer in zip(places, on_meta, strict=True):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        self.model.initialize_weights()  # of parameters on the meta device, nothing
        found = {whole: module._buffers[name] for whole, (module, name) in zip(names, places, strict=True)}
        for (module, name), buffer in zip(places, on_meta, strict=True):
            module._buffers[name] = buffer
        return found

    def _outside(self, without: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The modules that belong to no layer, by name, but for one."""
        inside = f"{self.prefix}."
        named = self.model.named_modules()
        return {name: module for name, module in named if not name.startswith(inside) and module is not without}

    def _fill(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Give modules, by their names in the model, what is theirs alone: weights, and tables that are computed."""
        for prefix, module in modules.items():
            own = {**module._parameters, **module._buffers}
            if not any(tensor is not None for tensor in own.values()):
                continue
            module.to_empty(device=self.device, recurse=False)
            for name, tensor in {**module._parameters, **module._buffers}.items():
                whole = f"{prefix}.{name}".lstrip(".")
                if tensor is None:
                    continue
                with torch.no_grad():
                    if whole in self._computed:
                        tensor.copy_(self._computed[whole])
                    else:
                        whole = whole if self.weights.has(whole) else self._tied.get(whole, whole)
                        tensor.copy_(self.weights.get(whole, tensor.shape))

    def _forget(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Take the weights of modules from memory; those that compute tables keep them."""
        for module in modules.values():
            if any(parameter is not None for parameter in module._parameters.values()):
                module._apply(lambda tensor: tensor.to("meta"), recurse=False)


class Keywords:
    """What a layer is called with besides activations: the same for all batches of a size, something for every token
    (Gemma's inputs of a layer, from the embeddings of the model as it is), or what other layers have put out, in
    ``states``, None where no layer reads that."""

    def __init__(self, windows: int, device: torch.device, states: torch.dtype | None) -> None:
        self._windows, self._device, self._states = windows, device, states
        self._by_size: dict[int, dict[str, Any]] = {}
        self._of_tokens: dict[str, np.ndarray] = {}

    def add(self, batch: slice | np.ndarray, keywords: dict[str, Any], hidden: torch.Tensor) -> None:
        """Those of a batch whose activations are ``hidden``, (windows, context, n)."""
        kept = {}
        for name, value in keywords.items():
            of_tokens = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3
            if of_tokens and value.shape[:2] == hidden.shape[:2]:
                shape = (self._windows, *value.shape[1:])
                self._of_tokens.setdefault(name, np.zeros(shape, dtype=np.float32))[batch] = value.float().cpu().numpy()
            else:
                kept[name] = value
        self._by_size[hidden.shape[0]] = kept

    def has(self, size: int) -> bool:
        """Whether those of all batches of a size are known."""
        return size in self._by_size and not self._of_tokens

    @contextmanager
    def of(self, batch: np.ndarray, folder: Path) -> Iterator[dict[str, Any]]:
        """Those of some windows while a layer runs on them; ``folder`` has what layers of the same stream share."""
        kept = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in self._by_size[len(batch)].items()
        }
        of_tokens = {name: array[batch] for name, array in self._of_tokens.items() if name not in kept}
        kept |= {name: torch.from_numpy(values).to(self._device) for name, values in of_tokens.items()}
        if self._states is None or KEYWORD not in kept:
            yield kept
            return
        kept[KEYWORD] = states = SharedStates(folder, self._windows, batch, self._device, self._states)
        try:
            yield kept
        finally:  # a layer may have run as far as was wanted
            states.keep()


class _OtherFormError(Exception):
    """A model takes what its layers put out for something else."""


def _besides(signature: inspect.Signature, found: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a layer besides the first, by name, without caches."""
    _, *others = found.arguments.items()
    kinds = signature.parameters
    keywords: dict[str, Any] = {}
    for name, value in others:
        keywords |= value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    keywords = {name: value for name, value in keywords.items() if name not in _CACHES}
    return {**keywords, "use_cache": False} if "use_cache" in keywords else keywords


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


def blocks_of(model: Any, folder: Path) -> tuple[torch.nn.ModuleList, str]:
    """The layers of a model, and the name of their list.

    Raises:
        UserError: it has none.
    """
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module, name
    what = f"has no list of {count} layers that run one after the other in transformers"
    raise UserError(folder, what, BY_IMATRIX)


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
