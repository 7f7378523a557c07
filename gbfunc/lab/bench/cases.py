"""The cases of `gbfunc bench`. A case is a p-net and a batch; a variant is one way to run the training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.generation import make_generator
from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.mlp import GNet
from gbfunc.plan import Plan
from gbfunc.tasks.pnets import PNETS, Interface
from gbfunc.tasks.pnets.base import seeded
from gbfunc.tasks.pnets.gpt import GPT
from gbfunc.tasks.pnets.mlp import mlp, mlp_plan
from gbfunc.trees import flat_genome
from gbfunc.types import Params

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]
Step = Callable[[], Any]
"""A function that runs one step and keeps the state between steps."""


@dataclass(frozen=True)
class Case:
    """A p-net, a batch, and the variants to measure. A case can be pickled for another process."""

    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], Batch]  # Makes the batch on the CPU
    variants: tuple[str, ...]  # Keys of `VARIANTS`. Results include time ratios to "dense" and "naive"
    periodic: dict[str, Any] | None = None  # Options of the plan for variants with periodic g-nets
    relu: dict[str, Any] | None = None  # Options of the plan for variants with ReLU g-nets, "naive" included
    generation: bool = False  # Measure only the generation of the weights, forward and backward

    def pnet(self) -> nn.Module:
        """Build the p-net, with the same weights in each call."""
        with seeded(0):
            return self.net()


Bench = tuple[Case, ...]


class Setting(NamedTuple):
    """The device, the CPU threads and the learning rate of a measurement."""

    device: torch.device  # Device of the p-net and its batch
    threads: int  # Number of CPU threads
    # Too small to fit the only batch. After a fit, gradients would be denormal numbers, with which CPUs are slow.
    lr: float = 1e-8


class Setup(NamedTuple):
    """The arguments of the functions in `VARIANTS`, which build a variant's step."""

    case: Case
    plan: Any  # None for the dense p-net
    pnet: nn.Module
    batch: Batch
    setting: Setting


