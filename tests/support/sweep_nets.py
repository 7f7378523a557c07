"""What the oracle sweep multiplies: p-nets, hypernetworks, tilings and the options of a training step."""

import itertools
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.hypernets import Hypernet
from tests.support.hugging_face import tiny
from tests.support.operations import OldFunction, scripted
from tests.support.strategies import Net
from tests.support.zoo import ZOO, Animal


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.last_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.shortcut, self.head = nn.Conv2d(2, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last_norm(self.second(torch.relu(self.norm(self.first(x))))) + self.shortcut(x)
        return self.head(torch.relu(h).mean((2, 3)))


def encoder_decoder() -> nn.Module:
    decoder = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    mask = torch.ones(3, 3).triu(1).bool()
    use: Any = lambda net, x: net.decoder(x.flip(1), net.encoder(x), tgt_mask=net.mask)  # noqa: E731
    return Net(use, encoder=encoder(), decoder=decoder, mask=mask)


def recurrent(layer: Callable[..., nn.Module]) -> nn.Module:
    parts = {"layer": layer(3, 4, batch_first=True), "head": nn.Linear(4, 2)}
    return Net(lambda net, x: net.head(net.layer(x)[0][:, -1]), **parts)


def logits() -> nn.Module:
    model = tiny("GPT2LMHeadModel", n_layer=1, n_embd=4, n_positions=6, vocab_size=9)
    return Net(lambda net, tokens: net.model(input_ids=tokens, use_cache=False).logits, model=model)


def read_by_function(net: Any, x: Tensor) -> Tensor:
    h = OldFunction.apply(x, net.first.weight).tanh()
    return net.last(OldFunction.apply(h, net.both.weight) + net.both(h).tanh())


def partly_complex(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return torch.view_as_real(net.last(torch.complex(h.sin(), h.cos()).to(torch.complex64)))


def three(use: Callable[..., Tensor], **options: Any) -> Animal:
    return Animal(lambda: Net(use, first=nn.Linear(6, 5), both=nn.Linear(5, 5), last=nn.Linear(5, 3, **options)))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(6, 6)
        blocks = [nn.ModuleList([nn.Linear(6, 6), common]) for _ in range(2)]
        self.blocks = nn.ModuleDict({"left": blocks[0], "right": blocks[1]})
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(6, 6))
        self.head[1].weight = blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for name in ("left", "right"):
            for layer in self.blocks.get_submodule(name).children():
                x = layer(x).tanh()
        return self.head(x)


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 3, stride=2))


def conv(kind: type[nn.Module], channels: int, **options: Any) -> nn.Module:
    return nn.Sequential(kind(channels, 4, 3, padding=1, **options), nn.Tanh(), kind(4, 2, 1))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


RECURRENT = {"include": ["layer"]}
NETS: Mapping[str, Animal] = MappingProxyType(
    {
        "linear": Animal(lambda: nn.Linear(6, 5)),
        "mlp": ZOO["mlp"],
        "conv1d": Animal(lambda: conv(nn.Conv1d, 3, padding_mode="circular"), (3, 5)),
        "conv2d": Animal(lambda: conv(nn.Conv2d, 2, stride=2), (2, 5, 5)),
        "conv3d": Animal(lambda: conv(nn.Conv3d, 1), (1, 3, 3, 3)),
        "residual": Animal(Residual, (2, 4, 4)),
        "attention": ZOO["attention"],
        "encoder": Animal(encoder, (3, 4)),
        "encoder_decoder": Animal(encoder_decoder, (3, 4)),
        "tied": ZOO["tied"],
        "lstm": Animal(lambda: recurrent(nn.LSTM), (3, 3), RECURRENT),
        "gru": Animal(lambda: recurrent(nn.GRU), (3, 3), RECURRENT),
        "gpt2": Animal(logits, (4,), {"include": ["wte"]}, tokens=9),
        "transposed_linear": ZOO["conv1d"],
        "weight_norm": ZOO["weight_norm"],
        "function": three(read_by_function),
        "script": three(lambda net, x: net.last(scripted(x, net.first.weight))),
        "grouped_conv": ZOO["grouped_conv"],
        "autoencoder": Animal(autoencoder, (2, 5, 5)),
        "bfloat16": ZOO["bfloat16"],
        "complex": three(partly_complex, dtype=torch.complex64),
        "shared": Animal(Shared),
    }
)
TOLERANCE = MappingProxyType({"bfloat16": 0.03, "complex": 1e-5})
"""Where it is not 1e-9: some p-nets are no more precise."""


