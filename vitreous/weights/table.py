"""How a foreign format is described: one table of names, and the folds between its tensors and ours.

A `RenameRule` pairs our names with theirs; what varies is a hole in the name:

    {i} {s} {j}   a number: block, stage, unit; in their names {I} {S} {J} count from one, and {JJ} has two digits
    {x}           weight or bias
    {part}        nothing, or the `.part` of a block that looks at windows

A table is read in both directions, so that what is read is what is written: their tensors become ours by `fold.into`,
ours become theirs by `fold.out`. The shapes that a file has to have are those that `out` makes of our model's own.
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
    """Their tensors -> ours, and back. Both take the config; tensors come and go in the order of the row's names."""

    into: Callable[[list[Tensor], Any], list[Tensor]]
    out: Callable[[list[Tensor], Any], list[Tensor]]


COPY_TRANSFORM = TensorTransform(lambda theirs, c: theirs, lambda ours, c: ours)


@dataclass(frozen=True)
class RenameRule:
    """Our names and theirs; `theirs` may depend on the config. Those of ours that a model lacks are left out."""

    ours: tuple[str, ...]
    theirs: Names
    fold: TensorTransform = COPY_TRANSFORM


@dataclass(frozen=True)
class WeightsFormat:
    """A layout that weights come in.

    `sign`: patterns each of which some tensor's name matches, in no other format before it in the list. `configure`
    reads the config off the shapes and what a config.json beside the weights says. `ignored`: patterns of tensors that
    belong to more than the encoder (decoders, text towers), left alone and told. `strip`: what may stand in front of a
    name. `scope`: where some names begin with one of these, the first that does, the others are those of another tower
    or of an optimiser's state, and are left alone. `shaped`: a tensor by its name as files have it, where axes of one
    come and go. `sections`: keys of a pickled file; where there are some, the state dict lies under one of them, and
    this is part of the sign, as is that no name of `without` is there. `doubt`: where files of the format do not tell
    the rule that resizes their positions, whose rule is taken and which others there are. `facts`: small tensors whose
    values `configure` is given under this name, where a file has them.
    """

    name: str
    title: str
    sign: tuple[str, ...]
    rows: tuple[RenameRule, ...]
    _: KW_ONLY
    configure: Callable[[Shapes, dict[str, Any]], ModelConfig]
    ignored: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    holds: Callable[[Any], bool] = lambda config: True
    suffix: str = ".safetensors"
    prefix: Callable[[Any], str] = lambda config: ""  # what is put in front of the names when they are written
    beside: tuple[str, ...] = ()  # how names begin that it is not put in front of: heads
    describe: Callable[[Any], dict[str, Any]] | None = None  # the config.json that belongs beside the weights
    file_in_folder: str = "model.safetensors"  # beside which it is
    # what its loaders ask for and no model of ours has: written as zeros
    adds: Callable[[Any], Shapes] = lambda config: {}
    # what its loaders ask for and follows from the config: written, and left alone where it is read
    buffers: Callable[[Any], Tensors] = lambda config: {}
    shaped: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    sections: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    doubt: Callable[[Any], str] = lambda config: ""
    facts: tuple[str, ...] = ()
    # whose images weights were trained on, where no file beside them tells; None: what the config says
    pixels: Callable[[Any], PixelScaling | None] = lambda config: None
    # what files do not tell and was assumed of the config, by the names of the fields that are said somewhere
    assumes: Callable[[Any, Container[str]], Iterable[str]] = lambda config, known: ()

    def placed(self, config: ModelConfig, own: Iterable[str]) -> Iterator[tuple[list[str], list[str], TensorTransform]]:
        """Our names, theirs and the fold of every group of tensors that a model has. Raises LookupError for one without
        a row."""
        own = list(own)
        known, done = set(own), set()
        for name in own:
            if name in done:
                continue
            row, holes = self.find(name)
            ours = [name for name in (template.format(**holes) for template in row.ours) if name in known]
            done |= set(ours)
            theirs = row.theirs(config) if callable(row.theirs) else row.theirs
            yield ours, [template.format(**holes) for template in theirs], row.fold

    def find(self, name: str) -> tuple[RenameRule, dict[str, str]]:
        """The row of one of our names, and what fills its holes."""
        for row in self.rows:
            for template in row.ours:
                match = compile_name_template(template).fullmatch(name)
                if match:
                    holes = match.groupdict()
                    numbers = {key.upper(): int(value) + 1 for key, value in holes.items() if value.isdigit()}
                    return row, holes | {key: str(number) for key, number in numbers.items()} | {
                        key * 2: f"{number:02d}" for key, number in numbers.items()
                    }
        raise LookupError(name)

    def write(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Our tensors as theirs, on any device, meta too. Raises LookupError for one that the format has no place
        for."""
        tensors: Tensors = {}
        for ours, theirs, fold in self.placed(config, state):
            tensors |= zip(theirs, fold.out([state[name] for name in ours], config), strict=True)
        like = next(iter(state.values()))
        return tensors | {name: like.new_zeros(shape) for name, shape in self.adds(config).items()}

    def file(self, config: ModelConfig, state: Tensors) -> Tensors:
        """The same under the names that they have in a file, each in memory of its own order."""
        start = self.prefix(config)
        written = {name: self.shaped(name, tensor) for name, tensor in self.write(config, state).items()}
        return {
            name if name.startswith(self.beside) else start + name: tensor.contiguous()
            for name, tensor in (written | self.buffers(config)).items()
        }

    def read(self, config: ModelConfig, own: Iterable[str], tensors: Tensors) -> Tensors:
        """Their tensors as ours, in float32."""
        converted: Tensors = {}
        for ours, theirs, fold in self.placed(config, own):
            parts = fold.into([tensors[name].float() for name in theirs], config)
            converted |= {name: part.contiguous() for name, part in zip(ours, parts, strict=True)}
        return converted

    def fits(self, names: Container[str], sections: Set[str]) -> bool:
        """Whether names of tensors, and the keys that their state dicts lie under, are those of the format."""
        known = all(sign in names for sign in self.sign) and not any(name in names for name in self.without)
        return known and (not self.sections or not sections.isdisjoint(self.sections))

    def leaves(self, name: str) -> bool:
        """Whether a tensor of theirs is left alone."""
        return any(re.fullmatch(one, name) for one in self.ignored)


@cache
def compile_name_template(template: str) -> re.Pattern[str]:
    """A template of our names as a regular expression with a group for each hole."""
    parts = re.split(r"(\{\w+\})", template)
    return re.compile(
        "".join(
            f"(?P<{part[1:-1]}>{NAME_PLACEHOLDERS[part[1:-1]]})" if part.startswith("{") else re.escape(part)
            for part in parts
        )
    )


def parse_copy_rules(*lines: str) -> tuple[RenameRule, ...]:
    """Rows whose tensors are the same in both: `ours = theirs`."""
    return tuple(RenameRule((ours,), (theirs,)) for ours, theirs in (line.split(" = ") for line in lines))


def parse_rename_rule(ours: str, theirs: Names | str, fold: TensorTransform) -> RenameRule:
    """A row, with names in one string, apart by spaces."""
    return RenameRule(tuple(ours.split()), tuple(theirs.split()) if isinstance(theirs, str) else theirs, fold)


def build_block_rules(
    theirs: str,
    norms: tuple[str, str],
    qkv: str,
    out: str,
    mlp: tuple[str, str],
    scales: tuple[str, str] | None = None,
    part: str = "",
) -> tuple[RenameRule, ...]:
    """Rows of an encoder's blocks, from the names of a block's layers after `theirs`.

    `norms` and `scales`: of attention and of the MLP; `qkv`: one fused layer, or three separated by spaces; `mlp`: its
    two layers, `GATED|PLAIN` where the gated MLP has another name; `part`: the hole of blocks that look at windows.
    """

    def layer(ours: str, name: str, end: str = ".{x}") -> RenameRule:
        gated, _, plain = name.rpartition("|")
        names = {
            kind: tuple(f"{theirs}.{one}" + end * ("{x}" not in one) for one in text.split())
            for kind, text in (("swiglu", gated or plain), ("gelu", plain))
        }
        return RenameRule(
            (f"encoder.blocks.{{i}}.{ours}{end}",),
            lambda c: names[c.mlp.kind],
            QKV_TRANSFORM if " " in name else COPY_TRANSFORM,
        )

    return (
        layer("attention.norm", norms[0]),
        layer(f"attention.part{part}.qkv", qkv),
        layer(f"attention.part{part}.out", out),
        layer("mlp.norm", norms[1]),
        layer("mlp.part.fc1", mlp[0]),
        layer("mlp.part.fc2", mlp[1]),
        *([layer("attention.scale", scales[0], ""), layer("mlp.scale", scales[1], "")] if scales else []),
    )


def count_blocks(shapes: Shapes, template: str) -> int:
    """How many blocks there are: the numbers that fill {i} in a name are 0, 1, ... and there are no others, else
    ValueError."""
    numbers = {
        int(match["i"])
        for name in shapes
        if (match := compile_name_template(template).fullmatch(name)) and len(match["i"]) < 6
    }
    if numbers != set(range(len(numbers))) or not numbers:
        raise ValueError(f"{template.format(i='N', x='weight')} is not numbered from 0 on without a gap")
    return len(numbers)


def make_prefix_names(token: str, distillation: str, registers: str) -> Callable[[Any], tuple[str, ...]]:
    """The names of those prefix tokens that a config has."""
    names = token, distillation, registers
    return lambda c: tuple(
        name for name, had in zip(names, (c.class_token, c.pool == "distilled", c.registers), strict=True) if had
    )


# The transforms that formats need: how a tensor of theirs lies in memory, against how it lies here.
# D width, h heads, d = D / h, C channels, p and q a patch's sides in pixels, S slots of positions, N patches.


def split_qkv(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """Split a fused tensor (3 n, ...) into its thirds."""
    return list(tensors[0].chunk(3))


def fuse_qkv(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """Join tensors (n, ...) along the first axis."""
    return [torch.cat(tensors)]


def transform_each(function: Any) -> Any:
    """A function of one tensor, for all of a list."""
    return lambda tensors, config: [function(tensor) for tensor in tensors]


def unflatten_patch_projection(weight: Tensor, config: ViTConfig | SwinConfig) -> Tensor:
    """(D, C p q) -> (D, C, p, q)."""
    return weight.reshape(len(weight), -1, *config.cell)


#: (D, C, p, q), PyTorch's convolution, and (D, C p q)
CONVOLUTION = TensorTransform(
    transform_each(lambda w: w.flatten(1)), lambda ours, c: [unflatten_patch_projection(ours[0], c)]
)
#: (p, q, C, D), flax's convolution, and (D, C p q)
FLAX_PATCH = TensorTransform(
    transform_each(lambda w: w.permute(3, 2, 0, 1).flatten(1)),
    lambda ours, c: [unflatten_patch_projection(ours[0], c).permute(2, 3, 1, 0)],
)
#: (k, k, I, O), flax's and TensorFlow's convolution, and (O, I, k, k)
FLAX_CONVOLUTION = TensorTransform(
    transform_each(lambda w: w.permute(3, 2, 0, 1)), transform_each(lambda w: w.permute(2, 3, 1, 0))
)
#: (in, out), flax's dense layer, and (out, in)
FLAX_DENSE = TensorTransform(transform_each(lambda w: w.T), transform_each(lambda w: w.T))
#: a 1 x 1 convolution (O, I, 1, 1) and a linear layer (O, I)
POINTWISE = TensorTransform(transform_each(lambda w: w.flatten(1)), transform_each(lambda w: w[:, :, None, None]))
#: the same in flax's order, (1, 1, I, O)
FLAX_POINTWISE = TensorTransform(transform_each(lambda w: w[0, 0].T), transform_each(lambda w: w.T[None, None]))
#: (1, 1, 1, C) or (C,), and (C,)
FLATTENED_VECTOR = TensorTransform(transform_each(lambda w: w.flatten()), transform_each(lambda w: w))
#: queries, keys and values by themselves, and fused
QKV_TRANSFORM = TensorTransform(fuse_qkv, split_qkv)
#: (1, 1, D) and (1, D): a lone token
BATCHED_TOKEN = TensorTransform(transform_each(lambda t: t[0]), transform_each(lambda t: t[None]))


def _heads_into(theirs: list[Tensor], config: Any) -> list[Tensor]:
    return [torch.cat([w.flatten(1).T for w in theirs])]


def _heads_out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    parts = ours[0].chunk(len(ours[0]) // config.width)
    return [part.T.reshape(config.width, config.heads, -1) for part in parts]


#: (D, h, d) of flax's attention, each of queries, keys and values, and (3 D, D)
FLAX_HEADS = TensorTransform(_heads_into, _heads_out)
#: their biases (h, d), and (3 D,)
FLAX_HEAD_BIASES = TensorTransform(
    lambda theirs, c: [torch.cat([b.flatten() for b in theirs])],
    lambda ours, c: [part.reshape(c.heads, -1) for part in ours[0].chunk(len(ours[0]) // c.width)],
)
#: (h, d, D) of flax's attention output, and (D, D)
FLAX_OUT = TensorTransform(
    lambda theirs, c: [theirs[0].flatten(0, 1).T], lambda ours, c: [ours[0].T.reshape(c.heads, -1, c.width)]
)


def _prefix_out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    singles = config.prefix - config.registers
    return [
        *(token.reshape(1, 1, -1) for token in ours[0][:singles]),
        *([ours[0][singles:][None]] if config.registers else []),
    ]


#: (1, 1, D) of the class and the distillation token and (1, R, D) of the registers, and (P, D)
PREFIX_TOKENS = TensorTransform(lambda theirs, c: [torch.cat([t.reshape(-1, c.width) for t in theirs])], _prefix_out)
#: (D,) of the class token, and (1, D)
BARE_TOKEN = TensorTransform(transform_each(lambda t: t[None]), transform_each(lambda t: t[0]))


def build_position_transform(lead: tuple[int, ...] | None) -> TensorTransform:
    """Their positions of prefix and patches in one, (*lead, S + N, D) or, where `lead` is None, (1, *grid, D): slots
    and table."""

    def into(theirs: list[Tensor], config: ViTConfig) -> list[Tensor]:
        rows, count = theirs[0].reshape(-1, config.width), config.prefix_position_count
        grid = rows[count:].reshape(*config.table_grid, config.width)
        return [rows[:count], grid] if count else [grid]

    def out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
        rows = torch.cat([part.reshape(-1, config.width) for part in ours])
        return [
            rows.reshape(1, *config.table_grid, config.width) if lead is None else rows.reshape(*lead, -1, config.width)
        ]

    return TensorTransform(into, out)
