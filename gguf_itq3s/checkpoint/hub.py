"""Models of the Hugging Face hub, fetched into its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..base.errors import UserError

# Of a repository of the hub: what the reader, the tokenizers and the model card are made from.
_FETCHED: Final = (
    "LICENSE", "*.json", "*.jinja", "*.md", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.safetensors",
)  # fmt: skip
# The same weights once more, in a form of the publisher's own, for other programs or precisions: folders, but for the
# dense layers that Sentence Transformers numbers (2_Dense), and Mistral's and Meta's one large file.
_NOT_FETCHED: Final = ("consolidated*", "original/*", "[!0-9]*/*.safetensors")


def download(repository: str, *, trust_remote_code: bool = False) -> Path:
    """Fetch a model of the Hugging Face hub into its cache and return the folder.

    Args:
        repository: ``organisation/name``, with ``@revision`` if wanted.
        trust_remote_code: fetch its Python files too.

    Raises:
        UserError: no such model, no access, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    patterns = [*_FETCHED, *(("*.py",) if trust_remote_code else ())]
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=patterns, ignore_patterns=[*_NOT_FETCHED])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        remedy = "check the name, the network, and HF_TOKEN for a gated model"
        raise UserError(f"hf:{repository}", str(error), remedy) from error
