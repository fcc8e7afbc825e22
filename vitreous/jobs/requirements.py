"""What an installation of this package lacks, by its own list of requirements, and the command that adds it."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vitreous.errors import install_hint

PACKAGE_NAME = "vitreous"
#: extra -> what it is for; "test", "dev" and "all" are made of these; "lint" is for developers
EXTRA_PURPOSES = {
    "": "the package itself",
    "data": "faster JPEGs, TIFF stacks and spectral images",
    "geotiff": "GeoTIFF files with LZW, Zstandard and other compressions",
    "heif": "HEIC photographs of phones",
    "dense": "mean average precision as COCO has it",
    "datasets": "Parquet files and data sets of the Hub",
    "export": "ONNX, OpenVINO, int8",
    "gen": "autoencoders of latents, Frechet distance",
    "hub": "hf: and timm: names, push",
    "lora": "train --lora",
    "mlflow": "train --log-to mlflow",
    "ray": "clusters",
    "serve": "the page and the HTTP server",
    "tensorboard": "train --log-to tensorboard",
    "timm": "train --model timm:NAME",
    "transformers": "train --model hf:FOLDER",
    "video": "films as clips",
    "volumes": "NIfTI volumes",
    "wandb": "train --log-to wandb",
}


def find_missing_requirements(requirements: list[str] | None = None) -> dict[str, list[str]]:
    """Extra -> the requirements of it that are not installed, or too old, as `starlette>=1.0`; "" is the package
    itself. Every extra is a key. `requirements`: lines as a package's metadata has them (default: this package's)."""
    from packaging.requirements import Requirement

    lines = metadata.requires(PACKAGE_NAME) if requirements is None else requirements
    missing: dict[str, list[str]] = {extra: [] for extra in EXTRA_PURPOSES}
    for requirement in map(Requirement, lines or []):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            extras = [""]
        else:
            extras = [extra for extra in EXTRA_PURPOSES if extra and marker.evaluate({"extra": extra})]
        for extra in extras:
            if not is_installed(requirement):
                missing[extra].append(f"{requirement.name}{requirement.specifier}")
    return missing


def is_installed(requirement: Any) -> bool:
    """Whether a distribution is there in a version that a requirement takes."""
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def build_install_commands(missing: dict[str, list[str]]) -> list[str]:
    """The command that installs all that is missing; where a GPU is there and PyTorch cannot use it, one for that.

    They name this very Python, so that nothing else is changed."""
    extras = [extra for extra, absent in missing.items() if absent and extra]
    pip = f"{shlex.quote(sys.executable)} -m pip"
    lines = []
    if extras or missing.get(""):
        lines.append(install_hint(*extras, pip=pip))
    if lacks_cuda():
        lines.append(f"{pip} install --force-reinstall torch torchvision")
    return lines


def lacks_cuda() -> bool:
    """Whether an NVIDIA GPU is there, and PyTorch is a build without CUDA."""
    import torch

    return Path("/dev/nvidia0").exists() and torch.version.cuda is None and torch.version.hip is None
