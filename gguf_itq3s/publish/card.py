"""The model card of a folder of GGUF files: front matter for the hub, and what a reader has to know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gguf import LlamaFileType
from huggingface_hub import ModelCard, ModelCardData

from ..base import report
from ..base.errors import UserError
from ..checkpoint.gguf_file import open_gguf
from ..checkpoint.rescaling import ID, NORMS_FOLDED
from ..codec.family import FAMILY, TrellisType

#: What ``gguf-itq3s eval --out FOLDER`` leaves and a card shows.
RESULTS: Final = "eval.json"
PICTURE: Final = "eval_kld.png"
CARD: Final = "README.md"
#: In every card that this module has written; others are not replaced.
MARK: Final = "<!-- written by gguf-itq3s publish -->"

#: The card, for Jinja.
_TEMPLATE: Final = """\
---
{{ card_data }}
---

{{ mark }}

# {{ title }}, GGUF

Files for llama.cpp{% if base_model %} of [{{ base_model }}](https://huggingface.co/{{ base_model }}){% endif %}.

{{ sizes }}
{% if content.context %}
PPL, and the mean KL divergence from the F16 file, by `gguf-itq3s eval`, windows of {{ content.context }} tokens.
{% endif %}{% if content.picture %}
![KL divergence against bits per weight]({{ content.picture.name }})
{% endif %}
## What it needs
{% if own %}
{% if others %}{{ own }}: holds{% else %}These files hold{% endif %} tensors of the type {{ types }} a weight, \
which llama.cpp knows with the patch of gguf-itq3s; without it, llama.cpp refuses them with an error. This builds one, \
and says where its tools are:

```
pip install gguf-itq3s
gguf-itq3s build
```
{% if rescaled %}
Channels of their matrices are rescaled, which does not change the model. A LoRA adapter for one of them is made with \
`gguf-itq3s convert-lora --model FILE.gguf`; llama.cpp refuses one that was made otherwise.
{% endif %}{% endif %}{% if others %}
Any llama.cpp of the same age reads {{ others }}.
{% endif %}
## How to run it

```
{% if repository %}hf download {{ repository }} {{ files }} --local-dir .
{% endif %}llama-cli -m {{ first }}
llama-server -m {{ first }} --port 8080
```
"""


@dataclass(frozen=True)
class Model:
    """One GGUF model of a folder: its file, or parts in order; strings, numbers and short lists of its metadata.

    ``type`` is the name of ``general.file_type``, ``own`` are the trellis types that it holds, and ``content`` is the
    hash of the tensors, as an evaluation notes it.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    size: int
    weights: int
    type: str
    own: tuple[TrellisType, ...]
    content: str

    @property
    def name(self) -> str:
        """Name of the (first) file."""
        return self.files[0].name


@dataclass(frozen=True)
class Content:
    """All of a folder that is published; ``others`` are licence, projector and importance matrix.

    ``measured`` are rows of an evaluation by the hash of a file's tensors, in windows of ``context`` tokens.
    """

    models: tuple[Model, ...]
    measured: Mapping[str, Mapping[str, Any]]
    context: int = 0
    picture: Path | None = None
    others: tuple[Path, ...] = field(default=())

    @property
    def files(self) -> list[Path]:
        """Everything but the card, in the order of an upload."""
        parts = [file for model in self.models for file in model.files]
        return [*parts, *([self.picture] if self.picture else []), *self.others]


def read(folder: Path) -> Content:
    """Look through a folder.

    Raises:
        UserError: there is no such folder, it holds no GGUF model, or a file of it is damaged.
    """
    if not folder.is_dir():
        raise UserError(folder, "no such folder", "give the folder that holds the GGUF files")
    found = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    # A projector, or an importance matrix, is no model by itself.
    companions = [path for path in found if path.name.startswith("mmproj-") or "imatrix" in path.name]
    later = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
    models = tuple(_model(path) for path in found if path not in companions and not later.fullmatch(path.name))
    if not models:
        raise UserError(folder, "holds no GGUF model", "convert one into it first")
    measured, context = _results(folder / RESULTS)
    picture = folder / PICTURE
    licences = sorted(
        path for path in folder.iterdir() if path.is_file() and path.stem.upper() in ("LICENSE", "NOTICE")
    )
    return Content(models, measured, context, picture if picture.is_file() else None, (*companions, *licences))


def _model(path: Path) -> Model:
    file = open_gguf(path)
    short = {name: entry for name, entry in file.fields.items() if len(entry.data) <= 64}  # no vocabulary
    metadata = {name: entry.contents() for name, entry in short.items() if not name.startswith("GGUF.")}
    kind = metadata.get("general.file_type")
    known = kind in LlamaFileType._value2member_map_
    name = LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_") if known else "unknown"
    held = {tensor.tensor_type for tensor in file.tensors}
    own = tuple(row for qtype, row in FAMILY.items() if qtype in held)
    weights = sum(int(tensor.n_elements) for tensor in file.tensors)
    return Model(file.paths, metadata, file.size, weights, name, own, file.content)


def _results(path: Path) -> tuple[dict[str, Mapping[str, Any]], int]:
    """Rows and context of an evaluation; nothing where there is none."""
    if not path.is_file():
        return {}, 0
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows, context = value["tables"]["weights"], int(value["context"])
        return {row["content"]: {key: float(row[key]) for key in ("perplexity", "mean_kld")} for row in rows}, context
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = "make it with gguf-itq3s eval, or remove it"
        raise UserError(path, f"is not the result of an evaluation ({error})", remedy) from error


def origin(model: Model) -> str | None:
    """The hub's name of the model that a file was converted from, as its metadata say; None where they do not."""
    keys = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")
    found = next((model.metadata[key] for key in keys if model.metadata.get(key)), "")
    name = str(found).removeprefix("https://huggingface.co/").strip("/")
    return name if name.count("/") == 1 and ":" not in name else None


def make(content: Content, repository: str | None, base_model: str | None) -> ModelCard:
    """The whole card; the commands name the repository, ``organisation/name``, that the files go to."""
    first = content.models[0]
    own = [model for model in content.models if model.own]
    others = [model for model in content.models if not model.own]
    types = [row for row in FAMILY.values() if any(row in model.own for model in own)]
    tags = [str(tag) for tag in first.metadata.get("general.tags") or []]
    head = ModelCardData(
        base_model=base_model, base_model_relation="quantized" if base_model else None,
        language=first.metadata.get("general.languages"), library_name="gguf",
        license=first.metadata.get("general.license"), license_name=first.metadata.get("general.license.name"),
        license_link=first.metadata.get("general.license.link"),
        pipeline_tag=next((tag for tag in tags if tag.startswith("text-")), "text-generation"),
        tags=["gguf", "quantized", *(row.identifier for row in types), *tags],
        quantized_by=first.metadata.get("general.quantized_by") or None,
    )  # fmt: skip
    return ModelCard.from_template(
        head, template_str=_TEMPLATE, mark=MARK, content=content, repository=repository, base_model=base_model,
        title=first.metadata.get("general.name") or first.files[0].stem, first=first.name,
        files=" ".join(file.name for file in first.files), own=_named(own), others=_named(others),
        types=" or ".join(f"{row.name}, {row.format.bits_per_weight:g} bits" for row in types),
        rescaled=any(model.metadata.get(NORMS_FOLDED) or model.metadata.get(ID) for model in own),
        sizes=_table(content),
    )  # fmt: skip


def _named(models: Sequence[Model]) -> str:
    return ", ".join(f"`{model.name}`" for model in models)


def _table(content: Content) -> str:
    rows = []
    for model in content.models:
        row = content.measured.get(model.content)
        rows.append([
            model.name if len(model.files) == 1 else f"{model.name} and {len(model.files) - 1} more",
            model.type, f"{8 * model.size / model.weights:.3f}", report.size(model.size),
            "-" if row is None else f"{row['perplexity']:.2f}", "-" if row is None else f"{row['mean_kld']:.5f}",
        ])  # fmt: skip
    return report.markdown(["file", "type", "bits/weight", "size", "PPL", "mean KLD"], rows, left=2)
