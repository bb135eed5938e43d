"""Collect the rotated Hessians of a model's layers: the command ``gguf-itq3s calibrate``.

The Hugging Face model runs layer by layer. At any time one layer's weights and statistics are in memory; the
activations between layers are files in the output folder, which is also where an interrupted run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..checkpoint.reader import Checkpoint
    from .store import Manifest

DESCRIPTION: Final = "Collect the second moments of a model's activations, for calibrated conversion to ITQ3_S."
FORMS: Final = ("full", "block")
#: Widest input whose full Hessian is collected by default.
FULL_COLUMNS: Final = 8192
# Characters of text for each token of a window: more than any tokenizer needs on average.
_CHARACTERS: Final = 8


@dataclass(frozen=True)
class Options:
    """What to collect; the fields are the options of the command.

    Attributes:
        model: a local Hugging Face folder with safetensors weights.
        text: files of text, plain or xz; windows are taken from all of them alike.
        out: the folder to write.
        tokens: about how many tokens are run.
        context: length of a window; by default the model's own, at most 2048.
        hessian: ``full``, ``block``, or None: full up to :data:`FULL_COLUMNS` columns.
        device: torch device.
        batch: windows at a time.
    """

    model: Path
    text: Sequence[Path]
    out: Path
    tokens: int = 262144
    context: int | None = None
    hessian: str | None = None
    device: str = "cpu"
    batch: int = 8

    def full(self, columns: int) -> bool:
        """Whether the full Hessian of that many columns is collected."""
        return self.hessian == "full" or (self.hessian is None and columns <= FULL_COLUMNS)


def calibrate(options: Options) -> Manifest:
    """Run the model and write the statistics.

    Returns:
        The manifest of the finished folder.

    Raises:
        UserError: the model, the text or the folder cannot be used.
        KeyboardInterrupt: interrupted; the same call continues.
    """
    from ..checkpoint import fold
    from ..checkpoint.reader import open_checkpoint
    from ..errors import UserError, output_error
    from . import store

    checkpoint = open_checkpoint(options.model)
    if checkpoint.model.arch not in fold.ARCHITECTURES:
        what = f"its architecture, {checkpoint.model.arch}, cannot be calibrated"
        raise UserError(options.model, what, "use an importance matrix of llama-imatrix (convert --imatrix)")
    model = _LayeredModel(options, checkpoint)
    windows = _windows(options, model.context)
    manifest = store.Manifest(
        model=store.model_hash(checkpoint.files),
        arch=checkpoint.model.arch,
        text=hashlib.sha256(windows.tobytes()).hexdigest(),
        tokens=int(windows.size),
        options={"context": int(windows.shape[1]), "hessian": options.hessian or "auto"},
    )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if (options.out / store.MANIFEST).exists():
            found = store.read_manifest(options.out)
            if not found.same_run(manifest):
                what = "holds a calibration of another model, text or other options"
                raise UserError(options.out, what, "choose another folder")
            manifest = found
        if not manifest.complete:
            _run(options, model, windows, manifest)
    except OSError as error:
        raise output_error(options.out, error) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues from {options.out}") from None
    return manifest


def _run(options: Options, model: _LayeredModel, windows: np.ndarray, manifest: Manifest) -> None:
    """All layers that are not done yet."""
    from safetensors.numpy import save_file
    from tqdm import tqdm

    from .store import Entry

    batches = [slice(i, i + options.batch) for i in range(0, len(windows), options.batch)]
    done = _layers_done(options.out, manifest)
    with tqdm(total=model.layers * len(batches), unit="batch", initial=done * len(batches)) as bar:
        keywords = model.start(options.out, windows, batches, done)
        for number in range(done, model.layers):
            bar.set_postfix_str(f"layer {number}", refresh=False)
            layer = model.load(number)
            collector = Collector(model, number, layer, options)
            source = _activations(options.out, number, (*windows.shape, model.hidden), "r")
            target = _activations(options.out, number + 1, (*windows.shape, model.hidden), "w+", partial=True)
            for batch in batches:
                target[batch] = model.step(layer, source[batch], keywords[number][len(target[batch])])
                bar.update()
            collector.close()
            file = f"layer-{number:04d}.safetensors"
            partial = options.out / f"{file}.partial"
            save_file(collector.statistics(), partial)
            partial.replace(options.out / file)
            target.flush()
            del source, target
            _activation_path(options.out, number + 1, partial=True).replace(_activation_path(options.out, number + 1))
            for name, (key, tokens, norm) in collector.entries().items():
                manifest.entries[name] = Entry(file, key, tokens, norm)
            manifest.complete = number + 1 == model.layers
            manifest.write(options.out)
            _activation_path(options.out, number).unlink()
            model.unload(number)
    for path in options.out.glob("activations-*"):
        path.unlink()


def _layers_done(folder: Path, manifest: Manifest) -> int:
    """How many layers are finished, with the activations behind the last one at hand."""
    files = {entry.file for entry in manifest.entries.values()}
    done = 0
    while f"layer-{done:04d}.safetensors" in files and (folder / f"layer-{done:04d}.safetensors").exists():
        done += 1
    while done and not _activation_path(folder, done).exists():
        done -= 1
    return done


def _activation_path(folder: Path, number: int, *, partial: bool = False) -> Path:
    return folder / f"activations-{number:04d}.f32{'.partial' if partial else ''}"


def _activations(folder: Path, number: int, shape: tuple[int, ...], mode: Any, *, partial: bool = False) -> np.memmap:
    """The inputs of a layer, float32 (windows, context, hidden), in a file."""
    import numpy as np

    return np.memmap(_activation_path(folder, number, partial=partial), dtype=np.float32, mode=mode, shape=shape)


# ---------------------------------------------------------------------------------------------------------- text


def _windows(options: Options, longest: int) -> np.ndarray:
    """Windows of tokens from places spread evenly over the text: int64 (windows, context)."""
    import numpy as np
    from transformers import AutoTokenizer

    from ..errors import UserError

    context = options.context or min(longest, 2048)
    if not 16 <= context <= longest:
        raise UserError(options.model, f"a context of {context} does not fit it", f"give 16 to {longest}")
    count = max(1, options.tokens // context)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows: list[list[int]] = []
    for number, path in enumerate(options.text):
        share = (count * (number + 1)) // len(options.text) - (count * number) // len(options.text)
        text = read_text(path)
        for start in np.linspace(0, max(0, len(text) - context * _CHARACTERS), share).astype(int):
            # From the next word on; a window that starts inside one is unlike anything the model has seen.
            begin = text.find(" ", start) + 1 if start else 0
            ids = tokenizer(text[begin : begin + context * _CHARACTERS]).input_ids
            if len(ids) < context:
                what = f"is too short for {share} windows of {context} tokens"
                raise UserError(path, what, "give more text, or less --tokens or --context")
            rows.append(ids[:context])
    return np.array(rows, dtype=np.int64)


def read_text(path: Path) -> str:
    """A text file, UTF-8, plain or compressed with xz.

    Raises:
        UserError: it cannot be read.
    """
    from ..errors import UserError

    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read as text: {error}", "give UTF-8 text, plain or .xz") from error


# --------------------------------------------------------------------------------------------------------- model


class _Stop(Exception):  # noqa: N818 (a signal, not an error)
    """Ends the model's forward pass behind its last layer."""


