"""The name of a processor's file, from what systems say of processors."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from scripts.bench import processor


def x86(vendor: str, family: int, model: int, title: str, flags: str = "fpu sse2 avx2") -> str:
    one = (
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {title}\nstepping\t: 1\n"
        f"cache size\t: 1024 KB\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n\n"
    )
    return f"processor\t: 0\n{one}processor\t: 1\n{one}"


def arm(*parts: tuple[str, str]) -> str:
    return "".join(
        f"processor\t: {i}\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimddp\nCPU implementer\t: {implementer}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
        for i, (implementer, part) in enumerate(parts)
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (x86("AuthenticAMD", 26, 2, "AMD EPYC"), "zen5"),
        (x86("AuthenticAMD", 26, 0x24, "AMD Ryzen AI 9 HX 370 w/ Radeon 890M"), "zen5-ryzen-ai-9-hx-370"),
        (x86("AuthenticAMD", 26, 0x50, "AMD EPYC"), "zen6"),
        (x86("AuthenticAMD", 25, 17, "AMD EPYC-Genoa Processor"), "zen4"),
        (x86("AuthenticAMD", 25, 17, "AMD EPYC 9654 96-Core Processor"), "zen4-epyc-9654"),
        (x86("AuthenticAMD", 25, 0x61, "AMD Ryzen 9 7950X 16-Core Processor"), "zen4-ryzen-9-7950x"),
        (x86("AuthenticAMD", 25, 1, "AMD EPYC 7B13"), "zen3-epyc-7b13"),
        (x86("AuthenticAMD", 25, 0x21, "AMD EPYC"), "zen3"),
        (x86("AuthenticAMD", 23, 49, "AMD EPYC Processor"), "zen2"),
        (x86("AuthenticAMD", 23, 1, "AMD EPYC Processor"), "zen1"),
        (x86("AuthenticAMD", 21, 2, "AMD Opteron"), "amd-21-2"),
        (x86("HygonGenuine", 24, 0, "Hygon C86"), "hygon-24-0-hygon-c86"),
        (x86("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Processor"), "sapphire-rapids"),
        (x86("GenuineIntel", 6, 143, "Intel Xeon Processor (SapphireRapids)"), "sapphire-rapids"),
        (
            x86("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
            "sapphire-rapids-xeon-platinum-8481c",
        ),
        (x86("GenuineIntel", 6, 207, "Intel(R) Xeon(R) Processor @ 2.60GHz"), "emerald-rapids"),
        (x86("GenuineIntel", 6, 85, "Intel(R) Xeon(R) CPU", "avx2 avx512f"), "skylake-server"),
        (x86("GenuineIntel", 6, 85, "Intel(R) Xeon(R) CPU", "avx2 avx512f avx512_vnni"), "cascade-lake"),
        (x86("GenuineIntel", 6, 85, "Intel(R) Xeon(R) CPU", "avx512f avx512_vnni avx512_bf16"), "cooper-lake"),
        (x86("GenuineIntel", 6, 151, "12th Gen Intel(R) Core(TM) i7-12700K"), "alder-lake-core-i7-12700k"),
        (x86("GenuineIntel", 6, 1, "Intel(R) Xeon(R) Processor"), "intel-6-1"),
        (x86("GenuineIntel", 19, 1, "Intel(R) Xeon(R) Processor"), "intel-19-1"),
        (arm(("0x41", "0xd0c"), ("0x41", "0xd0c")), "neoverse-n1"),
        (arm(("0x41", "0xd40")), "neoverse-v1"),
        (arm(("0x41", "0xd05"), ("0x41", "0xd0b"), ("0x41", "0xd05")), "cortex-a55-cortex-a76"),
        (arm(("0x61", "0x022"), ("0x61", "0x023")), "apple-m1"),
        (arm(("0x4e", "0x004")), "arm-4e-4"),
        ("processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdc\nuarch\t\t: sifive,u74-mc\n", "sifive-u74-mc"),
        ("", "unknown"),
    ],
)
def test_of_cpuinfo(text: str, name: str) -> None:
    assert processor.of_cpuinfo(text).name == name


def test_the_model_name_is_kept() -> None:
    assert processor.of_cpuinfo(x86("AuthenticAMD", 26, 2, "AMD EPYC")) == processor.Processor("zen5", "AMD EPYC")
    assert processor.of_cpuinfo(arm(("0x41", "0xd0c"))).model == ""


def test_of_a_mac() -> None:
    apple = {"brand_string": "Apple M1 Pro", "core_count": "10"}
    assert processor.of_sysctl(apple) == processor.Processor("apple-m1-pro", "Apple M1 Pro")
    intel = {
        "brand_string": "Intel(R) Xeon(R) W-3223 CPU @ 3.50GHz", "vendor": "GenuineIntel", "family": "6", "model": "85",
        "features": "FPU SSE2", "leaf7_features": "AVX2 AVX512F AVX512_VNNI",
    }  # fmt: skip
    assert processor.of_sysctl(intel).name == "cascade-lake-xeon-w-3223"
    assert processor.of_sysctl({}).name == "unknown"


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sysctl = {
        ("machdep.cpu",): "machdep.cpu.cores_per_package: 8\nmachdep.cpu.brand_string: Apple M2\n",
        ("hw",): "hw.cachelinesize: 128\nhw.l1dcachesize: 65536\nhw.l2cachesize: 4194304\n",
    }
    assert processor.this().name and "/" not in processor.this().name
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(processor, "_output", lambda program, *names: sysctl[names])
    assert processor.this() == processor.Processor("apple-m2", "Apple M2")
    assert processor.last_level_cache() == 4 << 20


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 5})
    assert processor.cores(tmp_path) == 4
    for number, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5")):
        path = tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{siblings}\n")
    assert processor.cores(tmp_path) == 3
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(processor, "_output", lambda *command: "hw.physicalcpu: 8\nhw.perflevel0.physicalcpu: 4\n")
    assert processor.cores() == 4


def test_no_word_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor.this() == processor.Processor("riscv64", "riscv64")


def test_weights_that_no_cache_holds() -> None:
    assert processor.memory_beyond_caches(None) == processor.memory_beyond_caches(32 << 20) == 256 << 20
    assert processor.memory_beyond_caches(260 << 20) == 1040 << 20
