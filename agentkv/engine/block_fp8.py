"""Checkpoints whose linear maps have e4m3 weights with a scale for each block of 128 x 128: what config.json says of them, and
the modules that hold them. They stay so in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agentkv.engine.experts import StackedLinear
from agentkv.engine.layers import BlockFormat, Decoder, PackedLinear, PackedWeight
from agentkv.errors import BadModel
from agentkv.kernels.block_fp8 import BLOCK, block_linear, blocks, dequantize_blocks
from agentkv.kernels.gate import gate

_OTHER = "Use the bf16 checkpoint of the model, or one of e4m3 weights in blocks of 128 x 128 (quant_method fp8)"
_STORED = {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}


def read_blocks(raw: dict[str, Any]) -> BlockFormat | None:
    """The format that a config.json names, None for plain weights; BadModel where it is not served."""
    said = raw.get("quantization_config")
    if not said:
        return None
    if not isinstance(said, dict):
        raise BadModel(f"config.json: quantization_config is {said!r}", hint=_OTHER)
    method = said.get("quant_method")
    if method != "fp8":
        raise BadModel(f"checkpoints quantized by {method!r} are not served", hint=_OTHER)
    wanted = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "float"}
    for key, value in wanted.items():
        given = said.get(key, None if key == "weight_block_size" else value)
        if given != value:
            raise BadModel(f"FP8 checkpoints with {key} {given!r} are not served, only {value!r}", hint=_OTHER)
    plain = said.get("modules_to_not_convert") or said.get("ignored_layers") or ()
    if not isinstance(plain, list | tuple) or not all(isinstance(name, str) for name in plain):
        raise BadModel("config.json: modules_to_not_convert is no list of names", hint="Name the modules with plain weights")
    return BlockFormat(tuple(plain))


class BlockLinear(PackedLinear):
    """`PackedLinear` with e4m3 weights. weight_scale_inv: float32 `[blocks of outputs, blocks of inputs]`."""

    stored = _STORED
    weight_scale_inv: Tensor

    def __init__(self, in_size: int, sizes: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(in_size, sizes, bias)
        _code(self)

    def rows(self, parameter: str) -> tuple[int, ...]:
        """See `PackedWeight.rows`; of scales by block."""
        return tuple(map(blocks, self.sizes)) if parameter == "weight_scale_inv" else self.sizes

    def plain(self) -> Tensor:
        """See `PackedWeight.plain`; float32."""
        return dequantize_blocks(self.weight, self.weight_scale_inv, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, sum(sizes)]` of x `[num_tokens, in_size]`."""
        return block_linear(x, self.weight, self.weight_scale_inv, self.bias)

    def gated(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """See `PackedLinear.gated`."""
        return gate(self.forward(x), activation)


class BlockStacked(StackedLinear):
    """`StackedLinear` with e4m3 weights. weight_scale_inv: float32 `[count, blocks of outputs, blocks of inputs]`."""

    stored = _STORED
    weight_scale_inv: Tensor

    def __init__(self, count: int, in_size: int, sizes: tuple[int, ...]) -> None:
        super().__init__(count, in_size, sizes)
        _code(self)

    def rows(self, parameter: str) -> tuple[int, ...]:
        """See `PackedWeight.rows`; of scales by block."""
        sizes = tuple(map(blocks, self.sizes)) if parameter == "weight_scale_inv" else self.sizes
        return sizes * self.count

    def plain(self) -> Tensor:
        """See `PackedWeight.plain`; float32."""
        return dequantize_blocks(self.weight, self.weight_scale_inv, torch.float32)


def _code(module: PackedWeight) -> None:
    """Give a module's weight its dtype, and scales."""
    *experts, outs, ins = module.weight.shape
    for name, shape in (("weight", (outs, ins)), ("weight_scale_inv", (sum(map(blocks, module.sizes)), blocks(ins)))):
        setattr(module, name, nn.Parameter(torch.empty(*experts, *shape, dtype=_STORED[name]), requires_grad=False))


def use_blocks(model: Decoder, form: BlockFormat) -> None:
    """Give the linear maps in a model's layers, those apart that are plain in its checkpoint, e4m3 weights. BadModel where maps
    that are packed as one are not all alike, or one of them ends inside a block."""
    for name, module in list(model.layers.named_modules(prefix="layers")):
        if not isinstance(module, PackedWeight):
            continue
        sources = [source.removesuffix(".weight") for source in model.source_names(f"{name}.weight")]
        covered = {form.covers(source) for source in sources}
        if len(covered) > 1:
            raise BadModel(
                f"config.json: of {', '.join(sources[:3])} some have FP8 weights and some plain ones",
                hint="Name all of them in modules_to_not_convert, or none",
            )
        if covered == {False}:
            continue
        if any(size % BLOCK for size in module.sizes[:-1]):
            sizes = ", ".join(map(str, module.sizes))
            raise BadModel(
                f"FP8 weights of {sources[0]} and its like have {sizes} outputs: blocks of {BLOCK} do not fit", hint=_OTHER
            )
        owner, _, leaf = name.rpartition(".")
        ins = module.weight.shape[-1]
        coded: PackedWeight
        if isinstance(module, StackedLinear):
            coded = BlockStacked(module.count, ins, module.sizes)
        else:
            assert isinstance(module, PackedLinear)
            coded = BlockLinear(ins, module.sizes, module.bias is not None)
        setattr(model.get_submodule(owner), leaf, coded)
