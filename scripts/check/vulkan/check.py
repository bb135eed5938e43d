#!/usr/bin/env python3
"""Build the Vulkan backend and run it on Mesa's software device, llvmpipe; no GPU is needed.

    scripts/check/vulkan/check.py [--work FOLDER] [--quick] [--device]

Compiles the backend with its shaders, looks at our shaders with spirv-val, compares products with double precision
(tests/vulkan/traps.cpp), runs test-backend-ops for the types in several configurations, and the bundled model: its
perplexity beside that of the CPU, its text, two instances, some of its layers, and where the scheduler puts what. The
last line says how much of each went well. Shaders, and what the driver makes of them, are kept in the work folder by
their content.

A glslc without integer dot products (before 2024.4) is given them, so that the products of integers run here; shaders
for types that nothing here has are left out. --device takes the first real Vulkan device instead of the software one,
with all shaders, as glslc compiles them. Where packages are missing the exit status is 77, as for a skipped test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.codec.family import FAMILY  # noqa: E402
from scripts.check import cuda as cuda_check  # noqa: E402

SKIPPED: Final = 77
PACKAGES: Final = {
    "Debian, Ubuntu": "glslc libvulkan-dev spirv-headers mesa-vulkan-drivers spirv-tools",
    "Fedora": "glslc vulkan-headers vulkan-loader-devel spirv-headers-devel mesa-vulkan-drivers spirv-tools",
    "Arch": "shaderc vulkan-headers vulkan-icd-loader spirv-headers vulkan-swrast spirv-tools",
}
#: Where loaders look for drivers.
DRIVERS: Final = tuple(Path(p) / "vulkan" / "icd.d" for p in ("/usr/share", "/usr/local/share", "/etc"))
OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_VULKAN=ON", "-DLLAMA_BUILD_TESTS=ON", "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_NUMBER=0", "-DGIT_EXE=OFF",
)  # fmt: skip
TARGETS: Final = ("test-backend-ops", "llama-perplexity", "llama-completion")
OUR_TYPES: Final = (*(row.name for row in FAMILY.values()), "TQ1_0", "TQ2_0")
#: Types of weights that tests/vulkan/traps.cpp meets: ours and a stranger; with what the model has beside them.
QUICK_TYPES: Final = ("F32", "F16", *OUR_TYPES, "Q4_K")
TYPES: Final = (*QUICK_TYPES, "BF16", "Q6_K", "Q8_0", "IQ4_NL")
OURS: Final = "|".join(OUR_TYPES).lower()
INTEGERS: Final = {"GGML_VK_FORCE_INTEGER_DOT": "1", "GGML_VK_FORCE_MMVQ": "1"}
#: Name -> what it sets. Upstream's products of integers by expert are wrong with subgroups of 8, for every type.
CONFIGURATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "subgroups of 8": {"LP_NATIVE_VECTOR_WIDTH": "256"},
    "integers, subgroups of 16": {"LP_NATIVE_VECTOR_WIDTH": "512", **INTEGERS},
    "subgroups of 16": {"LP_NATIVE_VECTOR_WIDTH": "512"},
    "no F16": {"LP_NATIVE_VECTOR_WIDTH": "256", "GGML_VK_DISABLE_F16": "1"},
    "no fusion": {"LP_NATIVE_VECTOR_WIDTH": "256", "GGML_VK_DISABLE_FUSION": "1"},
}
WITH_INTEGERS: Final = CONFIGURATIONS["integers, subgroups of 16"]
QUICK: Final = ("subgroups of 8", "integers, subgroups of 16")
#: With this configuration, upstream's products of one row with 64 columns are wrong by chance, those of Q8_0 too.
ONE_ROW: Final = {"subgroups of 16": r"^(?!.*m=1,n=64,k=256)"}
NO_COOPERATIVE: Final = "GGML_VK_DISABLE_COOPMAT"
OPERATIONS: Final = "MUL_MAT,MUL_MAT_ID,GET_ROWS,CPY"
#: Cases of many columns whose tiles are whole. Mesa 26.1 has cooperative matrices, on which tiles that an edge cuts are
#: wrong, for Q4_K as for ours.
WHOLE_TILES: Final = r"type_a=itq[234]_s,.*(m=128,n=(9|16|17|33|64|512)|m=96,n=(17|129)|m=64,n=16),"
#: Relative difference of the perplexities of both backends, windows of text, tokens that are written.
MOST: Final = 0.002
WINDOWS: Final = 4
WRITTEN: Final = 24
#: Of the bundled model.
LAYERS: Final = 6
CONVERT: Final = (sys.executable, "-m", "gguf_itq3s.cli", "convert")


class CheckError(RuntimeError):
    """Something does not compile, is missing or is wrong; the message is what to print."""


def called(command: Sequence[str | Path], **options: object) -> str:
    """Output of a program that has to succeed."""
    done = subprocess.run(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        **options,  # type: ignore[call-overload]
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if re.search("error|FAIL", line)]
        lines = lines[:20] or done.stdout.splitlines()[-5:]
        raise CheckError(f"{Path(str(command[0])).name} ended with {done.returncode}:\n" + "\n".join(lines))
    return str(done.stdout)


def software_driver() -> Path | None:
    """The manifest of Mesa's software device."""
    return next((path for folder in DRIVERS for path in sorted(folder.glob("lvp_icd*.json"))), None)