class _LayeredModel:
    """A Hugging Face model whose layers are loaded one at a time.

    Attributes:
        layers: how many.
        hidden: width of the activations between them.
        context: longest window.
        arch: ``general.architecture``.
        checkpoint: the same model as GGUF tensors.
    """

    def __init__(self, options: Options, checkpoint: Checkpoint) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from ..errors import UserError

        self.folder, self.device, self.checkpoint = options.model, torch.device(options.device), checkpoint
        self.config = AutoConfig.from_pretrained(options.model)
        try:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        except (ValueError, KeyError) as error:
            raise UserError(options.model, f"transformers cannot run it: {error}", "update transformers") from error
        self.base = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.model
        text = self.config.get_text_config()
        self.layers, self.hidden = len(self.base.layers), int(text.hidden_size)
        self.context = int(getattr(text, "max_position_embeddings", 2048))
        self.arch = checkpoint.model.arch
        self.prefix = next(name for name, module in self.model.named_modules() if module is self.base.layers)
        self.weights = _Weights(checkpoint.files)

    def start(
        self, folder: Path, windows: np.ndarray, batches: list[slice], done: int
    ) -> list[dict[int, dict[str, Any]]]:
        """Write the inputs of the first layer, unless layers are done, and find out what each layer is called with.

        Returns:
            For each layer and batch size the keyword arguments besides the activations: masks, positions.
        """
        import torch

        embedding = self.model.get_input_embeddings()
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        embedding.to_empty(device=self.device)
        if hasattr(embedding, "scalar_embed_scale"):  # Gemma's factor, kept as a buffer too
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=self.device)
        self._fill(embedding, name)
        self._make_buffers()
        keywords: list[dict[int, dict[str, Any]]] = [{} for _ in range(self.layers)]
        target = None if done else _activations(folder, 0, (*windows.shape, self.hidden), "w+", partial=True)
        first: list[torch.Tensor] = []

        def catch(number: int) -> Any:
            def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                kwargs.pop("past_key_values", None)
                keywords[number][hidden_states.shape[0]] = {**kwargs, "use_cache": False}
                if number == 0:
                    first.append(hidden_states)
                if number + 1 == self.layers:
                    raise _Stop
                return hidden_states

            return forward

        own = [layer.forward for layer in self.base.layers]
        for number, layer in enumerate(self.base.layers):
            layer.forward = catch(number)
        with torch.inference_mode():
            for batch in batches:
                if done and len(windows[batch]) in keywords[0]:
                    continue
                try:
                    self.model(input_ids=torch.from_numpy(windows[batch]).to(self.device), use_cache=False)
                except _Stop:
                    hidden = first.pop()
                    if target is not None:
                        target[batch] = hidden.float().cpu().numpy()
        for layer, forward in zip(self.base.layers, own, strict=True):
            layer.forward = forward
        if target is not None:
            target.flush()
            _activation_path(folder, 0, partial=True).replace(_activation_path(folder, 0))
        embedding.to("meta")
        return keywords

    def load(self, number: int) -> torch.nn.Module:
        """One layer with its weights, in float32 on the device."""
        layer = self.base.layers[number]
        layer.to_empty(device=self.device)
        self._fill(layer, f"{self.prefix}.{number}")
        return layer

    def unload(self, number: int) -> None:
        """Forget a layer's weights."""
        self.base.layers[number].to("meta")

    def step(self, layer: torch.nn.Module, hidden: np.ndarray, keywords: dict[str, Any]) -> np.ndarray:
        """Run a layer on float32 (windows, context, hidden)."""
        import numpy as np
        import torch

        with torch.inference_mode():
            out = layer(torch.from_numpy(np.array(hidden)).to(self.device), **keywords)
        return (out[0] if isinstance(out, tuple) else out).cpu().numpy()

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        import torch

        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.weights.get(f"{prefix}.{name}", parameter.shape))
        if stray := [name for name, _ in module.named_buffers() if name != "embed_scale"]:
            from ..errors import UserError

            what = f"a layer keeps {stray[0]} outside its weights, which is not handled"
            raise UserError(self.folder, what, "use an importance matrix of llama-imatrix (convert --imatrix)", prefix)

    def _make_buffers(self) -> None:
        """Build the modules with computed tables (rotary positions) again, off the meta device."""
        for name, module in list(self.base.named_children()):
            buffers = [buffer for _, buffer in module.named_buffers()]
            if buffers and not list(module.parameters()) and all(buffer.is_meta for buffer in buffers):
                setattr(self.base, name, type(module)(config=self.config.get_text_config()).to(self.device))


