"""The wheel holds a copy of ggml-patch/, so that ``gguf-itq3s build`` works without a checkout; pyproject.toml has the
rest."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
#: What the build reads; where it stands in the package.
PARTS = ("CMakeLists.txt", "cmake/*.cmake", "cmake/*.py", "patches/**/*.patch", "src/**/*")
PACKAGED = "gguf_itq3s/ggml_patch"


class BuildWithPatch(build_py):
    """Copies the files when a wheel is built, and names them when a source distribution is; an editable install reads
    them where they are."""

    def patch_files(self) -> list[Path]:
        folder = ROOT / "ggml-patch"
        return sorted(path for part in PARTS for path in folder.glob(part) if path.is_file())

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in self.patch_files():
                copy = Path(self.build_lib) / PACKAGED / path.relative_to(ROOT / "ggml-patch")
                self.mkpath(str(copy.parent))
                self.copy_file(str(path), str(copy), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(str(path.relative_to(ROOT)) for path in self.patch_files())]


setup(cmdclass={"build_py": BuildWithPatch})
