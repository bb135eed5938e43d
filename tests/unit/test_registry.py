"""Where the project asks for one trellis type by name: the registry and the kernels may, other places are listed here.

A further type is a row of ``gguf_itq3s/codec/family.py``, of ``ggml-itq-types.h`` and of ``itq-mix.h``, its format, and
what its kernels need. Every other place that names one is a branch that the next type has to be added to by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_itq3s.codec.family import FAMILY, TrellisType

ROOT = Path(__file__).resolve().parents[2]

#: The registry, and what hands its rows out by name.
REGISTRY = {
    "gguf_itq3s/__init__.py", "gguf_itq3s/codec/family.py", "gguf_itq3s/codec/formats.py", "gguf_itq3s/codec/types.py",
}  # fmt: skip

#: The branches there are: file -> how many.
BRANCHES = {
    # The name of the quantization method in config.json, which is that of the first type and stands in files.
    "gguf_itq3s/checkpoint/rescaling.py": 1,
}

NAMES = re.compile(rf"(?:MOSTLY_)?(?:{'|'.join(row.name for row in FAMILY.values())})(?:_[A-Z]+)?", re.IGNORECASE)
NUMBERS = {int(row.type) for row in FAMILY.values()}


def named_in_python(source: str, *, compared: bool = False) -> Iterator[str]:
    """Names and numbers of types in the code, comments and texts left out; of those compared with only."""
    nodes: list[ast.AST] = [ast.parse(source)]
    if compared:
        nodes = [node for node in ast.walk(nodes[0]) if isinstance(node, (ast.Compare, ast.MatchValue))]
    for node in (part for found in nodes for part in ast.walk(found)):
        word = node.value if isinstance(node, ast.Constant) else None
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else word
        if (isinstance(word, str) and NAMES.fullmatch(word)) or (type(word) is int and word in NUMBERS):
            yield str(word)


def branches_in_c(source: str) -> Iterator[str]:
    """Labels of switches and comparisons that name a type; of a patch, in the lines that it adds."""
    name = rf"\w*_(?:{'|'.join(row.name for row in FAMILY.values())})\b"
    for line in source.splitlines():
        code = line.partition("//")[0]
        yield from re.findall(rf"case {name}|[=!]= *{name}|{name} *[=!]=", code)


def found_branches() -> dict[str, int]:
    counts = {}
    for path in sorted((ROOT / "gguf_itq3s").rglob("*.py")):
        counts[path] = sum(1 for _ in named_in_python(path.read_text()))
    # Tables may name what they put side by side; benchmarks and checks are of kernels.
    for path in sorted([*(ROOT / "scripts" / "tables").glob("*.py"), *(ROOT / "scripts" / "real").glob("*.py")]):
        counts[path] = sum(1 for _ in named_in_python(path.read_text(), compared=True))
    patch = ROOT / "ggml-patch"
    for path in sorted([*(patch / "patches").glob("*.patch"), *(patch / "src" / "llama").iterdir()]):
        added = [line[1:] for line in path.read_text().splitlines() if line.startswith("+")]
        text = "\n".join(added) if path.suffix == ".patch" else path.read_text()
        counts[path] = sum(1 for _ in branches_in_c(text))
    named = {path.relative_to(ROOT).as_posix(): count for path, count in counts.items() if count}
    return {name: count for name, count in named.items() if name not in REGISTRY}


def test_branches_are_few_and_listed() -> None:
    assert found_branches() == BRANCHES
    assert sum(BRANCHES.values()) <= 10


@pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
def test_a_branch_is_found(row: TrellisType) -> None:
    """The counts above are none of a search that finds nothing."""
    name = row.name
    source = f'"""{name}."""\nif t == {name} or u == "{row.identifier}" or n == {int(row.type)}: f({name}_FORMAT)'
    assert len(list(named_in_python(source))) == 4
    assert len(list(named_in_python(source, compared=True))) == 3
    assert list(branches_in_c(f"// {name}\ncase GGML_TYPE_{name}: a = t == LLAMA_FTYPE_MOSTLY_{name} ? 1 : 0;")) == [
        f"case GGML_TYPE_{name}", f"== LLAMA_FTYPE_MOSTLY_{name}",
    ]  # fmt: skip
