"""The model card of a folder of GGUF files: front matter for the hub, and what a reader has to know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import ModelCard, ModelCardData

from ..base import report
from ..base.errors import UserError
from ..base.journal import write_text
from ..checkpoint.rescaling import ID, NORMS_FOLDED
from ..codec.family import FAMILY, TrellisType
from ..evaluate.command import results_table
from .folder import CARD, Content, Model

#: In every card that this module has written; others are not replaced.
MARK: Final = "<!-- written by gguf-itq3s publish -->"
#: Tokens of context that the table of sizes counts a cache for.
CONTEXT: Final = 8192

#: The card, for Jinja.
_TEMPLATE: Final = """\
---
{{ card_data }}
---

{{ mark }}

# {{ title }}, GGUF

Files for llama.cpp{% if base_model %} of [{{ base_model }}](https://huggingface.co/{{ base_model }}){% endif %}.

{{ sizes }}
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
{% if results %}
## How much is lost

Against the F16 file, windows of {{ content.context }} tokens, by `gguf-itq3s eval`: mean KL divergence is the main \
figure. Types and mixes of llama.cpp stand beside.
{% if content.picture %}
![KL divergence against bits per weight]({{ content.picture.name }})
{% endif %}
{{ results }}{% endif %}"""


def front_matter(content: Content, base_model: str | None) -> ModelCardData:
    """What the hub reads: licence, languages, the model it was made from."""
    first = content.models[0].metadata
    tags = [str(tag) for tag in first.get("general.tags") or []]
    return ModelCardData(
        base_model=base_model,
        language=first.get("general.languages"),
        library_name="gguf",
        license=first.get("general.license"),
        license_name=first.get("general.license.name"),
        license_link=first.get("general.license.link"),
        pipeline_tag=next((tag for tag in tags if tag.startswith("text-")), "text-generation"),
        tags=["gguf", "quantized", *(row.identifier for row in _types(content)), *tags],
        base_model_relation="quantized" if base_model else None,
        quantized_by=first.get("general.quantized_by") or None,
    )


def origin(model: Model) -> str | None:
    """The hub's name of the model that a file was converted from, as its metadata say; None where they do not."""
    repository = model.metadata.get("general.source.huggingface.repository")
    urls = (model.metadata.get(key) for key in ("general.source.repo_url", "general.repo_url"))
    found = repository or next((url for url in urls if url), None)
    name = str(found or "").removeprefix("https://huggingface.co/").strip("/")
    return name if name.count("/") == 1 and ":" not in name else None


def make(content: Content, repository: str | None, base_model: str | None) -> ModelCard:
    """The whole card.

    Args:
        content: of the folder.
        repository: ``organisation/name`` that the files go to, for the commands.
        base_model: the hub's name of the model that they were made from.
    """
    first = content.models[0]
    own = [model for model in content.models if model.own]
    others = [model for model in content.models if not model.own]
    return ModelCard.from_template(
        front_matter(content, base_model), template_str=_TEMPLATE, mark=MARK, content=content, repository=repository,
        base_model=base_model, title=first.metadata.get("general.name") or first.files[0].stem, first=first.name,
        files=" ".join(file.name for file in first.files), own=_named(own), others=_named(others),
        types=" or ".join(f"{row.name}, {row.format.bits_per_weight:g} bits" for row in _types(content)),
        rescaled=any(model.metadata.get(NORMS_FOLDED) or model.metadata.get(ID) for model in own),
        sizes=_table(content), results=results_table(content.results) if content.results else "",
    )  # fmt: skip


def _types(content: Content) -> list[TrellisType]:
    """The trellis types of the files."""
    return [row for row in FAMILY.values() if any(row in model.own for model in content.models)]


def _named(models: Sequence[Model]) -> str:
    return ", ".join(f"`{model.name}`" for model in models)


def _table(content: Content) -> str:
    header = ["file", "type", "bits/weight", "size", f"with {CONTEXT} tokens of context", "PPL", "mean KLD"]
    rows = []
    for model in content.models:
        row, memory = content.measured(model), model.needs(CONTEXT)
        rows.append([
            model.name if len(model.files) == 1 else f"{model.name} and {len(model.files) - 1} more",
            model.type, f"{8 * model.size / model.weights:.3f}", report.size(model.size),
            "-" if memory is None else report.size(memory),
            "-" if row is None else f"{row['perplexity']:.2f}", "-" if row is None else f"{row['mean_kld']:.5f}",
        ])  # fmt: skip
    return report.markdown(header, rows, left=2)


def write(folder: Path, card: ModelCard, *, force: bool = False) -> Path:
    """Put the card into its folder.

    Args:
        folder: of the GGUF files.
        card: what :func:`make` gave.
        force: replace a card that somebody has written.

    Returns:
        Its path.

    Raises:
        UserError: there is a card that this module did not write, or the folder cannot be written.
    """
    path = folder / CARD
    if path.exists() and not force:
        old = path.read_text(encoding="utf-8", errors="replace")
        if MARK not in old:
            raise UserError(path, "is not one that publish has written", "move it away, or give --force")
    try:
        write_text(path, str(card))
    except OSError as error:
        raise UserError(path, f"cannot be written: {error.strerror or error}", "choose a folder that can be") from error
    return path
