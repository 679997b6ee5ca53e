"""Conan 2 recipe: `conan create packaging/conan -o torch=/path/to/libtorch`.

Conan Center has no libtorch of the versions that Lockstep needs, so that one comes by path: a folder that holds torch/
(site-packages, for one) or an unpacked libtorch. Without it the rooms that need none are built: the launcher and core.
"""
import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class LockstepRecipe(ConanFile):
    name = "lockstep"
    description = "Data-parallel training of libtorch models from C++"
    license = "Apache-2.0"
    topics = ("deep-learning", "distributed", "libtorch")
    package_type = "shared-library"
    settings = "os", "compiler", "build_type", "arch"
    options = {"torch": ["ANY"]}
    default_options = {"torch": ""}
    requires = ("cli11/2.3.2", "fmt/9.1.0", "libjpeg/9e", "libpng/1.6.43", "nlohmann_json/3.11.2", "openssl/3.2.2",
                "yaml-cpp/0.7.0", "zlib/1.3.1")

    def set_version(self):
        text = (pathlib.Path(self.recipe_folder) / "../../CMakeLists.txt").read_text()
        self.version = re.search(r"project\(lockstep VERSION ([\d.]+)", text)[1]

    def export_sources(self):
        root = str(pathlib.Path(self.recipe_folder) / "../..")
        for what in "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*", "tools/*":
            copy(self, what, root, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for off in "WERROR", "TESTS", "EXAMPLES", "BENCHMARKS":
            toolchain.cache_variables[f"LOCKSTEP_{off}"] = False
        toolchain.cache_variables["LOCKSTEP_TORCH"] = bool(self.options.torch)
        if self.options.torch:
            toolchain.cache_variables["LOCKSTEP_TORCH_DIR"] = str(self.options.torch)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # The package has its own lockstepConfig.cmake, which also finds libtorch.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append("lib/cmake/lockstep")
