"""Description of a foreign weights format: a table of tensor names, and the transforms between its tensors and ours.

"Ours" (native) are the tensors of this package's models, "theirs" (foreign) those of the format's files. A `RenameRule`
pairs our names with theirs; names contain placeholders:

    {i} {s} {j}   a number: block, stage, unit; in their names {I} {S} {J} count from one, and {JJ} has two digits
    {x}           weight or bias
    {part}        empty, or the `.part` of a block with windows

A table is used in both directions, so that reading inverts writing: `fold.into` converts their tensors to ours,
`fold.to_foreign` ours to theirs. The expected shapes of a file are those of `to_foreign` applied to our model's
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Set
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig, SwinConfig, ViTConfig
from vitreous.models.configs.base import PixelScaling

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Names = tuple[str, ...] | Callable[[Any], tuple[str, ...]]

NAME_PLACEHOLDERS = {"i": r"\d+", "s": r"\d+", "j": r"\d+", "x": "weight|bias", "part": r"(?:\.part)?"}


@dataclass(frozen=True)
class TensorTransform:
    """Convert a group of their tensors to ours (`to_native`) and back (`to_foreign`). Both take the tensors, in
    the order of the rule's names, and the config."""

    to_native: Callable[[list[Tensor], Any], list[Tensor]]
    to_foreign: Callable[[list[Tensor], Any], list[Tensor]]


COPY_TRANSFORM = TensorTransform(lambda theirs, c: theirs, lambda ours, c: ours)


@dataclass(frozen=True)
class RenameRule:
    """Our names of a group of tensors, their names, and the transform between them. `theirs` may be a function of the
    config. Names that a model lacks are skipped."""

    ours: tuple[str, ...]
    theirs: Names
    transform: TensorTransform = COPY_TRANSFORM