def missing() -> list[str]:
    """What the check cannot do without."""
    lacks = [tool for tool in ("glslc", "spirv-val") if shutil.which(tool) is None]
    headers = [Path(root) / "vulkan" / "vulkan.hpp" for root in ("/usr/include", "/usr/local/include")]
    if not any(path.exists() for path in headers) and "VULKAN_SDK" not in os.environ:
        lacks.append("vulkan.hpp")
    return lacks


def has_dot() -> bool:
    """Whether glslc knows GL_EXT_integer_dot_product."""
    source = "#version 460\n#extension GL_EXT_integer_dot_product : require\nvoid main() {}\n"
    done = subprocess.run(
        ["glslc", "-fshader-stage=compute", "-o", "-", "-"], input=source, text=True, capture_output=True,
        encoding="latin-1",
    )  # fmt: skip
    return done.returncode == 0


def build(tree: Path, work: Path, device: bool, quick: bool) -> Path:
    """Compile the backend, and the tools unless it is to be quick; the folder of the programs."""
    out = work / ("quick" if quick else "build")  # with stubs for other types
    environment = dict(os.environ)
    options = list(OPTIONS)
    if not device:
        environment |= {
            "ITQ3S_GLSLC_CACHE": str(work / "shaders"), "ITQ3S_GLSLC_TYPES": " ".join(QUICK_TYPES if quick else TYPES),
            "ITQ3S_GLSLC_DOT": "0" if has_dot() else "1",
        }  # fmt: skip
        options.append(f"-DVulkan_GLSLC_EXECUTABLE={Path(__file__).with_name('glslc')}")
    called(["cmake", "-S", tree, "-B", out, *options], env=environment)
    jobs = str(os.cpu_count() or 2)
    targets = ("ggml",) if quick else TARGETS
    called(["cmake", "--build", out, "--parallel", jobs, "--target", *targets], env=environment)
    return out / "bin"


def compile_traps(tree: Path, programs: Path) -> Path:
    """tests/vulkan/traps.cpp, without a warning."""
    program = programs / "traps"
    said = called(
        ["c++", "-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{tree / 'ggml' / 'include'}", "-isystem",
         tree / "ggml" / "src", ROOT / "tests" / "vulkan" / "traps.cpp", "-o", program, f"-L{programs}",
         f"-Wl,-rpath,{programs}", "-lggml", "-lggml-base", "-lggml-cpu"]
    )  # fmt: skip
    if "warning" in said:
        raise CheckError(f"warnings in tests/vulkan/traps.cpp:\n{said}")
    return program


