"""A zoo of small p-nets, each with a plan, a batch and a loss: one animal for each way a module can be special."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gbfunc as gb
from gbfunc.hypernets import Hypernet
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.step import TrainStep
from tests.support.strategies import Conv1D, Net

BATCH = 8
DEVICE = torch.device(os.environ.get("GBFUNC_DEVICE", "cpu"))
"""Where p-nets and batches are: `GBFUNC_DEVICE=cuda pytest tests/test_oracle_sweep.py`."""


class Animal(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6,)  # of one input
    options: Mapping[str, Any] = MappingProxyType({})  # of `make_plan`
    tokens: int = 0  # vocabulary size where inputs are token numbers
    train: bool = True

    def pnet(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            # Not `torch.manual_seed`, which formats three stacks for accelerators that are not there.
            torch.default_generator.manual_seed(seed)
            pnet = self.make().train(self.train)
        return pnet if any(p.is_meta for p in pnet.parameters()) else pnet.to(DEVICE)

    def plan(self, pnet: nn.Module, **changes: Any) -> gb.Plan:
        return gb.make_plan(pnet, **{"hypernet": gb.periodic(2), "max_tile": 4, **self.options, **changes})

    def batch(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(0, self.tokens, (BATCH, *self.shape), generator=draw).to(DEVICE)
        return torch.randn((BATCH, *self.shape), generator=draw, dtype=torch.float64).to(DEVICE, dtype)


def loss_fn(net: Callable[..., Any], batch: Any) -> Tensor:
    """Mean squared distance of whatever the p-net returns from a sine of its index: differs from weight to weight."""
    out = net(batch)
    out = out[0] if isinstance(out, tuple) else out
    out = out.float() if out.dtype.itemsize < 4 else out
    target = torch.arange(out[0].numel(), dtype=out.dtype, device=out.device).sin().reshape(out[0].shape)
    return F.mse_loss(out, target.expand_as(out))


def mlp(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7, **options), nn.Tanh(), nn.Linear(7, 3, **options))


# Named functions: modules with them can be pickled.
def _attend(net: Any, x: Tensor) -> Tensor:
    return net.attention(x, x, x)[0]


def _embed_twice(net: Any, tokens: Tensor) -> Tensor:
    return net.head(torch.tanh(net.hidden(net.embedding(tokens))))


def self_attention() -> nn.Module:
    return Net(_attend, attention=nn.MultiheadAttention(8, 2, batch_first=True))


def tied() -> nn.Module:
    parts: Any = {"embedding": nn.Embedding(11, 6), "hidden": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)}
    parts["head"].weight = parts["embedding"].weight
    return Net(_embed_twice, **parts)


class Running(nn.Module):
    """A buffer that is assigned, not changed in place, and that takes the graph with it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.mean = 0.5 * self.mean + 0.5 * hidden.mean(0)
        return self.last(hidden - self.mean)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def conv_bn() -> nn.Module:
    head = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), *head)


def frozen_biases() -> nn.Module:
    pnet = mlp()
    for name, parameter in pnet.named_parameters():
        parameter.requires_grad_("bias" not in name)
    return pnet


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def own_codes(n: int) -> Tensor:
    return torch.stack([torch.arange(n) % 2 * 2.0 - 1, torch.linspace(-1.7, 1.7, n)], 1)


ZOO: Mapping[str, Animal] = MappingProxyType(
    {
        "mlp": Animal(mlp),
        "conv_bn": Animal(conv_bn, (2, 6, 6)),
        "conv_bn_eval": Animal(conv_bn, (2, 6, 6), train=False),
        "grouped_conv": Animal(
            lambda: nn.Conv2d(4, 6, 3, groups=2),
            (4, 5, 5),
            {"encodings": {"weight": (own_codes(6), gb.per_axis(gb.table(own_codes(2)), gb.grid(3, 3), 9))}},
        ),
        "transposed_conv": Animal(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 3, 3)),
        "attention": Animal(self_attention, (5, 8)),
        "transformer": Animal(encoder, (5, 8)),
        "transformer_eval": Animal(encoder, (5, 8), train=False),
        "tied": Animal(tied, (5,), {"include": [r"embedding\.weight"]}, tokens=11),
        "lstm": Animal(lambda: nn.LSTM(3, 5, batch_first=True), (4, 3), {"include": ["weight"]}),
        "weight_norm": Animal(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 7)), nn.Linear(7, 3))),
        "dropout": Animal(lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3))),
        "stochastic": Animal(mlp, options={"hypernet": gb.stochastic((3,))}),
        "gnet": Animal(mlp, options={"hypernet": gb.gnet((3,))}),
        "shared": Animal(
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)),
            options={"hypernet": gb.periodic(2, share="layers")},
        ),
        "mixed": Animal(
            mlp,
            options={
                "rules": [(r"2\.", gb.low_rank(1)), (r"0\.bias", gb.constant(0.1))],
                "encodings": {"0.weight": (own_codes(7), None)},
            },
        ),
        "conv1d": Animal(lambda: nn.Sequential(Conv1D(7, 6), nn.Tanh(), Conv1D(3, 7))),
        "running": Animal(Running),
        "bfloat16": Animal(lambda: mlp().bfloat16()),
        "float64": Animal(lambda: mlp().double()),
        "meta": Animal(on_meta),
        "frozen": Animal(frozen_biases),
        "no_direct": Animal(lambda: mlp(bias=False)),
        "only_direct": Animal(mlp, options={"exclude": ["."]}),
    }
)
"""Every animal can be trained."""

BUFFERS_ONLY = Animal(lambda: nn.BatchNorm1d(6, affine=False))
"""Nothing to train: the plan has no parameters."""


def dtype_of(pnet: nn.Module) -> torch.dtype:
    return next((p.dtype for p in pnet.parameters()), torch.float32)


def genome_of(animal: Animal, seed: int = 0) -> tuple[nn.Module, gb.Plan, gb.Genome]:
    pnet = animal.pnet()
    plan = animal.plan(pnet)
    return pnet, plan, gb.init_genome(plan, pnet, seed)


def small(hypernet: Hypernet) -> tuple[nn.Module, gb.Plan, gb.Genome]:
    pnet = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    plan = gb.make_plan(pnet, hypernet, max_tile=(3, 3), include=["0.bias"])
    return pnet, plan, gb.init_genome(plan, pnet, 1)


def noise_of(plan: gb.Plan) -> Any:
    return gb.sample_noise(plan, torch.Generator().manual_seed(5), torch.zeros((), dtype=plan.dtype))


SGD = gb.torch_optimizer(torch.optim.SGD, lr=0.1)


def step_of(name: str, loss: Any = loss_fn, optimizer: Optimizer = SGD, **options: Any) -> tuple[TrainStep, Tensor]:
    pnet = ZOO[name].pnet()
    step = gb.make_train_step(ZOO[name].plan(pnet), pnet, loss, optimizer, **options)
    return step, ZOO[name].batch(dtype_of(pnet))