@dataclass(frozen=True)
class WeightsFormat:
    """A layout of weights files.

    `signature`: names of tensors that must all exist, and that identify the format among the later ones in the list.
    `configure` infers the config from the shapes and from settings. `ignored`: patterns of tensors outside the encoder
    (decoders, text towers), which are skipped and reported. `strip`: possible name prefixes. `scope`: if some names
    start with one of these, the first that does, other names belong to another tower or an optimiser's state and are
    skipped. `can_represent`: whether the format can represent a config. `shaped`: gives a tensor the shape in files, by
    its name, where singleton axes differ. `sections`: keys of a pickled file; if set, the state dict must be under one
    of them, and no name of `excluded_names` may exist. `describe_ambiguity`: if files do not determine the position
    resize rule, a description of the assumed rule and its alternatives. `facts`: small tensors whose values `configure`
    needs; if a file has them, its settings contain them under this key.
    """

    name: str
    title: str
    signature: tuple[str, ...]
    rules: tuple[RenameRule, ...]
    _: KW_ONLY
    configure: Callable[[Shapes, dict[str, Any]], ModelConfig]
    ignored: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    can_represent: Callable[[Any], bool] = lambda config: True
    suffix: str = ".safetensors"
    prefix: Callable[[Any], str] = lambda config: ""  # prefix of the names when they are written
    unprefixed_names: tuple[str, ...] = ()  # prefixes of names that do not get this prefix: heads
    describe: Callable[[Any], dict[str, Any]] | None = None  # builds the config.json of the weights
    file_in_folder: str = "model.safetensors"  # file name in a folder with config.json
    # names and shapes of tensors that the format's loaders require and our models lack: written as zeros
    adds: Callable[[Any], Shapes] = lambda config: {}
    # tensors that the format's loaders require and that follow from the config: written, and skipped in reading
    buffers: Callable[[Any], Tensors] = lambda config: {}
    shaped: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    sections: tuple[str, ...] = ()
    excluded_names: tuple[str, ...] = ()
    describe_ambiguity: Callable[[Any], str] = lambda config: ""
    facts: tuple[str, ...] = ()
    determines: tuple[str, ...] = ()  # config fields that no shape of a parameter determines, but the files do
    # default pixel statistics of training; None: from the config
    get_pixel_scaling: Callable[[Any], PixelScaling | None] = lambda config: None
    # describes assumed settings that files lack, given the names of fields that are set elsewhere
    assumes: Callable[[Any, Container[str]], Iterable[str]] = lambda config, known: ()

    def group_tensors(
        self, config: ModelConfig, names: Iterable[str]
    ) -> Iterator[tuple[list[str], list[str], TensorTransform]]:
        """Group the tensors of a model by rule, and yield our names, their names and the transform of each group.
        Raises LookupError for a tensor without a rule."""
        names = list(names)
        our_names, done = set(names), set()
        for name in names:
            if name in done:
                continue
            rule, placeholders = self.find_rule(name)
            ours = [name for name in (template.format(**placeholders) for template in rule.ours) if name in our_names]
            done |= set(ours)
            theirs = rule.theirs(config) if callable(rule.theirs) else rule.theirs
            yield ours, [template.format(**placeholders) for template in theirs], rule.transform

    def find_rule(self, name: str) -> tuple[RenameRule, dict[str, str]]:
        """Return the rule that contains one of our names, and the values of the placeholders in the name. Raises
        LookupError if there is none."""
        for rule in self.rules:
            for template in rule.ours:
                match = compile_name_template(template).fullmatch(name)
                if match:
                    placeholders = match.groupdict()
                    indices = {key.upper(): int(value) + 1 for key, value in placeholders.items() if value.isdigit()}
                    return rule, placeholders | {key: str(index) for key, index in indices.items()} | {
                        key * 2: f"{index:02d}" for key, index in indices.items()
                    }
        raise LookupError(name)

    def to_foreign_tensors(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Convert our tensors to theirs, of any shape, on any device, including meta. Raises LookupError for a tensor
        that the format does not support."""
        tensors: Tensors = {}
        for ours, theirs, fold in self.group_tensors(config, state):
            tensors |= zip(theirs, fold.to_foreign([state[name] for name in ours], config), strict=True)
        reference = next(iter(state.values()))
        return tensors | {name: reference.new_zeros(shape) for name, shape in self.adds(config).items()}

    def to_file(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Convert our tensors to those of a file: under their full names, each contiguous in memory."""
        start = self.prefix(config)
        written = {name: self.shaped(name, tensor) for name, tensor in self.to_foreign_tensors(config, state).items()}
        return {
            name if name.startswith(self.unprefixed_names) else start + name: tensor.contiguous()
            for name, tensor in (written | self.buffers(config)).items()
        }

    def to_native_tensors(self, config: ModelConfig, names: Iterable[str], tensors: Tensors) -> Tensors:
        """Convert their tensors, of any shape, to ours, in float32. `names`: all names of our model's tensors."""
        converted: Tensors = {}
        for ours, theirs, fold in self.group_tensors(config, names):
            group = fold.to_native([tensors[name].float() for name in theirs], config)
            converted |= {name: tensor.contiguous() for name, tensor in zip(ours, group, strict=True)}
        return converted

    def fits(self, names: Container[str], sections: Set[str]) -> bool:
        """Return whether the tensor names and the keys of the state dicts in a file match the format."""
        has_signature = all(name_in_signature in names for name_in_signature in self.signature) and not any(
            name in names for name in self.excluded_names
        )
        return has_signature and (not self.sections or not sections.isdisjoint(self.sections))

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor with this name in the format is skipped in reading."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@cache
def compile_name_template(template: str) -> re.Pattern[str]:
    """Compile a template of our names to a regular expression with a group for each placeholder."""
    tokens = re.split(r"(\{\w+\})", template)
    return re.compile(
        "".join(
            f"(?P<{token[1:-1]}>{NAME_PLACEHOLDERS[token[1:-1]]})" if token.startswith("{") else re.escape(token)
            for token in tokens
        )
    )


def parse_copy_rules(*lines: str) -> tuple[RenameRule, ...]:
    """Parse lines `our name = their name` into rules without a transform."""
    return tuple(RenameRule((ours,), (theirs,)) for ours, theirs in (line.split(" = ") for line in lines))


def parse_rename_rule(ours: str, theirs: Names | str, fold: TensorTransform) -> RenameRule:
    """Build a rule from names in one string, separated by spaces, and the transform between the tensors."""
    return RenameRule(tuple(ours.split()), tuple(theirs.split()) if isinstance(theirs, str) else theirs, fold)


def nest_rules(
    rules: Iterable[RenameRule], ours: str, theirs: Callable[[str], str], get_config: Callable[[Any], Any]
) -> tuple[RenameRule, ...]:
    """Convert the rules of a format to those for a submodule of a larger model.

    `ours` is the prefix of the submodule's tensors in our model, `theirs` converts a name of the format to that in
    files of the larger model, and `get_config` returns the config of the submodule.
    """

    def convert_rule(rule: RenameRule) -> RenameRule:
        """Convert one rule."""

        def name_tensors(config: Any) -> tuple[str, ...]:
            """Return the names of the submodule's tensors in a file of the larger model."""
            names = rule.theirs(get_config(config)) if callable(rule.theirs) else rule.theirs
            return tuple(map(theirs, names))

        transform = TensorTransform(
            lambda tensors, c: rule.transform.to_native(tensors, get_config(c)),
            lambda tensors, c: rule.transform.to_foreign(tensors, get_config(c)),
        )
        return RenameRule(tuple(ours + name for name in rule.ours), name_tensors, transform)

    return tuple(map(convert_rule, rules))


def build_block_rules(
    theirs: str,
    norms: tuple[str, str],
    qkv: str,
    out: str,
    mlp: tuple[str, str],
    scales: tuple[str, str] | None = None,
    infix: str = "",
) -> tuple[RenameRule, ...]:
    """Build the rules of an encoder's blocks. `theirs`: their name of a block, the prefix of its layers' names.

    `norms` and `scales`: their names for attention and for the MLP. `qkv`: one fused layer, or three separated by
    spaces. `out`: the output layer of attention. `mlp`: its two layers, `GATED|PLAIN` if the gated MLP has other
    names, whose first layer may be two, gate and value. `infix`: the placeholder `{part}` if blocks may have windows.
    """

    def build_layer_rule(ours: str, name: str, end: str = ".{x}") -> RenameRule:
        """Build the rule of one layer in a block, from our name and theirs."""
        gated, _, ungated = name.rpartition("|")
        names = {
            mlp_kind: tuple(f"{theirs}.{layer_name}" + end * ("{x}" not in layer_name) for layer_name in text.split())
            for mlp_kind, text in (("swiglu", gated or ungated), ("gelu", ungated))
        }
        return RenameRule(
            (f"encoder.blocks.{{i}}.{ours}{end}",),
            lambda c: names[c.mlp.kind],
            GATED_LAYERS if " " in gated else QKV_TRANSFORM if " " in name else COPY_TRANSFORM,
        )

    return (
        build_layer_rule("attention.norm", norms[0]),
        build_layer_rule(f"attention.part{infix}.qkv", qkv),
        build_layer_rule(f"attention.part{infix}.out", out),
        build_layer_rule("mlp.norm", norms[1]),
        build_layer_rule("mlp.part.fc1", mlp[0]),
        build_layer_rule("mlp.part.fc2", mlp[1]),
        *(
            [build_layer_rule("attention.scale", scales[0], ""), build_layer_rule("mlp.scale", scales[1], "")]
            if scales
            else []
        ),
    )


def count_blocks(shapes: Shapes, template: str) -> int:
    """Count the blocks: the numbers that replace {i} of a name template in the tensor names. Raises ValueError unless
    they are 0, 1, ... without gaps."""
    indices = {
        int(match["i"])
        for name in shapes
        if (match := compile_name_template(template).fullmatch(name)) and len(match["i"]) < 6
    }
    if indices != set(range(len(indices))) or not indices:
        raise ValueError(f"the numbers N in its {template.format(i='N', x='weight')} are not 0, 1, 2, ... without gaps")
    return len(indices)


def make_prefix_names(token: str, distillation: str, registers: str) -> Callable[[Any], tuple[str, ...]]:
    """Return a function that lists their names of the prefix tokens that a config has: class, distillation and register
    tokens."""
    names = token, distillation, registers
    return lambda c: tuple(
        name
        for name, is_present in zip(names, (c.class_token, c.pool == "distilled", c.registers), strict=True)
        if is_present
    )


# Transforms of the formats; a comment gives the layout of their tensors first, then that of ours.
# D width, h heads, d = D / h, C channels, p and q a patch's height and width in pixels, N patches, P prefix tokens, S
# prefix tokens with positions.


def split_qkv(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """Split a fused tensor (3 n, ...) into those of queries, keys and values, (n, ...) each."""
    return list(tensors[0].chunk(3))


def fuse_qkv(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """Join the tensors of queries, keys and values, (n, ...) each, to (3 n, ...)."""
    return [torch.cat(tensors)]


def transform_each(function: Any) -> Any:
    """Return a function for a `TensorTransform` that applies `function` to each tensor of a list."""
    return lambda tensors, config: [function(tensor) for tensor in tensors]


def unflatten_patch_projection(weight: Tensor, config: ViTConfig | SwinConfig) -> Tensor:
    """Reshape a patch projection (D, C p q) to a convolution (D, C, p, q)."""
    return weight.reshape(len(weight), -1, *config.cell)


#: (M, D) of the gate and of the value of a gated MLP <-> (2 M, D); a plain MLP's layer is copied
GATED_LAYERS = TensorTransform(
    lambda theirs, c: [torch.cat(theirs)], lambda ours, c: list(ours[0].chunk(2)) if c.mlp.kind == "swiglu" else ours
)
#: (D, C, p, q), PyTorch's convolution <-> (D, C p q)
CONVOLUTION = TensorTransform(
    transform_each(lambda w: w.flatten(1)), lambda ours, c: [unflatten_patch_projection(ours[0], c)]
)
#: (p, q, C, D), flax's convolution <-> (D, C p q)
FLAX_PATCH = TensorTransform(
    transform_each(lambda w: w.permute(3, 2, 0, 1).flatten(1)),
    lambda ours, c: [unflatten_patch_projection(ours[0], c).permute(2, 3, 1, 0)],
)
#: (k, k, I, O), flax's and TensorFlow's convolution <-> (O, I, k, k)
FLAX_CONVOLUTION = TensorTransform(
    transform_each(lambda w: w.permute(3, 2, 0, 1)), transform_each(lambda w: w.permute(2, 3, 1, 0))
)
#: (in, out), flax's dense layer <-> (out, in)
FLAX_DENSE = TensorTransform(transform_each(lambda w: w.T), transform_each(lambda w: w.T))
#: (O, I, 1, 1), a 1 x 1 convolution <-> (O, I), a linear layer
POINTWISE = TensorTransform(transform_each(lambda w: w.flatten(1)), transform_each(lambda w: w[:, :, None, None]))
#: (1, 1, I, O), flax's 1 x 1 convolution <-> (O, I), a linear layer
FLAX_POINTWISE = TensorTransform(transform_each(lambda w: w[0, 0].T), transform_each(lambda w: w.T[None, None]))
#: (1, 1, 1, C) or (C,) <-> (C,)
FLATTENED_VECTOR = TensorTransform(transform_each(lambda w: w.flatten()), transform_each(lambda w: w))
#: separate queries, keys and values <-> one fused tensor
QKV_TRANSFORM = TensorTransform(fuse_qkv, split_qkv)
#: (1, 1, D) <-> (1, D), a single token
BATCHED_TOKEN = TensorTransform(transform_each(lambda t: t[0]), transform_each(lambda t: t[None]))


def _import_flax_heads(theirs: list[Tensor], config: Any) -> list[Tensor]:
    """Convert weights (D, h, d) of flax's attention, one per projection, to one (n D, D) for n projections."""
    return [torch.cat([w.flatten(1).T for w in theirs])]


def _export_flax_heads(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Convert (n D, D) to the weights (D, h, d) of flax's attention, one per projection."""
    chunks = ours[0].chunk(len(ours[0]) // config.width)
    return [chunk.T.reshape(config.width, config.heads, -1) for chunk in chunks]


#: (D, h, d) of flax's attention, each of queries, keys and values <-> (3 D, D)
FLAX_HEADS = TensorTransform(_import_flax_heads, _export_flax_heads)
#: (h, d), the biases of flax's queries, keys and values <-> (3 D,)
FLAX_HEAD_BIASES = TensorTransform(
    lambda theirs, c: [torch.cat([b.flatten() for b in theirs])],
    lambda ours, c: [bias.reshape(c.heads, -1) for bias in ours[0].chunk(len(ours[0]) // c.width)],
)
#: (h, d, D) of flax's attention output <-> (D, D)
FLAX_OUT = TensorTransform(
    lambda theirs, c: [theirs[0].flatten(0, 1).T], lambda ours, c: [ours[0].T.reshape(c.heads, -1, c.width)]
)


def _export_prefix_tokens(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Split prefix tokens (P, D) into class and distillation tokens, (1, 1, D) each, and registers (1, R, D)."""
    num_class_tokens = config.prefix - config.registers
    return [
        *(token.reshape(1, 1, -1) for token in ours[0][:num_class_tokens]),
        *([ours[0][num_class_tokens:][None]] if config.registers else []),
    ]


#: (1, 1, D) of the class and the distillation token and (1, R, D) of the registers <-> (P, D)
PREFIX_TOKENS = TensorTransform(
    lambda theirs, c: [torch.cat([t.reshape(-1, c.width) for t in theirs])], _export_prefix_tokens
)
#: (D,) of the class token <-> (1, D)
BARE_TOKEN = TensorTransform(transform_each(lambda t: t[None]), transform_each(lambda t: t[0]))


def build_position_transform(lead: tuple[int, ...] | None) -> TensorTransform:
    """Build the transform from joint positions of prefix tokens and patches to the tensors `slots` and
    `position.table`. The joint positions are (*lead, S + N, D) or, if `lead` is None, (1, *grid, D) without prefix
    tokens."""

    def to_native(theirs: list[Tensor], config: ViTConfig) -> list[Tensor]:
        """Split joint positions into those of prefix tokens (S, D), if any, and the table (*grid, D)."""
        positions, count = theirs[0].reshape(-1, config.width), config.prefix_position_count
        grid = positions[count:].reshape(*config.table_grid, config.width)
        return [positions[:count], grid] if count else [grid]

    def to_foreign(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
        """Join the positions of prefix tokens (S, D) and the table (*grid, D)."""
        positions = torch.cat([tensor.reshape(-1, config.width) for tensor in ours])
        return [
            positions.reshape(1, *config.table_grid, config.width)
            if lead is None
            else positions.reshape(*lead, -1, config.width)
        ]

    return TensorTransform(to_native, to_foreign)