class _Weights:
    """Weights of a checkpoint by their name in the model; experts are stacked as transformers 5 wants them."""

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def get(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A tensor of the model.

        Raises:
            UserError: it is not in the checkpoint.
        """
        import torch

        if found := self._find(name):
            return self._read(found)
        experts = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if experts:
            parts = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
            stack = []
            for expert in range(shape[0]):
                names = [self._find(f"{experts[1]}.{expert}.{part}.weight") for part in parts]
                stack.append(torch.cat([self._read(found) for found in names if found]))
            return torch.stack(stack).reshape(shape)
        from ..errors import UserError

        place = next(iter(self._files.values())).parent
        raise UserError(place, "transformers wants this tensor, and the checkpoint has none of it", "update it", name)

    def _find(self, name: str) -> str | None:
        """The checkpoint's name for a tensor: the same, without the model's prefix, or Mixtral's."""
        mixtral = name.replace(".mlp.", ".block_sparse_moe.")
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            mixtral = mixtral.replace(f".{old}.weight", f".{new}.weight")
        for candidate in (
            name,
            name.removeprefix("model."),
            name.replace("model.", "language_model.model.", 1),
            mixtral,
        ):
            if candidate in self._files:
                return candidate
        return None

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)


# ---------------------------------------------------------------------------------------------------- statistics


