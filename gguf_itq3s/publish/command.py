"""``gguf-itq3s publish``: a model card for a folder of GGUF files, and its upload to the Hugging Face hub."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..base import report
from ..base.errors import UserError
from ..base.journal import write_text
from . import card

DESCRIPTION: Final = (
    "Write a model card for the GGUF files of a folder: sizes, what was measured of them (eval.json and eval_kld.png "
    "of gguf-itq3s eval --out FOLDER), how to run them, what they need. With --repo, list what would be uploaded to "
    "the Hugging Face hub; with --upload too, upload it."
)
_REPOSITORY: Final = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``publish``."""
    parser = subparsers.add_parser("publish", help="model card and upload of a folder", description=DESCRIPTION)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the GGUF files")
    parser.add_argument("--repo", type=_repository, metavar="ORG/NAME", help="of the hub")
    parser.add_argument("--upload", action="store_true", help="upload; without it nothing leaves this machine")
    parser.add_argument("--private", action="store_true", help="a repository that is made for it is private")
    parser.add_argument(
        "--base-model", type=_repository, metavar="ORG/NAME", help="the model of the hub that the files are made from"
    )
    parser.add_argument("--force", action="store_true", help="replace a README.md that publish did not write")
    parser.set_defaults(run=run)


def _repository(argument: str) -> str:
    if not _REPOSITORY.fullmatch(argument):
        raise argparse.ArgumentTypeError(f"{argument!r} is not of the form organisation/name")
    return argument


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        UserError: the folder holds no model, has a card of its own, or the hub refuses.
    """
    if args.upload and not args.repo:
        raise UserError(args.folder, "is to be uploaded nowhere", "give --repo organisation/name")
    content = card.read(args.folder)
    base_model = args.base_model or card.origin(content.models[0])
    path = args.folder / card.CARD
    if path.exists() and not args.force and card.MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(path, "is not one that publish has written", "move it away, or give --force")
    try:
        write_text(path, str(card.make(content, args.repo, base_model)))
    except OSError as error:
        raise UserError(path, f"cannot be written: {error.strerror or error}", "choose a folder that can be") from error
    print(f"wrote {path}")
    for known, what, option in (
        (base_model, "the model they are made from", "--base-model says it"),
        (content.models[0].metadata.get("general.license"), "the licence",
         "convert with the model's README.md, or with --metadata"),
        (content.measured, "how good they are", f"gguf-itq3s eval MODEL_DIR --out FOLDER leaves {card.RESULTS} there"),
    ):  # fmt: skip
        if not known:
            print(f"note: {what} is not known from the files; {option}", file=sys.stderr)
    if args.repo is None:
        return 0
    files = [path, *content.files]
    rows = [[file.name, report.size(file.stat().st_size)] for file in files]
    print(report.table([f"to {args.repo}", "size"], rows))
    if not args.upload:
        print("nothing was uploaded; the same command with --upload does it")
        return 0
    print(f"uploaded: {upload(args.folder, [file.name for file in files], args.repo, private=args.private)}")
    return 0


def upload(folder: Path, names: Sequence[str], repository: str, *, private: bool = False) -> str:
    """Upload files of a folder, by name, in one commit, and say where they are; a missing repository is made.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="gguf-itq3s")
    literally = [re.sub(r"[*?[]", r"[\g<0>]", name) for name in names]  # patterns that only the names fit
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=literally,
            commit_message="Upload GGUF files with gguf-itq3s",
        )  # fmt: skip
    except Exception as error:  # of the client, or of the HTTP library beneath, which differs with its version
        remedy = "check the name, the network, and that the token of HF_TOKEN or hf auth login may write there"
        raise UserError(f"hf:{repository}", str(error), remedy) from error
    return str(done.commit_url)
