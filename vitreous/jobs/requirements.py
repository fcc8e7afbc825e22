"""Find the requirements of this package that are not installed, and the commands that install them."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vitreous.errors import install_hint

PACKAGE_NAME = "vitreous"
#: extra -> its purpose. Not listed: "test", "dev" and "all", which combine these, and "lint", which is for developers
EXTRA_PURPOSES = {
    "": "the package itself",
    "data": "faster JPEGs, TIFF stacks and spectral images",
    "geotiff": "GeoTIFF files with LZW, Zstandard and other compressions",
    "heif": "HEIC photographs of phones",
    "dense": "mean average precision (COCO)",
    "datasets": "Parquet files and datasets of the Hub",
    "export": "ONNX, OpenVINO, int8",
    "gen": "latent autoencoders, Frechet distance",
    "hub": "hf: and timm: names, push",
    "lora": "train --lora",
    "mlflow": "train --log-to mlflow",
    "ray": "clusters",
    "serve": "web page and HTTP server",
    "tensorboard": "train --log-to tensorboard",
    "text": "texts for CLIP and SigLIP",
    "timm": "train --model timm:NAME",
    "transformers": "train --model hf:FOLDER",
    "video": "video files as clips",
    "volumes": "NIfTI volumes",
    "wandb": "train --log-to wandb",
}


def find_missing_requirements(requirements: list[str] | None = None) -> dict[str, list[str]]:
    """Return, for each extra, its requirements that are not installed or too old, such as `starlette>=1.0`.

    Every extra is a key; "" is the package itself. `requirements` are lines in the form of package metadata; None for
    those of this package.
    """
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
    """Return whether a package is installed in a version that satisfies a requirement
    (`packaging.requirements.Requirement`)."""
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def build_install_commands(missing: dict[str, list[str]]) -> list[str]:
    """Build the commands that install the missing requirements of `find_missing_requirements`. If the machine has a
    GPU, but PyTorch is built without CUDA, add a command that reinstalls PyTorch.

    The commands start with the path of this Python, so that they cannot change another environment.
    """
    extras = [extra for extra, missing_requirements in missing.items() if missing_requirements and extra]
    pip = f"{shlex.quote(sys.executable)} -m pip"
    commands = []
    if extras or missing.get(""):
        commands.append(install_hint(*extras, pip=pip))
    if lacks_cuda():
        commands.append(f"{pip} install --force-reinstall torch torchvision")
    return commands


def lacks_cuda() -> bool:
    """Return whether the machine has an NVIDIA GPU, but PyTorch is built without CUDA."""
    import torch

    return Path("/dev/nvidia0").exists() and torch.version.cuda is None and torch.version.hip is None
