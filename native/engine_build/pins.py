"""What the build downloads: names, versions and hashes, all in one place.

A hash here is the only thing that makes a download acceptable: changing a version means changing its hash too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegistryFile:
    """One file on the Python package registry, fetched through pip with its hash required."""

    name: str
    version: str
    sha256: str
    # Target interpreter and platform of a wheel; None for an sdist. They describe the file, not the user's Python.
    python: str | None = None
    abi: str | None = None
    platform: str | None = None

    @property
    def is_wheel(self) -> bool:
        return self.platform is not None

    @property
    def requirement(self) -> str:
        """The line of a pip requirements file that accepts this file and no other."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


# The last release whose library has the ZenDNN C API. The release is yanked upstream (superseded), which an exact
# `==` pin still resolves. The wheel is only unpacked: zentorch is neither installed nor imported.
ZENTORCH_WHEEL = RegistryFile(
    name="zentorch",
    version="5.1.0",
    sha256="656e2a989ee42c7757e0c67b9b10699a96eb21601250d6799ea5ae6fca035fcc",
    python="3.11",
    abi="cp311",
    platform="manylinux_2_28_x86_64",
)
ZENTORCH_LIBRARY = "zentorch/libzentorch.so"
ZENTORCH_LIBRARY_SHA256 = "89b5c9daa4248ffb9e2aaa6193bd7f177df2ceddb753c3aedb00b00a1729de37"
ZENTORCH_ZENDNN_VERSION = "5.1.0"

# BLIS 0.7.0 with its configured headers and recorded compile lines, for ZENDNN_CFFI_BLIS=sdist.
BLIS_SDIST = RegistryFile(
    name="blis",
    version="1.3.4",
    sha256="c125acd77ccf0184f476b6a599f9819727e19ed311904ed3281118a3d06082d9",
)
BLIS_SDIST_BLIS_VERSION = "0.7.0"

# The source provider clones these tags where third_party/ holds no tree.
BLIS_REPOSITORY = "https://github.com/amd/blis.git"
BLIS_TAG = "5.1"
ZENDNN_REPOSITORY = "https://github.com/amd/ZenDNN.git"
ZENDNN_TAG = "v5.1"

# What to install where LIEF cannot be imported (a stand-alone CMake build outside pip's build isolation).
LIEF_REQUIREMENT = "lief>=0.16.2,<2"
