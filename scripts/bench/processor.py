"""Which processor this is: a name for the file of its results, from what the operating system says of it.

A virtual machine's model name may be no more than "AMD EPYC", so that the microarchitecture comes from the numbers of
vendor, family and model, as Linux's own tables have them (arch/x86/include/asm/intel-family.h,
arch/x86/kernel/cpu/amd.c, arch/arm64/include/asm/cputype.h).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Intel's family 6: model -> microarchitecture.
INTEL: Final[Mapping[int, str]] = {
    **dict.fromkeys((0x2A, 0x2D), "sandy-bridge"),
    **dict.fromkeys((0x3A, 0x3E), "ivy-bridge"),
    **dict.fromkeys((0x3C, 0x3F, 0x45, 0x46), "haswell"),
    **dict.fromkeys((0x3D, 0x47, 0x4F, 0x56), "broadwell"),
    **dict.fromkeys((0x4E, 0x5E), "skylake"),
    **dict.fromkeys((0x8E, 0x9E), "kaby-lake"),
    **dict.fromkeys((0xA5, 0xA6), "comet-lake"),
    0x66: "cannon-lake",
    **dict.fromkeys((0x7D, 0x7E), "ice-lake"),
    **dict.fromkeys((0x6A, 0x6C), "ice-lake-server"),
    **dict.fromkeys((0x8C, 0x8D), "tiger-lake"),
    0xA7: "rocket-lake",
    **dict.fromkeys((0x97, 0x9A), "alder-lake"),
    0xBE: "alder-lake-n",
    **dict.fromkeys((0xB7, 0xBA, 0xBF), "raptor-lake"),
    **dict.fromkeys((0xAA, 0xAC), "meteor-lake"),
    **dict.fromkeys((0xB5, 0xC5, 0xC6), "arrow-lake"),
    0xBD: "lunar-lake",
    0xCC: "panther-lake",
    0x8F: "sapphire-rapids",
    0xCF: "emerald-rapids",
    **dict.fromkeys((0xAD, 0xAE), "granite-rapids"),
    0xAF: "sierra-forest",
    0xDD: "clearwater-forest",
}
#: Skylake's server model has three generations: the first flag that is there names it.
SKYLAKE_SERVER: Final = 0x55, {"avx512_bf16": "cooper-lake", "avx512_vnni": "cascade-lake", "avx512f": "skylake-server"}
#: AMD's families: ranges of models, first and last -> microarchitecture.
AMD: Final[Mapping[int, Mapping[tuple[int, int], str]]] = {
    0x17: {(0x00, 0x2F): "zen1", (0x50, 0x5F): "zen1", (0x30, 0xAF): "zen2"},
    0x19: {(0x10, 0x1F): "zen4", (0x60, 0xAF): "zen4", (0x00, 0x5F): "zen3"},
    0x1A: {(0x50, 0x5F): "zen6", (0x80, 0xAF): "zen6", (0xC0, 0xCF): "zen6", (0x00, 0x7F): "zen5"},
}
#: ARM: implementer and part -> core.
ARM: Final[Mapping[tuple[int, int], str]] = {
    (0x41, 0xD03): "cortex-a53", (0x41, 0xD05): "cortex-a55", (0x41, 0xD07): "cortex-a57",
    (0x41, 0xD08): "cortex-a72", (0x41, 0xD09): "cortex-a73", (0x41, 0xD0A): "cortex-a75",
    (0x41, 0xD0B): "cortex-a76", (0x41, 0xD0D): "cortex-a77", (0x41, 0xD41): "cortex-a78",
    (0x41, 0xD46): "cortex-a510", (0x41, 0xD80): "cortex-a520", (0x41, 0xD47): "cortex-a710",
    (0x41, 0xD4D): "cortex-a715", (0x41, 0xD81): "cortex-a720", (0x41, 0xD87): "cortex-a725",
    (0x41, 0xD44): "cortex-x1", (0x41, 0xD48): "cortex-x2", (0x41, 0xD4E): "cortex-x3",
    (0x41, 0xD82): "cortex-x4", (0x41, 0xD85): "cortex-x925", (0x41, 0xD0C): "neoverse-n1",
    (0x41, 0xD49): "neoverse-n2", (0x41, 0xD8E): "neoverse-n3", (0x41, 0xD40): "neoverse-v1",
    (0x41, 0xD4F): "neoverse-v2", (0x41, 0xD84): "neoverse-v3", (0x41, 0xD4A): "neoverse-e1",
    (0x46, 0x001): "a64fx", (0x48, 0xD01): "tsv110", (0x51, 0x001): "oryon",
    (0x61, 0x022): "apple-m1", (0x61, 0x023): "apple-m1", (0x61, 0x024): "apple-m1", (0x61, 0x025): "apple-m1",
    (0x61, 0x028): "apple-m1", (0x61, 0x029): "apple-m1", (0x61, 0x032): "apple-m2", (0x61, 0x033): "apple-m2",
    (0x61, 0x034): "apple-m2", (0x61, 0x035): "apple-m2", (0x61, 0x038): "apple-m2", (0x61, 0x039): "apple-m2",
    (0xC0, 0xAC3): "ampere-1", (0xC0, 0xAC4): "ampere-1a",
}  # fmt: skip
VENDORS: Final[Mapping[str, str]] = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}
#: Words of a model name that say nothing of the product.
FILLER: Final = r"\((?:R|TM|C)\)|\b(?:CPU|Processor|Intel|AMD|\d+-Cores?|\d+th Gen)\b|\bw(?:/|ith\b).*|@.*"
#: The bytes that weights are at least, if they must be in no cache, and how many times the largest cache.
LEAST_MEMORY: Final = 256 << 20
CACHES: Final = 4


@dataclass(frozen=True)
class Processor:
    """A processor.

    Attributes:
        name: microarchitecture, and the product where the system says which: a file name.
        model: the model name, as the system has it.
    """

    name: str
    model: str


def of_cpuinfo(text: str) -> Processor:
    """The processor of a /proc/cpuinfo, x86 or ARM."""
    fields = {
        key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in text.split("\n"))
    }
    if "cpu implementer" in fields:
        return _arm(text, fields)
    vendor, family, model = fields.get("vendor_id", ""), fields.get("cpu family", ""), fields.get("model", "")
    if family.isdigit() and model.isdigit():
        flags = set(fields.get("flags", "").split())
        return _x86(vendor, int(family), int(model), flags, fields.get("model name", ""))
    title = fields.get("model name") or fields.get("cpu model") or fields.get("uarch") or ""
    return Processor(_slug(title) or "unknown", title)


def of_sysctl(values: Mapping[str, str]) -> Processor:
    """The processor of a Mac, from its values below ``machdep.cpu``, by their last names."""
    brand = values.get("brand_string", "")
    if values.get("vendor") and values.get("family", "").isdigit() and values.get("model", "").isdigit():
        flags = {flag.lower() for key in ("features", "leaf7_features") for flag in values.get(key, "").split()}
        return _x86(values["vendor"], int(values["family"]), int(values["model"]), flags, brand)
    return Processor(_slug(brand) or "unknown", brand)


def this() -> Processor:
    """The processor of this machine; "unknown", or Python's word for the architecture, where nothing says more."""
    if platform.system() == "Darwin":
        return of_sysctl(dict(re.findall(r"machdep\.cpu\.(\w+): (.*)", _output("sysctl", "machdep.cpu"))))
    try:
        found = of_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        found = Processor("unknown", "")
    if found.name != "unknown":
        return found
    title = platform.processor() or platform.machine()
    return Processor(_slug(title) or "unknown", title)


