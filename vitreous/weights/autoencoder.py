"""Convert between images and latents with an autoencoder of diffusers (extra `gen`)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.keys import derive_keys, draw_normal
from vitreous.data.latents import Latents
from vitreous.errors import UsageError, WeightsError, install_hint
from vitreous.weights.fetch import fetch_weights

AUTOENCODER_FILES = "config.json and diffusion_pytorch_model.safetensors, as diffusers saves an AutoencoderKL"
POSTERIOR_SEED_SALT = 0x706F7374  # separates the posterior's random draws from others


class Autoencoder:
    """An AutoencoderKL of diffusers, from a folder or `hf:org/name`; its config defines scale and shift of the latents.
    `channels`: number of latent channels. `latents`: source, scale, shift and stride. Raises UsageError if diffusers is
    not installed, WeightsError for a folder without an autoencoder."""

    def __init__(self, source: str | os.PathLike[str], device: str = "cpu") -> None:
        try:
            from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        except ImportError:
            raise UsageError(
                "latent autoencoders need diffusers, which is not installed", install_hint("gen")
            ) from None
        path = fetch_weights(os.fspath(source))
        if not (path / "config.json").is_file():
            raise WeightsError(f"{source} is not an autoencoder folder", f"use a folder with {AUTOENCODER_FILES}")
        try:
            vae: Any = AutoencoderKL.from_pretrained(path, use_safetensors=True, local_files_only=True)
        except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            reason, hint = str(error).splitlines()[0][:200], f"use a folder with {AUTOENCODER_FILES}"
            raise WeightsError(f"diffusers cannot read an autoencoder from {source} ({reason})", hint) from None
        self.vae, self.device = vae.to(device).eval(), device
        self.channels: int = vae.config.latent_channels
        name = os.fspath(source) if os.fspath(source).startswith("hf:") else os.fspath(path.absolute())
        stride = 2 ** (len(vae.config.block_out_channels) - 1)
        self.latents = Latents(name, vae.config.scaling_factor, vae.config.shift_factor or 0.0, stride)

    def require_channels(self, channels: int) -> None:
        """Raise UsageError if the model's latents have another number of channels."""
        if self.channels != channels:
            problem = f"{self.latents.autoencoder} has {self.channels} latent channels, but the model needs {channels}"
            raise UsageError(problem, "use the autoencoder that the model was trained with")

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray, seed: int) -> np.ndarray:
        """Encode an image (H, W, 3) uint8 to latents (h, w, channels) float32, before scale and shift. The latents are
        a sample of the posterior, determined by the seed."""
        image = torch.from_numpy(pixels.copy()).to(self.device).movedim(-1, 0)[None] / 127.5 - 1
        posterior = self.vae.encode(image).latent_dist
        noise = torch.from_numpy(
            draw_normal(derive_keys(POSTERIOR_SEED_SALT, np.array([seed])), tuple(posterior.mean.shape[1:]))
        )
        sample = posterior.mean + posterior.std * noise.to(posterior.mean)
        return sample[0].movedim(0, -1).float().cpu().numpy()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (b, channels, h, w) float32, which are scaled and shifted, to images (b, 3, H, W) uint8."""
        unscaled = latents.to(self.device) / self.latents.scale + self.latents.shift
        images = [self.vae.decode(latent).sample.float().cpu() for latent in unscaled.split(1)]
        return ((torch.cat(images) + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8)
