"""From latents to pictures, by the decoder of the autoencoder that they are of (extra `gen`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import UsageError, WeightsError
from vitreous.weights.fetch import fetch

FILES = "config.json and diffusion_pytorch_model.safetensors, as diffusers saves an AutoencoderKL"


def open_decoder(place: str | os.PathLike[str], channels: int, device: str = "cpu") -> Callable[[Tensor], Tensor]:
    """Return what decodes latents (b, C, h, w) float32 into pictures (b, 3, H, W) uint8, of the AutoencoderKL in a
    folder or at `hf:org/name`, whose config tells by what latents are scaled and shifted.

    Raises UsageError where diffusers is not installed and for an autoencoder of other channels, WeightsError for a
    folder without one.
    """
    try:
        from diffusers import AutoencoderKL  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise UsageError("latents are decoded by diffusers", "pip install 'vitreous[gen]'") from None
    path = fetch(os.fspath(place))
    if not (path / "config.json").is_file():
        raise WeightsError(f"{place} is no folder with an autoencoder", f"it has {FILES}")
    try:
        vae: Any = AutoencoderKL.from_pretrained(path, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise WeightsError(f"{place} holds no autoencoder that diffusers reads ({reason})", f"it has {FILES}") from None
    own = vae.config.latent_channels
    if own != channels:
        raise UsageError(
            f"{place} decodes latents of {own} channels, and the model makes {channels}",
            "name the autoencoder that the model was trained with",
        )
    vae, scale, shift = vae.to(device).eval(), vae.config.scaling_factor, vae.config.shift_factor or 0.0

    @torch.inference_mode()
    def decode(latents: Tensor) -> Tensor:
        rows = latents.to(device) / scale + shift
        pictures = [vae.decode(row).sample.float().cpu() for row in rows.split(1)]
        return ((torch.cat(pictures) + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8)

    return decode