def cores(system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that this process may use, a core with two hardware threads once; on a Mac the fast ones."""
    if platform.system() == "Darwin":
        found = dict(re.findall(r"([\w.]+): (\d+)\n", _output("sysctl", "hw")))
        return int(found.get("hw.perflevel0.physicalcpu") or found.get("hw.physicalcpu") or os.cpu_count() or 1)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = [system / f"cpu{number}" / "topology" / "thread_siblings_list" for number in usable]
    return len({path.read_text() if path.exists() else path for path in siblings})


def last_level_cache() -> int | None:
    """Bytes of the largest cache that the system reports, None where it reports none."""
    if platform.system() == "Darwin":
        found = re.findall(r"cachesize: (\d+)", _output("sysctl", "hw"))
        return max(map(int, found), default=None)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


def memory_beyond_caches(cache: int | None) -> int:
    """Bytes of weights that no cache holds when they are read in turn, for a last-level cache of so many bytes."""
    return max(LEAST_MEMORY, CACHES * (cache or 0))


def _x86(vendor: str, family: int, model: int, flags: set[str], title: str) -> Processor:
    name = None
    if vendor == "GenuineIntel" and family == 6:
        number, generations = SKYLAKE_SERVER
        server = (name for flag, name in generations.items() if flag in flags)
        name = next(server, "skylake-server") if model == number else INTEL.get(model)
    elif vendor == "AuthenticAMD":
        ranges = AMD.get(family, {}).items()
        name = next((name for (first, last), name in ranges if first <= model <= last), None)
    name = name or f"{VENDORS.get(vendor, _slug(vendor) or 'x86')}-{family}-{model}"
    return Processor(_with_product(name, title), title)


def _arm(text: str, fields: Mapping[str, str]) -> Processor:
    pairs = re.findall(r"CPU implementer\s*: (0x[0-9a-fA-F]+)(?:.*\n)*?CPU part\s*: (0x[0-9a-fA-F]+)", text)
    numbers = dict.fromkeys((int(implementer, 16), int(part, 16)) for implementer, part in pairs)
    cores = dict.fromkeys(ARM.get(pair, f"arm-{pair[0]:x}-{pair[1]:x}") for pair in numbers)
    title = fields.get("model name") or fields.get("hardware") or ""
    return Processor("-".join(cores) or "arm", title)


def _with_product(name: str, title: str) -> str:
    """The name of a microarchitecture and the product's, if the title has more than a brand: a number."""
    product = _slug(re.sub(FILLER, " ", title))
    return f"{name}-{product}" if re.search(r"\d", product) else name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:R|TM|C)\)", " ", text).lower()).strip("-")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