def loss_fn(net: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Compute the mean cross entropy on a batch: inputs and classes, or tokens and next tokens."""
    x, target = batch
    return F.cross_entropy(net(x).flatten(0, -2), target.flatten())


def plain_step(
    loss: Callable[[], Tensor], leaves: Iterable[Tensor] | list[dict[str, Any]], lr: float, **options: Any
) -> Step:
    """Build a plain training step in torch: a loss, its gradients, and a step of AdamW."""
    optimizer = torch.optim.AdamW(leaves, lr=lr, fused=True, **options)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _plain(setup: Setup, net: nn.Module, **options: Any) -> Step:
    trained = [p for p in net.parameters() if p.requires_grad]
    return plain_step(lambda: loss_fn(net, setup.batch), trained, setup.setting.lr, **options)


def _dense_graph(setup: Setup) -> Step:
    step, graph = _plain(setup, setup.pnet, capturable=True), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def genome_step(plan: Plan, pnet: nn.Module, batch: Batch, lr: float, **options: Any) -> Step:
    """Build a training step by `gb.make_train_step` with `options`, and with `donate=True` if not given."""
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=lr)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, **{"donate": True, **options})
    state = train_step.init(seed=0)

    def step() -> Tensor:
        nonlocal state
        state, info = train_step(state, batch)
        return info.loss

    return step


def _genome(setup: Setup, **options: Any) -> Step:
    _, plan, pnet, batch, setting = setup
    if not setup.case.generation:
        return genome_step(plan, pnet, batch, setting.lr, **options)
    leaves = flat_genome(gb.init_genome(plan, pnet, 0)._replace(direct={}))
    trained = [x.requires_grad_() for x in leaves.values()]
    make = make_generator(plan, kernel=options.get("kernel", "auto"))
    cotangents = [torch.ones(t.shape, dtype=plan.dtype, device=setting.device) for t in plan.generated]

    def step() -> object:
        weights = make(leaves)
        return torch.autograd.grad([weights[t.name] for t in plan.generated], trained, cotangents)

    return step


@dataclass(frozen=True)
class NaiveGNet(GNet):
    """A ReLU g-net, run once per weight, as in published code. Suffixes: `hypernets.base`; U: 1 or T; b: p + q."""

    def matrix(self, *args: Any) -> None:  # noqa: D102
        return None

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, *unused: Any) -> Any:  # noqa: D102
        return Hypernet.tiles(self, leaves, row_Urp, col_Ucq, None, "auto")

    def apply(self, leaves: Params, row_rp: Tensor, col_cq: Tensor, **unused: Any) -> Tensor:  # noqa: D102
        shape = len(row_rp), len(col_cq), -1
        codes_rcb = torch.cat([row_rp[:, None].expand(shape), col_cq[None].expand(shape)], -1)
        weight_bH = torch.cat([leaves["row_weight"], leaves["col_weight"]])
        return torch.relu(codes_rcb @ weight_bH + leaves["bias"]) @ leaves["out_weight"] + leaves["out_bias"]


def _periodic(**options: Any) -> Any:
    return "periodic", partial(_genome, **options)


VARIANTS: Mapping[str, tuple[Literal["periodic", "relu", ""], Callable[[Setup], Step]]] = {
    "dense": ("", lambda setup: _plain(setup, setup.pnet)),
    "dense captured": ("", _dense_graph),
    "periodic captured": _periodic(lazy="auto", cuda_graph=True),
    "periodic materialised": _periodic(lazy=False),
    "periodic lazy": _periodic(lazy=True),
    "periodic auto": _periodic(lazy="auto"),
    "periodic without donate": _periodic(lazy="auto", donate=False),
    "periodic module": ("periodic", lambda setup: _plain(setup, gb.GenomeModule(setup.plan, setup.pnet))),
    "periodic compiled step": _periodic(lazy="auto", compile=True),
    "periodic remat generate": _periodic(lazy=False, remat="generate"),
    "periodic remat layer": _periodic(lazy=False, remat="layer"),
    "relu eager": ("relu", partial(_genome, kernel="eager")),
    "relu compiled": ("relu", partial(_genome, kernel="compiled")),
    "naive": ("relu", partial(_genome, kernel="eager", lazy=False)),
}
"""{name of a variant: (type of its g-nets, "" for a dense p-net, and the function that builds its step)}"""


def build(case: Case, variant: str, setting: Setting) -> tuple[Step, int, int]:
    """Return a variant's step, its number of weights in matrices, and the features of its largest g-net (or 0)."""
    gnets, make = VARIANTS[variant]
    pnet, (x, target) = case.pnet().to(setting.device), case.batch()
    batch = x.to(setting.device), target.to(setting.device)
    if not gnets:
        weights = sum(p.numel() for p in pnet.parameters() if p.ndim > 1)
        return make(Setup(case, None, pnet, batch, setting)), weights, 0
    options: dict[str, Any] = getattr(case, gnets)
    if variant == "naive":
        options = options | {"hypernet": NaiveGNet(options["hypernet"].hidden)}
    plan = gb.make_plan(pnet, **options)
    size = max(slot.hypernet.size or 0 for t in plan.generated for slot in t.slots)
    return make(Setup(case, plan, pnet, batch, setting)), sum(t.numel for t in plan.generated), size


def features(shape: tuple[int, ...], classes: int) -> Batch:
    """Draw a batch of normally distributed inputs of the shape `shape`, with random classes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw), torch.randint(classes, shape[:1], generator=draw)


def sequences(batch: int, length: int, vocabulary: int) -> Batch:
    """Draw random tokens [batch, length], and return them with the next tokens [batch, length]."""
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _case(
    name: str,
    net: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    variants: Sequence[str],
    *,
    h: int = 32,
    tile: int | None = None,
    include: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    genes = {"hypernet": gb.periodic(h), "max_tile": tile, "include": include}
    relu = {"hypernet": gb.gnet((32,)), "max_tile": 100, "include": include}  # Sizes as in published code
    return Case(name, net, batch, tuple(variants), genes, relu, **options)


def mlp_case(sizes: Sequence[int], batch: int, variants: Sequence[str], *, name: str = "", **options: Any) -> Case:
    """Build the case of training an MLP. Periodic variants have one g-net per matrix, unless `tile` is given."""
    name = name or "mlp " + "-".join(map(str, sizes))
    return _case(
        name, partial(mlp, tuple(sizes), 0), partial(features, (batch, sizes[0]), sizes[-1]), variants, **options
    )


def generation_case(width: int, variants: Sequence[str]) -> Case:
    """Build the case of generating one square matrix, forward and backward."""
    net, batch = partial(nn.Linear, width, width, bias=False), partial(features, (1, width), width)
    return _case(f"generate {width}x{width}", net, batch, variants, generation=True)


def gpt_case(
    batch: int, length: int, words: int, layers: int, heads: int, width: int, variants: Sequence[str], **options: Any
) -> Case:
    """Build the case of training a GPT with biases, as in torchGB. The embeddings are also generated."""
    net = partial(GPT, words, length, layers, width, heads, 4 * width, bias=True)
    options = {"name": f"gpt {layers}x{width}", "include": (r"^(tokens|positions)\.weight$",)} | options
    return _case(net=net, batch=partial(sequences, batch, length, words), variants=variants, **options)


def _images_case(name: str, batch: int, variants: Sequence[str], **config: Any) -> Case:
    batches = partial(features, (batch, 3, 32, 32), 10)
    pnet = PNETS[name](Interface((3, 32, 32), 10), **config)
    return _case(" ".join(map(str, (name, *config.values()))), pnet.make, batches, variants)


def _demo_case(variants: Sequence[str]) -> Case:
    sizes = (64, 1100, 10)  # The net and the genome of `gbfunc demo`
    genes = mlp_plan(sizes, (1, 8, 8), 3.0)._asdict() | {"genome_params": 450}
    return replace(mlp_case(sizes, 48, variants, name="demo"), periodic=genes)


def _read_case(kind: str, **options: Any) -> Case:
    kinds: dict[str, Callable[..., Case]] = {"mlp": mlp_case, "generation": generation_case, "gpt": gpt_case}
    return {**kinds, "images": _images_case, "demo": _demo_case}[kind](**options)


BENCHES: Mapping[str, Mapping[str, Bench]] = {
    scale: {name: tuple(_read_case(**x) for x in cases) for name, cases in benches.items()}
    for scale, benches in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8")).items()
}
"""{scale (quick, full or cuda): {name of a bench: its cases}}"""


def choose(table: Mapping[str, T], names: Sequence[str] | None, option: str = "--cases") -> dict[str, T]:
    """Return the entries `names` of a table, or all entries for None; raises `ValueError` for unknown names."""
    if unknown := [name for name in names or () if name not in table]:
        raise ValueError(f"{option} must be some of {' '.join(table)}, got {' '.join(unknown)}")
    return {name: entry for name, entry in table.items() if not names or name in names}