@dataclass
class SecondMoment:
    """Running second moment of rotated activations.

    Attributes:
        columns: n, a multiple of 256.
        full: (n, n), or the diagonal blocks (n / 256, 256, 256).
        total: float64 sum of the outer products.
        tokens: how many.
    """

    columns: int
    full: bool
    total: torch.Tensor | None = None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Add activations (..., n), not rotated."""
        import torch

        from ..codec.transform import BLOCK, hadamard_matrix

        rows = x.reshape(-1, self.columns // BLOCK, BLOCK).float()
        rows = rows @ torch.from_numpy(hadamard_matrix()).to(rows)
        if self.full:
            flat = rows.reshape(-1, self.columns)
            product = flat.T @ flat
        else:
            blocks = rows.transpose(0, 1)
            product = blocks.transpose(1, 2) @ blocks
        self.total = product.double() if self.total is None else self.total.add_(product)
        self.tokens += rows.shape[0]

    def mean(self) -> np.ndarray:
        """float32 second moment; zeros where nothing was added."""
        import numpy as np

        if self.total is None:
            shape = (self.columns, self.columns) if self.full else (self.columns // 256, 256, 256)
            return np.zeros(shape, dtype=np.float32)
        return (self.total / self.tokens).float().cpu().numpy()


@dataclass
class _Group:
    """Matrices that read the same input."""

    moment: SecondMoment
    members: list[str] = field(default_factory=list)
    norm: str | None = None


class Collector:
    """Hooks on the matrices of one layer that add up their inputs.

    Matrices that read one of the two norms share its statistics, and where the norm can be folded, those are of the
    normalised input without the gain. Experts have their own.
    """

    def __init__(self, model: _LayeredModel, number: int, layer: torch.nn.Module, options: Options) -> None:
        import gguf
        import torch

        from ..checkpoint import fold

        self._options = options
        self._groups: dict[str, _Group] = {}
        self._handles: list[Any] = []
        self._plain: dict[str, torch.Tensor] = {}  # norm -> its last output without the gain
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == model.arch)
        self._names = gguf.get_tensor_name_map(arch, model.layers)
        self._tensors = {tensor.name: tensor for tensor in model.checkpoint.tensors}
        self._folding = fold.plan(model.arch, self._tensors)
        for path, module in layer.named_modules():
            name = self._gguf_name(f"{model.prefix}.{number}.{path}")
            if name in self._folding.norms:
                self._watch_norm(name, module)
            elif isinstance(module, torch.nn.Linear) and (expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)):
                self._watch_linear(self._expert_name(number, expert[3]), module, int(expert[2]))
            elif isinstance(module, torch.nn.Linear) and name in self._tensors:
                self._watch_linear(name, module, None)
            elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
                self._watch_experts(number, module)

    def statistics(self) -> dict[str, np.ndarray]:
        """The second moments by key."""
        return {key: group.moment.mean() for key, group in self._groups.items()}

    def entries(self) -> dict[str, tuple[str, int, str | None]]:
        """Matrix -> key, tokens, and the norm whose gain is left out."""
        return {
            name: (key, group.moment.tokens, group.norm)
            for key, group in self._groups.items()
            for name in group.members
        }

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _gguf_name(self, module: str) -> str:
        short = self._names.get_name(module.replace("language_model.", ""))
        return f"{short}.weight" if short else ""

    @staticmethod
    def _expert_name(number: int, part: str) -> str:
        parts = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
        return f"blk.{number}.ffn_{parts[part]}_exps.weight"

    def _group(self, name: str, columns: int, expert: int | None, norm: str | None) -> _Group:
        """The group of a matrix, made when its first member comes."""
        from .store import entry_name

        member = entry_name(name, expert)
        shared = re.sub(r"ffn_(gate|up)", "ffn_gate_up", member) if norm is None else norm
        key = f"{shared}[{expert}]" if norm and expert is not None else shared
        group = self._groups.setdefault(key, _Group(SecondMoment(columns, self._options.full(columns)), norm=norm))
        group.members.append(member)
        return group

    def _watch_norm(self, name: str, module: torch.nn.Module) -> None:
        import torch

        gain = next(iter(self._tensors[name].load()))
        effective = torch.from_numpy(gain.astype("float32")).reshape(-1)

        def normalised(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            x = args[0].float()
            epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
            if not torch.allclose(plain * effective.to(plain), out.float(), rtol=1e-3, atol=1e-4):
                raise RuntimeError(f"{name} is not an RMSNorm with the gain in the checkpoint")
            self._plain[name] = plain.reshape(-1, plain.shape[-1])

        self._handles.append(module.register_forward_hook(normalised))

    def _watch_linear(self, name: str, module: torch.nn.Module, expert: int | None) -> None:
        columns = module.in_features
        if columns % 256 or name not in self._tensors:
            return
        norm = self._folding.gain_of(name)
        group = self._group(name, columns, expert, norm if expert is None else None)
        if len(group.members) > 1:
            return
        if norm is not None and expert is not None:
            # Of an expert alone the rows are not known here; the gain is divided out again.
            group.norm = norm
            factor = self._inverse_gain(norm)
            self._handles.append(
                module.register_forward_pre_hook(lambda _, args: group.moment.add(args[0] * factor.to(args[0])))
            )
        elif norm is not None:
            self._handles.append(module.register_forward_pre_hook(lambda _, args: group.moment.add(self._plain[norm])))
        else:
            self._handles.append(module.register_forward_pre_hook(lambda _, args: group.moment.add(args[0])))

    def _inverse_gain(self, norm: str) -> torch.Tensor:
        """1 / gain; a channel with gain 0 counts as never seen."""
        import torch

        gain = torch.from_numpy(next(iter(self._tensors[norm].load())).astype("float32")).reshape(-1)
        return torch.where(gain == 0, 0.0, 1 / torch.where(gain == 0, 1.0, gain))

    def _watch_experts(self, number: int, module: Any) -> None:
        """Experts that transformers keeps as stacked parameters: (hidden, chosen experts, weights) come in."""
        import torch

        count, width = module.down_proj.shape[0], module.down_proj.shape[2]
        hidden = module.gate_up_proj.shape[2]
        gate, up, down = (self._expert_name(number, part) for part in ("gate_proj", "up_proj", "down_proj"))
        norm = self._folding.gain_of(gate)
        inputs, inner = [], []
        for expert in range(count):
            if hidden % 256 == 0:
                group = self._group(gate, hidden, expert, norm)
                self._group(up, hidden, expert, norm)
                inputs.append(group.moment)
            if width % 256 == 0:
                inner.append(self._group(down, width, expert, None).moment)

        def routed(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = (args[0] if args else keywords["hidden_states"]).reshape(-1, hidden)
            chosen = (args[1] if len(args) > 1 else keywords["top_k_index"]).reshape(states.shape[0], -1)
            plain = states if norm is None else self._plain[norm]
            for expert in range(count):
                rows = torch.where((chosen == expert).any(-1))[0]
                if not rows.numel():
                    continue
                if inputs:
                    inputs[expert].add(plain[rows])
                if inner:
                    gates, ups = (states[rows] @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                    inner[expert].add(module.act_fn(gates) * ups)

        self._handles.append(module.register_forward_pre_hook(routed, with_kwargs=True))


# -------------------------------------------------------------------------------------------------- command line


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``calibrate``."""
    parser = subparsers.add_parser(
        "calibrate", help="collect statistics for calibrated conversion", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="model_dir", type=Path, help="Hugging Face folder with safetensors weights")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="text, plain or .xz")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--tokens", type=int, default=Options.tokens, help="tokens to run (default: %(default)s)")
    parser.add_argument("--context", type=int, help="tokens of a window (default: the model's, at most 2048)")
    parser.add_argument(
        "--hessian",
        choices=FORMS,
        help=f"form (default: full up to {FULL_COLUMNS} columns, else block)",
    )
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=Options.batch, help="windows at a time (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    values = {key: value for key, value in vars(args).items() if key in Options.__dataclass_fields__}
    manifest = calibrate(Options(**values))
    matrices = len(manifest.entries)
    print(f"{args.out}: statistics of {matrices} matrices from {manifest.tokens} tokens", file=sys.stderr)
    return 0
