"""P-nets with plans of everything that a plan's JSON or a genome's file may hold."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import gbfunc as gb
from gbfunc.plan import Plan
from tests.support.strategies import Conv1D, bounded_end, linear_end


class Buffers(nn.Module):
    """Buffers of every dtype that a file must order, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        for i, dtype in enumerate(
            (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16)
            + (torch.int8, torch.uint8, torch.bool)
        ):
            self.register_buffer(f"b{i}", torch.ones(3, i, dtype=dtype))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("cache", torch.ones(5), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.emb.weight


def mixed(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(54, 20), Conv1D(7, 20), nn.LayerNorm(7)
    return nn.Sequential(*layers).to(dtype).append(Buffers())


def plans() -> dict[str, tuple[nn.Module, Plan]]:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return _plans()


def _plans() -> dict[str, tuple[nn.Module, Plan]]:
    net, mlp = mixed(), nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 10))
    two = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerEncoderLayer(8, 2, 16))
    codes = {"0.weight": (gb.gray(), gb.grid(5, 6)), "2.weight": (gb.one_hot(), None)}
    umlaut = nn.ModuleDict({'schön "quoted"\\\n\x01': nn.Linear(3, 2), "層": nn.Linear(2, 2)})
    made: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "mixed": (net, {"hypernet": gb.periodic(3), "max_tile": 8}),
        "rules": (
            net,
            {"hypernet": gb.gnet((4, 2)), "rules": [("2", gb.low_rank(2)), ("3", None), ("0", gb.constant())]},
        ),
        "bfloat16": (mixed(torch.bfloat16), {"hypernet": gb.stochastic((3,))}),
        "float16": (nn.Linear(9, 7).half(), {"hypernet": gb.xox(2)}),
        "float64": (mixed(torch.float64), {"hypernet": gb.periodic(2), "max_tile": (4, 9)}),
        "encodings": (mlp, {"hypernet": gb.periodic(4), "encodings": codes, "include": ["0.bias"]}),
        "target": (mlp, {"compression": 7.0}),
        "bytes": (mlp, {"genome_bytes": 3000, "stored": "float32"}),
        "shared": (two, {"hypernet": gb.periodic(2, "layers"), "max_tile": 8}),
        "tied": (Tied(), {"hypernet": gb.periodic(2), "include": ["emb"]}),
        "module": (mlp, {"hypernet": gb.from_module(linear_end), "rules": [("2", gb.from_module(bounded_end))]}),
        "names": (umlaut, {"hypernet": gb.periodic(1)}),
        "nothing generated": (nn.LayerNorm(5), {}),
        "no parameters": (Buffers(), {}),
        "empty": (nn.ReLU(), {}),
        "scalar": (nn.PReLU(), {"include": ["weight"]}),
    }
    return {k: (net, gb.make_plan(net, **options)) for k, (net, options) in made.items()}


PLANS: Mapping[str, tuple[nn.Module, Plan]] = MappingProxyType(plans())
"""The p-nets with their plans, made once."""
