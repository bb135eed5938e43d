"""The Vulkan backend's files as far as they can be looked at without a driver; make vulkan-check runs the backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_itq3s.codec.family import FAMILY

ROOT = Path(__file__).resolve().parents[2]
SHADERS = ROOT / "ggml-patch" / "src" / "vulkan" / "vulkan-shaders"
GLSLC = ROOT / "scripts" / "check" / "vulkan" / "glslc"

Compile = Callable[..., tuple[bytes, int]]

#: Says what it compiles to, preprocesses to its source, and counts its calls.
COMPILER = """#!{python}
import sys
arguments = sys.argv[1:]
source = next(a for a in arguments if a.endswith(".comp"))
text = open(source).read()
if "-MF" in arguments:
    open(arguments[arguments.index("-MF") + 1], "w").write(f"x.spv: {{source}} types.glsl\\n")
if "-E" in arguments:
    print(text)
else:
    open({calls!r}, "a").write("x")
    open(arguments[arguments.index("-o") + 1], "w").write("compiled " + text)
"""


@pytest.fixture
def compile_shader(tmp_path: Path) -> Compile:
    """Run the check's glslc on a source; what it wrote, and how often the compiler was called in all."""
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, calls=str(calls)))
    compiler.chmod(0o755)

    def run(text: str, *arguments: str, **environment: str) -> tuple[bytes, int]:
        source, out = tmp_path / "shader.comp", tmp_path / "shader.spv"
        source.write_text(text)
        plain = {k: v for k, v in os.environ.items() if not k.startswith("ITQ3S_")}
        subprocess.run(
            [GLSLC, *arguments, source, "-o", out],
            check=True,
            env={**plain, "ITQ3S_GLSLC": str(compiler), "ITQ3S_GLSLC_CACHE": str(tmp_path / "cache"), **environment},
        )
        return out.read_bytes(), len(calls.read_text()) if calls.exists() else 0

    return run


def test_shaders_are_compiled_once(compile_shader: Compile) -> None:
    first, calls = compile_shader("void main() {}", "-O")
    assert (first, calls) == (b"compiled void main() {}", 1)
    assert compile_shader("void main() {}", "-O") == (first, 1)
    assert compile_shader("void main() {}", "-O", "-DA=1") == (first, 1), (
        "what -D changes is in the preprocessed source"
    )
    assert compile_shader("void main() {}")[1] == 2
    assert compile_shader("void main() { }")[1] == 3


def test_dependencies_name_what_was_asked_for(compile_shader: Compile, tmp_path: Path) -> None:
    for _ in range(2):
        listed = tmp_path / "listed.d"
        compile_shader(
            "#extension GL_EXT_integer_dot_product : require\n", "-MD", "-MF", str(listed), ITQ3S_GLSLC_DOT="1"
        )
        assert listed.read_text() == f"{tmp_path / 'shader.spv'}: {tmp_path / 'shader.comp'} types.glsl\n"


def test_dependencies_name_what_other_variants_include(compile_shader: Compile, tmp_path: Path) -> None:
    (tmp_path / "outer.glsl").write_text('#if defined(DATA_A_ITQ2_S)\n#include "inner.glsl"\n#endif\n')
    (tmp_path / "inner.glsl").write_text('#include "outer.glsl"\n')
    listed = tmp_path / "listed.d"
    compile_shader('#ifdef A\n#include "outer.glsl"\n#endif\n', "-MD", "-MF", str(listed))
    assert set(listed.read_text().split()[1:]) == {
        "types.glsl",
        *(str(tmp_path / n) for n in ("shader.comp", "outer.glsl", "inner.glsl")),
    }


def test_types_that_are_not_wanted_become_stubs(compile_shader: Compile) -> None:
    stub, calls = compile_shader("", "-DDATA_A_IQ2_S=1", ITQ3S_GLSLC_TYPES="F16 ITQ2_S")
    assert stub.startswith(b"stub") and len(stub) % 4 and calls == 0
    assert compile_shader("", "-DDATA_A_ITQ2_S=1", ITQ3S_GLSLC_TYPES="F16 ITQ2_S")[0] == b"compiled "
    assert compile_shader("", "-DA_TYPE=float", ITQ3S_GLSLC_TYPES="F16 ITQ2_S")[0] == b"compiled "


def test_integer_dot_products_stand_behind_the_extensions(compile_shader: Compile) -> None:
    head = "#version 450\n#extension GL_EXT_integer_dot_product : require\n#ifdef A\n#extension B : require\n#endif\n"
    text = compile_shader(f'{head}#extension C : require\n#include "x"\n', ITQ3S_GLSLC_DOT="1")[0].decode()
    assert "GL_EXT_integer_dot_product" not in text
    assert text.index("C : require") < text.index("int itq_sdot") < text.index("#include")


def test_shaders_have_the_registrys_types() -> None:
    """What sets a type apart, and a table of levels for each number of bits of a symbol."""
    text = (SHADERS / "itq_types.glsl").read_text()
    types, rest = text.split("#if defined(ITQ_SYMBOL_BITS)")
    found = re.findall(
        r"defined\(DATA_A_(\w+)\)\n#define ITQ_SYMBOL_BITS (\d)\n#define QUANT_K (\d+)\n(#define ITQ_HAS_ZERO_POINT)?",
        types,
    )
    assert {name: (int(bits), int(block), bool(z)) for name, bits, block, z in found} == {
        row.name: (row.format.symbol_bits, row.format.block, row.format.zero_point) for row in FAMILY.values()
    }
    tables = [np.fromstring(table, np.int8, sep=",") for table in re.findall(r"= int\[\]\(([-\d,\s]+)\)", rest)]
    for row in FAMILY.values():
        assert sum(np.array_equal(table, row.format.levels) for table in tables) == 1


def test_registration_is_small() -> None:
    patches = sorted((ROOT / "ggml-patch" / "patches" / "optional").glob("004*-vulkan*"))
    files = [file for patch in patches for file in ([patch] if patch.is_file() else sorted(patch.glob("*.patch")))]
    assert len(files) == 3
    added = [line for file in files for line in file.read_text().splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert len(added) <= 120
