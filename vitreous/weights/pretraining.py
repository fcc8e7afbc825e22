"""What others' files of pre-training hold beside the encoder: MAE's decoder, and the head of DINO's teacher.

| file | signs | what is read beside the encoder |
|---|---|---|
| MAE, `*_full.pth` | `decoder_embed.weight` | the decoder; its positions are fixed, and made anew |
| transformers' ViTMAEForPreTraining | `decoder.decoder_embed.weight` | the same |
| DINO, the training file | `head.last_layer.weight_v` | the teacher's head, which the student starts from as well |

d width of the decoder, p and q a patch's sides in pixels, C channels, K prototypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitreous.errors import WeightsError
from vitreous.models.config import ViTConfig
from vitreous.weights.entry import shown
from vitreous.weights.files import Source, open_weights
from vitreous.weights.foreign import DetectedCheckpoint, unwrapped
from vitreous.weights.parts import ObjectiveParts
from vitreous.weights.table import Row, TensorTransform, blocks, map_each, row, table

HEAD_WIDTH = 32  # channels of a decoder's head of attention, as published: 512 of 16
#: fields of MAE's config -> those of transformers' config.json
SETTINGS = {"decoder_heads": "decoder_num_attention_heads", "normalise": "norm_pix_loss", "mask": "mask_ratio"}


def decoder_row(one: Row) -> Row:
    """The row of an encoder's tensor, as that of a decoder's."""
    return replace(one, ours=tuple(f"decoder.{name}" for name in one.ours))


def channels_first(weight: Tensor, config: ViTConfig) -> Tensor:
    """(p q C, ...) rows with the channels last -> (C p q, ...)."""
    return (
        weight.unflatten(0, (*config.patch, config.channels))
        .movedim(len(config.patch), 0)
        .flatten(0, len(config.patch))
    )


def channels_last(weight: Tensor, config: ViTConfig) -> Tensor:
    """(C p q, ...) rows with the channels first -> (p q C, ...)."""
    return (
        weight.unflatten(0, (config.channels, *config.patch))
        .movedim(0, len(config.patch))
        .flatten(0, len(config.patch))
    )


#: (1, 1, d) and (d,)
LONE = TensorTransform(map_each(lambda t: t.flatten()), map_each(lambda t: t[None, None]))
#: the layer that gives pixels, and its bias
PIXELS = TensorTransform(lambda theirs, c: [channels_first(theirs[0], c)], lambda ours, c: [channels_last(ours[0], c)])


@dataclass(frozen=True)
class PartsFormat:
    """Where the parts of an objective lie in a file: `rows` of names, and the objective's config by the shapes.

    `title` is what people call them.
    `sign`: the name that no other file has. `layer`: a pattern of a block's names with its number. `owned`: a pattern
    of the names that are parts; of these `ignored` are left alone, and `optional` may be missing. `twins`: our names
    begin with the first, and each other gets the same.
    """

    title: str
    sign: str
    rows: tuple[Row, ...]
    configure: Callable[[dict[str, tuple[int, ...]]], dict[str, Any]]
    layer: str
    owned: str
    ignored: str = ""
    optional: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    def groups(self, names: set[str], config: Any) -> list[tuple[list[str], list[str], TensorTransform]]:
        """Our names, theirs and the transform of each group of tensors of a file that has blocks as `names` say."""
        numbers = {match[1] for name in names if (match := re.match(self.layer, name))}
        groups = []
        for one in self.rows:
            theirs = one.theirs(config) if callable(one.theirs) else one.theirs
            for i in sorted(numbers) if "{i}" in theirs[0] else [""]:
                for x in ("weight", "bias") if "{x}" in theirs[0] else [""]:
                    holes = {"i": i, "x": x, "part": ""}
                    others = [name.format(**holes) for name in theirs]
                    if others[0] in names or others[0] not in self.optional:
                        groups.append(([name.format(**holes) for name in one.ours], others, one.fold))
        return groups


def decoder(prefix: str, names: dict[str, str], layers: tuple[Row, ...]) -> PartsFormat:
    """The format of a decoder whose names begin with `prefix`."""
    word = re.escape(prefix)
    return PartsFormat(
        "MAE's decoder",
        f"{prefix}decoder_embed.weight",
        (
            row("decoder.mask_token", names["mask"], LONE),
            row("decoder.head.{x}", f"{prefix}decoder_pred.{{x}}", PIXELS),
            *table(
                f"decoder.embed.{{x}} = {prefix}decoder_embed.{{x}}",
                f"decoder.encoder.norm.{{x}} = {prefix}decoder_norm.{{x}}",
            ),
            *map(decoder_row, layers),
        ),
        lambda shapes: decoder_config(shapes, prefix, names["layer"]),
        rf"{re.escape(names['layer'])}\.(\d+)\.",
        rf"{word}decoder_.*|{re.escape(names['mask'])}",
        rf"{word}decoder_pos_embed",
    )


def decoder_config(shapes: dict[str, tuple[int, ...]], prefix: str, layer: str) -> dict[str, Any]:
    """The config of MAE with the decoder of these shapes; heads as published."""
    width = shapes[f"{prefix}decoder_embed.weight"][0]
    depth = len({match[1] for name in shapes if (match := re.match(rf"{re.escape(layer)}\.(\d+)\.", name))})
    return {"name": "mae", "decoder_width": width, "decoder_depth": depth, "decoder_heads": max(1, width // HEAD_WIDTH)}


def head_config(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config of DINO with the head of these shapes."""
    prototypes, bottleneck = shapes["head.last_layer.weight_v"]
    layers = sorted(int(match[1]) for name in shapes if (match := re.fullmatch(r"head\.mlp\.(\d+)\.weight", name)))
    return {
        "name": "dino",
        "prototypes": prototypes,
        "bottleneck": bottleneck,
        "head_layers": len(layers),
        "head_width": shapes[f"head.mlp.{layers[0]}.weight"][0],
    }


