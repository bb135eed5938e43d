"""Upload to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base.errors import UserError


def upload(folder: Path, names: Sequence[str], repository: str, *, private: bool = False) -> str:
    """Upload files of a folder in one commit; a repository that is not there is made.

    Args:
        folder: where the files are.
        names: of the files in it; nothing else is uploaded.
        repository: ``organisation/name``.
        private: whether a new repository is private.

    Returns:
        Where they are now.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="gguf-itq3s")
    remedy = "check the name, the network, and that the token of HF_TOKEN or hf auth login may write there"
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=[_literally(name) for name in names],
            commit_message="Upload GGUF files with gguf-itq3s",
        )  # fmt: skip
    except Exception as error:  # of the client, or of the HTTP library beneath, which differs with its version
        raise UserError(f"hf:{repository}", str(error), remedy) from error
    return str(done.commit_url)


def _literally(name: str) -> str:
    """A pattern of fnmatch that only a name itself fits."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