def small_module(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 1))


HYPERNETS: Mapping[str, Callable[[], Hypernet]] = MappingProxyType(
    {
        "periodic": lambda: gb.periodic(2),
        "periodic_shared": lambda: gb.periodic(2, share="layers"),
        "periodic_shapes": lambda: gb.periodic(2, share="shapes"),
        "bilinear": lambda: gb.bilinear(1),
        "bilinear_shapes": lambda: gb.bilinear(2, share="shapes"),
        "gnet": lambda: gb.gnet((3,)),
        "gnet_deep": lambda: gb.gnet((3, 2), "tanh"),
        "stochastic": lambda: gb.stochastic((3,)),
        "low_rank": lambda: gb.low_rank(2),
        "xox": lambda: gb.xox(2),
        "new_rows": lambda: gb.new_rows(1),
        "module": lambda: gb.from_module(small_module),
        "constant": lambda: gb.periodic(2),
    }
)
"""With `"constant"`, a rule leaves the first weight of the p-net constant."""

TILINGS = (None, 1, 3, (2, 5), 8)
NAMES = ("lazy", "remat", "microbatches", "donate")
LAZY, REMAT, MICROBATCHES, DONATE = (False, True, "auto"), ("none", "generate", "layer"), (1, 2), (False, True)
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lazy_{}-remat_{}-{}".format(*own) + "-donate" * own[3]: dict(zip(NAMES, own, strict=True))
        for own in itertools.product(LAZY, REMAT, MICROBATCHES, DONATE)
    }
)


class Setting(NamedTuple):
    net: str
    hypernet: str
    tiling: int

    def __str__(self) -> str:
        tiling = TILINGS[self.tiling]
        words = "x".join(map(str, tiling)) if isinstance(tiling, tuple) else str(tiling)
        return f"{self.net}-{self.hypernet}-{words}"

    def pnet(self) -> nn.Module:
        pnet = NETS[self.net].pnet()
        return pnet if self.net == "bfloat16" else pnet.double()

    def plan(self, pnet: nn.Module) -> gb.Plan:
        options: dict[str, Any] = {"hypernet": HYPERNETS[self.hypernet](), "max_tile": TILINGS[self.tiling]}
        if self.hypernet == "constant":
            first = next(name for name, p in pnet.named_parameters() if p.ndim > 1)
            options["rules"] = [(rf"^{first}$".replace(".", r"\."), gb.constant(0.1))]
        return NETS[self.net].plan(pnet, **options)

    def batch(self) -> Tensor:
        return NETS[self.net].batch(torch.bfloat16 if self.net == "bfloat16" else torch.float64)

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.net, 1e-9)


SETTINGS = [Setting(*names) for names in itertools.product(NETS, HYPERNETS, range(len(TILINGS)))]
# Rows of zeros have no direction, which weight_norm divides by.
SETTINGS = [s for s in SETTINGS if (s.net, s.hypernet) != ("weight_norm", "new_rows")]


def sample(each: int) -> list[tuple[Setting, str]]:
    draw = random.Random(0)

    def deck(cards: Any) -> Any:
        while True:
            yield from draw.sample(list(cards), len(cards))

    hypernets, tilings, options = deck(HYPERNETS), deck(range(len(TILINGS))), deck(OPTIONS)
    nets = [net for net in NETS for _ in range(each)]
    return [(Setting(net, next(hypernets), next(tilings)), next(options)) for net in nets]