def validate(programs: Path) -> int:
    """Have spirv-val look at the shaders that are ours or decode our types; how many they are."""
    shaders = sorted((programs.parent / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders.spv").glob("*.spv"))
    # Those of Valve's dot products have a capability that spirv-val does not know; upstream spares them spirv-opt too.
    ours = [path for path in shaders if re.search(rf"itq|{OURS}", path.name) and "_dot2" not in path.name]
    if len(ours) < 100:
        raise CheckError(f"{len(ours)} shaders of our types were compiled")
    for path in ours:
        called(["spirv-val", "--target-env", "vulkan1.3", path])
    return len(ours)


def cases(
    programs: Path, environment: Mapping[str, str], operations: str = OPERATIONS,
    pattern: str = f"type(_a|_src)?=({OURS})",
) -> int:  # fmt: skip
    """Run test-backend-ops; how many cases passed."""
    command: list[str | Path] = [programs / "test-backend-ops", "test", "-b", "Vulkan0", "-o", operations]
    text = called([*command, "-p", pattern], env=environment)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    refused = [line.strip() for line in text.splitlines() if "not supported" in line and re.search(OURS, line)]
    # Parts of rows are refused for every quantized type, and copies to ours; a copy from one is asked for beside it.
    refused = [line for line in refused if not re.search(r"^CPY|k_v=[1-9]", line)]
    if refused:
        raise CheckError(f"{len(refused)} cases of our types are refused, the first {refused[0]}")
    found = re.search(r"(\d+)/(\d+) tests passed", text)
    if found is None or found[1] != found[2] or found[1] == "0":
        raise CheckError(f"test-backend-ops: {found[0] if found else 'no result'}")
    return int(found[1])


def cooperative(programs: Path, environment: Mapping[str, str]) -> str:
    """Products on cooperative matrices where backend and device have them; what to say about it."""
    here = {name: value for name, value in environment.items() if name != NO_COOPERATIVE}
    text = called(
        [programs / "test-backend-ops", "test", "-b", "Vulkan0", "-o", "GET_ROWS", "-p", "type=itq2_s"], env=here
    )
    if "matrix cores: KHR_coopmat" not in text:
        return "no cooperative matrices here"
    return f"cooperative matrices {cases(programs, here, 'MUL_MAT,MUL_MAT_ID', WHOLE_TILES)} cases"


def traps(program: Path, environment: Mapping[str, str], *options: str) -> int:
    """Run tests/vulkan/traps.cpp; how many products were right."""
    found = re.search(r"(\d+) products compared, 0 failed", called([program, *options], env=environment))
    if found is None:
        raise CheckError("traps: no result")
    return int(found[1])


def stub_fails(programs: Path, environment: Mapping[str, str]) -> None:
    """A shader that was left out ends whoever uses it, and not with a result."""
    done = subprocess.run(
        [programs / "test-backend-ops", "test", "-b", "Vulkan0", "-o", "MUL_MAT", "-p",
         r"type_a=q5_0,type_b=f32,m=16,n=1,k=256,bs=\[1,1\],nr=\[1,1\],per=\[0,1,2,3\]"],
        env=dict(environment), capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode == 0:
        raise CheckError("a shader that was left out has been used without an error")


def perplexity(programs: Path, model: Path, text: Path, environment: Mapping[str, str], *options: str) -> float:
    """Perplexity of the model over the first windows of a text."""
    said = called(
        [programs / "llama-perplexity", "-m", model, "-f", text, "-c", "512", "--chunks", str(WINDOWS), *options],
        env=environment,
    )
    found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
    if found is None:
        raise CheckError("llama-perplexity gave no perplexity")
    return float(found[1])


def written(programs: Path, model: Path, environment: Mapping[str, str], *options: str) -> str:
    """What the model writes, greedily."""
    done = subprocess.run(
        [str(c) for c in (programs / "llama-completion", "-m", model, "-p", "The old man", "-n", WRITTEN, "-no-cnv",
                          "--temp", "0", "--seed", "1", *options)],
        env=dict(environment), capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise CheckError("llama-completion: " + "\n".join(done.stderr.splitlines()[-3:]))
    return done.stdout.strip()


def dispatches(programs: Path, work: Path, model: Path, environment: Mapping[str, str]) -> float:
    """Dispatches that writing one more token takes."""
    counter = work / "count-dispatches.so"
    source = ROOT / "tests" / "vulkan" / "count-dispatches.c"
    called(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", source, "-o", counter, "-ldl"])
    counts = []
    for tokens in (3, 11):
        said = called(
            [programs / "llama-completion", "-m", model, "-p", "The old man", "-n", str(tokens), "-no-cnv", "--temp",
             "0", "--seed", "1", "--ignore-eos", "-ngl", "99"],
            env={**environment, "LD_PRELOAD": str(counter)},
        )  # fmt: skip
        counts.append(int(re.findall(r"(\d+) dispatches", said)[-1]))
    return (counts[1] - counts[0]) / 8


def more_dispatches(programs: Path, work: Path, environment: Mapping[str, str]) -> str:
    """How many dispatches a layer takes more in ITQ3_S than in Q4_K, in floating point and with integers."""
    said = []
    for name, values, most in (("floats", CONFIGURATIONS["subgroups of 8"], 4), ("integers", WITH_INTEGERS, 0)):
        here = {**environment, **values}
        counts = [dispatches(programs, work, converted(work, outtype), here) for outtype in ("itq3_s", "q4_k_s")]
        more = (counts[0] - counts[1]) / LAYERS
        if more > most:
            raise CheckError(f"{name}: ITQ3_S takes {more} dispatches a layer more than Q4_K")
        said.append(f"{more:g} with {name}")
    return "dispatches a layer more than Q4_K's: " + ", ".join(said)


def converted(work: Path, outtype: str) -> Path:
    """The bundled model in a type, made anew."""
    model = work / f"demo-{outtype}.gguf"
    model.unlink(missing_ok=True)
    source = ROOT / "models" / "demo-llama"
    called([*CONVERT, source, model, "--outtype", outtype, "--pure", "--token-embedding-type", "f16"], cwd=ROOT)
    return model


def splits(programs: Path, model: Path, text: Path, environment: Mapping[str, str]) -> list[str]:
    """Backends of the splits of the graph, in order, as the scheduler prints them."""
    said = called(
        [programs / "llama-perplexity", "-m", model, "-f", text, "-c", "512", "--chunks", "1", "-ngl", "99", "-lv",
         "5"],
        env={**environment, "GGML_SCHED_DEBUG": "2"},
    )  # fmt: skip
    graphs = said.split("## SPLIT #0")
    return [
        "CPU" if "CPU" in name else name for name in re.findall(r"## SPLIT #\d+: (\S+)", "## SPLIT #0" + graphs[-1])
    ]


def whole_model(programs: Path, work: Path, environment: Mapping[str, str]) -> str:
    """The bundled model on the device and on the CPU; what to say about it."""
    text = work / "text.txt"
    text.write_text("\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))))
    worst = 0.0
    said = []
    for name in ("itq3_s", "itq2_s"):
        model = converted(work, name)
        cpu = perplexity(programs, model, text, environment, "--device", "none")
        for options in (("-ngl", "99"), ("-ngl", "3")):
            found = perplexity(programs, model, text, environment, *options)
            worst = max(worst, abs(found / cpu - 1))
            if abs(found / cpu - 1) > MOST:
                raise CheckError(f"{name}, {' '.join(options)}: perplexity {found}, on the CPU {cpu}")
        placed = splits(programs, model, text, environment)
        if "CPU" in placed[1:] or not any(name.startswith("Vulkan") for name in placed):
            raise CheckError(f"{name}: with -ngl 99 the splits of a graph are on {', '.join(placed) or 'nothing'}")
        said.append(f"{len(placed)} splits")
    plain = written(programs, model, environment, "--device", "none").split()
    device = written(programs, model, environment, "-ngl", "99").split()
    same = next(
        (i for i, (a, b) in enumerate(zip(plain, device, strict=False)) if a != b), min(len(plain), len(device))
    )
    if same < 6:
        raise CheckError(f"the device writes {' '.join(device)!r}, the CPU {' '.join(plain)!r}")
    command = [str(programs / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", "512", "--chunks", "2"]
    both = [
        subprocess.Popen(
            [*command, "-ngl", "99"], env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    answers = [re.findall(r"Final estimate: PPL = ([\d.]+)", one.communicate()[0]) for one in both]
    if answers[0] != answers[1] or len(answers[0]) != 1:
        raise CheckError("two instances at once do not agree")
    return f"perplexity within {100 * worst:.3f}% of the CPU's, {same} words alike, {said[0]} with -ngl 99"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "vulkan-check",
        help="folder for the source, what is compiled and the models (default: build/vulkan-check)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only products, in two configurations, as in CI")
    parser.add_argument("--device", action="store_true", help="the first real device instead of the software one")
    args = parser.parse_args()
    lacks = missing()
    driver = software_driver()
    if driver is None and not args.device:
        lacks.append("Mesa's software Vulkan device")
    if lacks:
        packages = "; ".join(f"{system}: {names}" for system, names in PACKAGES.items())
        print(f"skipped: {', '.join(lacks)} not found; install {packages}", file=sys.stderr)
        return SKIPPED
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if not args.device:
        environment |= {
            "VK_ICD_FILENAMES": str(driver), "VK_DRIVER_FILES": str(driver), "GGML_VK_VISIBLE_DEVICES": "0",
            "MESA_SHADER_CACHE_DIR": str(work / "mesa"), NO_COOPERATIVE: "1",
        }  # fmt: skip
    try:
        tree = cuda_check.prepare_tree(work)
        programs = build(tree, work, args.device, args.quick)
        program = compile_traps(tree, programs)
        said = [f"{validate(programs)} shaders valid"]
        chosen = {"this device": {}} if args.device else {
            name: values for name, values in CONFIGURATIONS.items() if not args.quick or name in QUICK
        }  # fmt: skip
        for name, values in chosen.items():
            here = {**environment, **values}
            products = traps(program, here, *(() if args.quick else ("--all",)))
            said.append(f"{name} {products} products")
            if not args.quick:
                pattern = f"{ONE_ROW.get(name, '')}.*type(_a|_src)?=({OURS})"
                said[-1] += f" and {cases(programs, here, pattern=pattern)} cases"
            print(said[-1], flush=True)
        if not args.quick:
            said.append(f"{traps(program, environment, '--large')} products of matrices in parts")
            if not args.device:
                stub_fails(programs, environment)
                said.append("a stub fails")
                said.append(cooperative(programs, environment))
            said.append(whole_model(programs, work, environment))
            if not args.device:
                said.append(more_dispatches(programs, work, environment))
    except (CheckError, cuda_check.CheckError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("vulkan-check: " + ", ".join(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
