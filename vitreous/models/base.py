"""Base class of all models: input checks, a short repr, and methods with the names of timm and DINOv2.

Shapes: B images, C channels, P prefix tokens, N patch tokens, D width, F features that the head uses, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.nn.encoder import Encoder
from vitreous.nn.no_init import NoInitMode
from vitreous.nn.position import Position
from vitreous.nn.sizes import format_size
from vitreous.system.torch_types import open_to_kinds

Config = TypeVar("Config", bound=ModelConfig, covariant=True)

#: attribute of timm or transformers models -> the equivalent of this package, for error messages
MISSING_ATTRIBUTE_HINTS = {
    "default_cfg": "use model.config, and vitreous.load(RUN).card.preprocess for mean, std and size",
    "pretrained_cfg": "use model.config, and vitreous.load(RUN).card.preprocess for mean, std and size",
    "feature_info": "use model.config.levels; features_at(images, strides) returns these maps",
    "embed_dim": "use model.config.width, or model.num_features for the channels of the head's input",
    "patch_embed": "use model.projection",
    "pos_embed": "use model.position",
    "cls_token": "use model.prefix[0]",
    "get_classifier": "use model.head",
    "save_pretrained": "use vitreous.save(model, FOLDER)",
    "push_to_hub": "use vitreous.push(RUN, 'hf:org/name')",
    "gradient_checkpointing_enable": "use model.set_grad_checkpointing()",
    "get_image_features": "use model.pool(model.features(images))",
}


class VisionModel(nn.Module, Generic[Config]):
    """Base class of image models: `config`, input checks, and methods with the names of other libraries.

    The repr is a summary; `print(torch.nn.Module.__repr__(model))` prints the tree of modules.
    """

    config: Config
    head: nn.Module

    if TYPE_CHECKING:
        any_size: bool

        def __getattr__(self, name: str) -> Any:
            """Return a registered submodule, parameter or buffer. Raises AttributeError otherwise; for attributes of
            timm and transformers models, the message contains the equivalent."""
            ...

        def __call__(self, images: Tensor) -> Tensor:
            """Compute logits: (B, C, *image) -> (B, K)."""
            ...

        def features(self, images: Tensor) -> Tensor:
            """Compute every token after the last norm: (B, C, *image) -> (B, P + N, D)."""
            ...

        def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
            """Compute the maps of these strides, in pixels: (B, C, *image) -> (B, *grid, D) per stride."""
            ...

        def blocks(self) -> list[nn.Module]:
            """Return the residual blocks in order."""
            ...

        def first_layer(self) -> nn.Module:
            """Return the first layer, whose input is the image."""
            ...

        def last_norm(self, x: Tensor) -> Tensor:
            """Apply the norm after the last block: (..., D) -> (..., D)."""
            ...

    else:

        def __call__(self, *arguments, **keywords):
            """Run `forward` with hooks. Raises TypeError for `pixel_values`, the keyword of transformers."""
            if "pixel_values" in keywords:
                raise TypeError(
                    f"{type(self).__name__} takes images, not pixel_values: model(images) returns the logits"
                )
            return super().__call__(*arguments, **keywords)

        def __getattr__(self, name):
            """Return a registered submodule, parameter or buffer. Raises AttributeError otherwise; for attributes of
            timm and transformers models, the message contains the equivalent."""
            if name in MISSING_ATTRIBUTE_HINTS:
                raise AttributeError(f"{type(self).__name__} has no {name}: {MISSING_ATTRIBUTE_HINTS[name]}")
            return super().__getattr__(name)

    @open_to_kinds
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute logits: (B, C, *image) -> (B, K); or the pooled features (B, F) if the model has no head."""
        return self.classify(self.pool(self.features(images)))

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool tokens to the input of the head, here the mean of all tokens: (B, P + N, D) -> (B, F)."""
        return tokens.mean(1)

    def classify(self, pooled: Tensor) -> Tensor:
        """Apply the head: (B, F) -> (B, K)."""
        return self.head(pooled)

    def forward_patches(self, images: Tensor, index: Tensor) -> Tensor:
        """Compute logits from some of the patches: images (B, C, *image), indices of patches (B, k) int64 -> (B, K).

        Models with `config.drops_patches` implement it; others raise NotImplementedError, because they require all
        patches.
        """
        raise NotImplementedError(f"{self.config.name()} requires all patches of an image: patches cannot be dropped")

    @classmethod
    def count_macs(cls, config: Any, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of one forward pass for one image of this size, in pixels.

        Products and convolutions are counted by PyTorch's FlopCounterMode on the meta device.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("meta"), NoInitMode():
            model = cls(config).eval()
        model.any_size = True
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(torch.empty(1, config.channels, *image, device="meta"))
        return counter.get_total_flops() // 2

    @classmethod
    def from_pretrained(cls, *arguments: object, **keywords: object) -> Self:
        """Call `from_pretrained` of another base class, such as `PyTorchModelHubMixin`.

        Raises AttributeError if no base class has it; the message names vitreous.create and vitreous.load instead.
        """
        parent_method = getattr(super(), "from_pretrained", None)
        if parent_method is None:
            problem = f"{cls.__name__} has no from_pretrained: use vitreous.create(weights='hf:ORG/NAME')"
            raise AttributeError(f"{problem}, or vitreous.load('hf:ORG/NAME') with preprocessing and classes")
        return parent_method(*arguments, **keywords)

    def __repr__(self) -> str:
        config, parameter = self.config, self.first_parameter()
        count = sum(parameter.numel() for parameter in self.parameters())
        mode = "training" if self.training else "evaluation"
        lines = [
            f"{config.name()} ({type(self).__name__})",
            f"parameters: {count:,} ({str(parameter.dtype).removeprefix('torch.')}, {parameter.device}, {mode} mode)",
            f"input: images {format_input_shape(config)}, floats, normalised",
            f"blocks: {config.depth}, patches of {format_size(config.patch)} pixels",
            f"features: (B, {config.num_features})",
            f"classes: {config.classes}" if config.classes else "classes: none, outputs features",
        ]
        return "\n  ".join(lines)

    def to_storable(self) -> VisionModel[Any]:
        """Return the model in a form that a bundle can rebuild. Raises UsageError for a wrapped module that no library
        can build."""
        return self

    def check_images(self, images: object) -> None:
        """Check input images.

        Raises TypeError unless they are a tensor of floats, ValueError for a wrong number of axes or channels, and
        UsageError for an unsupported size.
        """
        config = self.config
        axes = len(config.image)
        if not isinstance(images, Tensor) or images.ndim != axes + 2 or images.shape[1] != config.channels:
            raise_image_error(config, images)
        if not images.is_floating_point():
            problem = f"expected floats, got {images.dtype}: scale to [0, 1] and normalise"
            raise TypeError(f"{problem}, as vitreous.load(RUN).transform does, or images.float() / 255")
        if images.dtype == torch.float64 and self.first_parameter().dtype != torch.float64:
            raise TypeError(f"expected {self.first_parameter().dtype}, got torch.float64: use images.float()")
        config.check_image_size(tuple(images.shape[2:]))

    def first_parameter(self) -> Tensor:
        """Return the first parameter, of any shape, whose dtype and device represent the model's; an empty tensor if
        there are no parameters."""
        return next(self.parameters(), torch.empty(0))

    def inspected_backbone(self) -> VisionModel[Any]:
        """Return the model whose attention and features `vitreous.inspection` reads."""
        return self

    def attention_modules(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield the block index, from 0, and the module of every attention that has a method `compute_weights`."""
        for layer, block in enumerate(self.blocks()):
            yield from ((layer, submodule) for submodule in block.modules() if hasattr(submodule, "compute_weights"))

    def position_tables(self) -> dict[str, Position]:
        """Return the modules whose `read(grid)` returns the positions added to patch tokens, by location, such as
        `input`; {} if there are none."""
        return {} if self.config.positions.kind == "none" else {"input": self.position}

    @property
    def num_classes(self) -> int:
        """Return the number of classes of the head; 0 without a head."""
        return self.config.classes

    @property
    def num_features(self) -> int:
        """Return the number F of channels of the head's input (B, F)."""
        return self.config.num_features

    def forward_features(self, images: Tensor) -> Tensor:
        """Compute every token after the last norm, under timm's name: (B, C, *image) -> (B, P + N, D)."""
        return self.features(images)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify tokens, under timm's name: (B, P + N, D) -> (B, K), or (B, F) with `pre_logits`."""
        pooled = self.pool(tokens)
        return pooled if pre_logits else self.classify(pooled)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Compute the features and the patch tokens after each block of `indices`, as timm does: (B, C, *image) ->
        (B, P + N, D), [(B, D, *grid), ...].

        - `indices` count blocks from 0, or from -1 backwards; an integer selects that number of last blocks, None all
          blocks. Models with stages (Swin, BiT, ViT-Adapter) count stages.
        - `norm` applies the last norm to the tokens of each block.
        - `output_fmt="NLC"` returns patch tokens as (B, N, D).
        - `intermediates_only` omits the features.

        Raises ValueError for an unknown index or format, NotImplementedError for a dense or detection model.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        maps = [tokens for tokens, _ in self.intermediate_tokens(images, indices, norm)]
        maps = [x.movedim(-1, 1) if output_fmt == "NCHW" else x.flatten(1, -2) for x in maps]
        return maps if intermediates_only else (self.features(images), maps)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        norm: bool = True,
    ) -> tuple[Tensor, ...] | tuple[tuple[Tensor, Tensor], ...]:
        """Compute the patch tokens (B, N, D) after the last `n` blocks, or after the blocks of these indices, as DINOv2
        does, from images (B, C, *image).

        With `reshape` they are (B, D, *grid). With `return_class_token` each entry is a pair with the class token
        (B, D). Raises the errors of `forward_intermediates`, and ValueError for the class token of a model without one.
        """
        layers = self.intermediate_tokens(images, n, norm)
        patches = [x.movedim(-1, 1) if reshape else x.flatten(1, -2) for x, _ in layers]
        if not return_class_token:
            return tuple(patches)
        if not self.config.class_token:
            raise ValueError(f"{self.config.name()} has no class token: leave out return_class_token")
        return tuple((x, prefix[:, 0]) for x, (_, prefix) in zip(patches, layers, strict=True))

    def intermediate_tokens(
        self, images: Tensor, indices: int | Sequence[int] | None, norm: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute patch tokens (B, *grid, D) and prefix tokens (B, P, D) after the blocks, or stages, of these indices,
        from images (B, C, *image).

        `indices` and `norm` are as in `forward_intermediates`. Raises ValueError for an unknown index,
        NotImplementedError for a model without intermediate features.
        """
        config = self.config
        features_after: Any = getattr(self, "features_after", None)
        if not hasattr(self, "features_at"):
            raise NotImplementedError(f"{type(self).__name__} has no intermediate features: use those of its backbone")
        if features_after is None or config.has_stages:
            strides = [config.strides[i] for i in resolve_block_indices(len(config.strides), indices)]
            maps = self.features_at(images, strides)
            last_stride = config.strides[-1]
            maps = [
                self.last_norm(x) if norm and stride == last_stride else x
                for x, stride in zip(maps, strides, strict=True)
            ]
            return [(x, x.new_empty(len(x), 0, x.shape[-1])) for x in maps]
        outputs = features_after(images, [i + 1 for i in resolve_block_indices(config.depth, indices)])
        outputs = [self.last_norm(x) for x in outputs] if norm else outputs
        grid = tuple(length // patch for length, patch in zip(images.shape[2:], config.patch, strict=True))
        prefix = config.prefix
        return [(x[:, prefix:].unflatten(1, grid), x[:, :prefix]) for x in outputs]

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by a new head for `num_classes` classes, whose weights are 0; with 0 classes the model
        outputs features.

        Raises UsageError for a model without an image classification head.
        """
        build_head = getattr(self, "build_head", None)
        if build_head is None:
            hint = "create a new model: vitreous.create(NAME, num_classes=N)"
            raise UsageError(f"the head of {self.config.name()} does not classify images", hint)
        parameter = self.first_parameter()
        self.config = replace_known_fields(self.config, {"classes": num_classes})
        self.head = build_head().to(parameter.device, parameter.dtype).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable gradient checkpointing: training stores only the input of each block and recomputes the
        block in the backward pass.

        Raises UsageError for a model that does not support it (BiT, models of other libraries).
        """
        encoders = [submodule for submodule in self.modules() if isinstance(submodule, Encoder)]
        if not encoders and enable:
            raise UsageError(f"{self.config.name()} does not support gradient checkpointing", "use smaller batches")
        for encoder in encoders:
            encoder.recompute = enable


def zero_parameters(module: nn.Module) -> nn.Module:
    """Set all parameters of a module to 0, and return the module."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def linear_head(width: int, classes: int) -> nn.Module:
    """Build a linear head (B, width) -> (B, classes) whose weights are 0; with 0 classes, the identity."""
    return zero_parameters(nn.Linear(width, classes)) if classes else nn.Identity()


def format_input_shape(config: ModelConfig) -> str:
    """Format the shape of a model's input, such as `(B, 3, 224, 224)`."""
    return f"({', '.join(map(str, ('B', config.channels, *config.image)))})"


def raise_image_error(config: ModelConfig, images: object) -> NoReturn:
    """Raise TypeError or ValueError for inputs that are not (B, C, *image); the message contains the conversion that
    fixes them."""
    expected = f"expected images {format_input_shape(config)}"
    if not isinstance(images, Tensor):
        problem = f"{expected}, a torch.Tensor, got {type(images).__module__}.{type(images).__qualname__}"
        raise TypeError(f"{problem}: vitreous.load(RUN).transform(image)[None] creates one")
    shape, axes, channels = tuple(images.shape), len(config.image), config.channels
    problem = f"{expected}, got {shape}"
    if len(shape) == axes + 1 and shape[0] == channels:
        raise ValueError(f"{problem}; add a batch axis: images[None]")
    if len(shape) == axes + 1 and shape[-1] == channels:
        raise ValueError(f"{problem}; put channels first and add a batch axis: images.movedim(-1, 0)[None]")
    if len(shape) == axes + 2 and shape[-1] == channels:
        raise ValueError(f"{problem}; put channels first: images.movedim(-1, 1)")
    if len(shape) == axes + 2:
        problem = f"{problem}: the model takes {channels} channels, the images have {shape[1]}"
        raise ValueError(f"{problem}; convert them, or vitreous.create(…, channels={shape[1]})")
    raise ValueError(f"{problem}; pass {axes + 2} axes, batch and channels first")


def resolve_block_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Convert a selection of `count` blocks to indices from 0.

    `indices` are None (all blocks), a number of last blocks, or indices that may be negative. Raises ValueError for
    other values.
    """
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):
        if not 0 < indices <= count:
            raise ValueError(f"cannot take the last {indices} of {count} blocks: use 1 to {count}")
        return list(range(count - indices, count))
    if out_of_range := [index for index in indices if not -count <= index < count]:
        raise ValueError(f"there is no block {out_of_range[0]}: use {-count} to {count - 1}")
    return [index % count for index in indices]