FORMATS = (
    decoder(
        "decoder.",
        {"mask": "decoder.mask_token", "layer": "decoder.decoder_layers"},
        blocks(
            "decoder.decoder_layers.{i}",
            ("layernorm_before", "layernorm_after"),
            "attention.attention.query attention.attention.key attention.attention.value",
            "attention.output.dense",
            ("intermediate.dense", "output.dense"),
        ),
    ),
    decoder(
        "",
        {"mask": "mask_token", "layer": "decoder_blocks"},
        blocks("decoder_blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2")),
    ),
    PartsFormat(
        "DINO's head",
        "head.last_layer.weight_v",
        (
            Row(("head.mlp.{i}.{x}",), ("head.mlp.{i}.{x}",)),
            *table("head.prototypes.weight = head.last_layer.weight_v", "head.lengths = head.last_layer.weight_g"),
        ),
        head_config,
        r"head\.mlp\.(\d+)\.",
        r"head\.(mlp|last_layer)\..*",
        optional=("head.last_layer.weight_g",),
        twins=("head.", "teacher_head."),
    ),
)


def plain(name: str) -> str:
    """A name in a file without what wrappers put in front; transformers 5 has another for a decoder's blocks."""
    name = unwrapped(name).removeprefix("backbone.").removeprefix("vit.")
    return name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers.")


def read_parts(checkpoint: DetectedCheckpoint) -> ObjectiveParts | None:
    """Read the parts of an objective that lie beside an encoder; None where there are none that are known. Raises
    WeightsError for those that are not as their kind is, listing them."""
    sources = {id(source): source for source, _, _ in checkpoint.names.values()}.values()
    places: dict[str, tuple[Source, str]] = {}
    for source in sources:
        for name in source.entries:
            places[plain(name)] = (source, name)
    form = next((form for form in FORMATS if form.sign in places), None)
    if form is None:
        return None
    config: Any = checkpoint.config
    owned = {name for name in places if re.fullmatch(form.owned, name)}
    left = {name for name in owned if form.ignored and re.fullmatch(form.ignored, name)}
    shapes = {name: places[name][0].entries[places[name][1]].shape for name in owned}
    groups = form.groups(owned - left, config)
    expected = {name for _, theirs, _ in groups for name in theirs}
    wrong = [f"missing {name}" for name in expected - owned]
    wrong += [f"unknown {shown(name)}" for name in owned - left - expected]
    if wrong:
        listing = "".join(f"\n    {line}" for line in sorted(wrong)[:20])
        raise WeightsError(f"{next(iter(sources)).path} has parts of {form.title} that do not fit together:{listing}")
    state: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for source in sources:  # each is read once
        mine = {name: places[name][1] for name in expected & owned if places[name][0] is source}
        read = source.read(mine.values())
        tensors |= {name: read[theirs].float() for name, theirs in mine.items()}
    for ours, theirs, fold in groups:
        folded = fold.into([tensors[name] for name in theirs], config)
        state |= {name: tensor.contiguous() for name, tensor in zip(ours, folded, strict=True)}
    settings = form.configure(shapes)
    if form.twins:
        state, settings = plain_head(state), settings | {"unit_prototypes": is_unit(state)}
    for twin in form.twins[1:]:
        state |= {twin + name.removeprefix(form.twins[0]): tensor.clone() for name, tensor in state.items()}
    return ObjectiveParts(settings, state)


def is_unit(state: dict[str, Tensor]) -> bool:
    """Whether DINO's prototypes, `head.lengths` (K, 1), have length one throughout (`norm_last_layer`)."""
    lengths = state.get("head.lengths")
    return lengths is None or bool((lengths == 1).all())


def plain_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """DINO's head with its layers numbered without the activations between them, and without fixed lengths; shapes as
    they are."""
    names = {
        name: re.sub(r"^head\.mlp\.(\d+)\.", lambda match: f"head.mlp.{int(match[1]) // 2}.", name) for name in state
    }
    return {names[name]: tensor for name, tensor in state.items() if name != "head.lengths" or not is_unit(state)}


def parts_beside(
    files: list[Path], beside: dict[str, Any], find: Callable[[], DetectedCheckpoint]
) -> ObjectiveParts | None:
    """The parts in weights files of a known format, which `find` opens, with what transformers' config.json `beside`
    tells of them; None where no file has any. Raises WeightsError."""
    names = {plain(name) for path in files for name in open_weights(path).entries}
    if not any(form.sign in names for form in FORMATS):
        return None
    parts = read_parts(find())
    if parts is None or parts.config["name"] != "mae":
        return parts
    settings = {ours: beside[theirs] for ours, theirs in SETTINGS.items() if theirs in beside}
    return ObjectiveParts(parts.config | settings, parts.state)
