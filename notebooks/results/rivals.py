"""Run `gbfunc compare` with more methods: `python notebooks/results/rivals.py --task mnist --methods pruned ...`.

The methods that this script adds:

- random_subspace: weights in a random subspace (`subspace.py`)
- int8, int4, pruned: smaller nets that are trained with rounded weights and entropy-coded (`coded.py`)
- low_rank: each matrix is a product of two thin matrices (T. N. Sainath et al., 2013), in a net as wide as fits
- seeded_networks: weights `theta = sum_k z_k theta_k` with trained z, and theta_k drawn from the seed (PRANC: P.
  Nooralinejad et al., 2023). If all theta_k would take too much memory, the weights are divided into chunks, and each
  chunk has a part of z.
- seeded_factors: the factors of a low-rank net, combined in the same way (NOLA: S. Koohpayegani et al., 2024)
- nnc: a smaller net in Neural Network Coding (ISO/IEC 15938-17) by the package `nncodec` (D. Becking et al., 2023),
  trained without rounding, and quantized with the finest quantization steps whose file fits

With `--pretrained`, the script adds these adapters of the package `peft`:

- fourierft: some frequencies per layer
- unilora: one vector generates the factors of all layers, of rank 4
- tinylora: one vector for all layers, no longer than its projection, with rank 2 (as in the paper) or 8. The
  projections contain singular vectors of the base, which are not counted.

`subspace_net` and `low_rank_net` are p-nets: `gbfunc federated --dense --pnet notebooks.results.rivals:low_rank_net`.
Suffixes: B chunks of n weights and k numbers.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from gbfunc.cli import lab as command
from gbfunc.cli import main
from gbfunc.extras import import_extra
from gbfunc.lab import compare
from gbfunc.lab.compare import base
from gbfunc.lab.compare.adapters import Adapted, Kinds, Linears
from gbfunc.lab.compare.base import BudgetTooSmall, Dense, Problem, Settings, Trained
from gbfunc.pnet.describe import buffers_of, parameter_infos
from gbfunc.pnet.pure import PureNet
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, mlp
from gbfunc.types import Params

sys.path.insert(0, str(Path(__file__).parents[2]))
from notebooks.results.coded import Pruned, Quantised
from notebooks.results.published import PUBLISHED
from notebooks.results.subspace import RandomSubspace, Subspace, unpack_last

RATES, LAST_SEED, MOST_NUMBERS = (1e-2, 3e-2, 1e-1), 9_999, 2**26


class Form(NamedTuple):
    """A parametrization of a p-net's weights."""

    leaves: Params  # initial values of the trained tensors
    weights: Callable[[Params], Params]  # computes all parameters of the p-net from the leaves


def is_drawn(t: Tensor) -> bool:
    return t.numel() > 1 and bool((t != t.flatten()[0]).any())


def seeded_networks(first: Params, d: int, seed: int) -> Form:
    """Make weights that are a combination of d random networks.

    A tensor whose initial entries are all equal, such as a bias, is its initial value plus a small random combination.
    """
    sizes = [t.numel() for t in first.values()]
    units = [float(t.std()) if is_drawn(t) else 0.1 for t in first.values()]
    n_chunks = max(1, math.ceil(d * sum(sizes) / MOST_NUMBERS))
    k, n = math.ceil(d / n_chunks), math.ceil(sum(sizes) / n_chunks)
    generator = torch.Generator().manual_seed(seed)
    networks_Bnk = torch.randn(n_chunks, n, k, generator=generator)

    def weights(leaves: Params) -> Params:
        z_Bk1 = F.pad(leaves["z"], (0, n_chunks * k - d)).view(n_chunks, k, 1)
        parts = ((networks_Bnk @ z_Bk1).flatten()[: sum(sizes)] * k**-0.5).split(sizes)
        of = zip(first.items(), parts, units, strict=True)
        return {name: x.view_as(t) * unit + (0 if is_drawn(t) else t) for (name, t), x, unit in of}

    return Form({"z": torch.randn(d, generator=generator)}, weights)


def low_rank(first: Params, rank: int, seed: int) -> Form:
    """Replace matrices by products of two factors of this rank, with the standard deviation of the matrix.

    A matrix that is smaller than its factors is kept.
    """
    generator, leaves = torch.Generator().manual_seed(seed), Params()
    for name, t in first.items():
        rows, cols = (len(t), t.numel() // max(len(t), 1)) if t.ndim > 1 else (0, 0)
        if rank * (rows + cols) < rows * cols:
            std = (float(t.std()) / rank**0.5) ** 0.5
            leaves[f"{name}.left"] = torch.randn(rows, rank, generator=generator) * std
            leaves[f"{name}.right"] = torch.randn(rank, cols, generator=generator) * std
        else:
            leaves[name] = t

    def weights(leaves: Params) -> Params:
        return {
            name: leaves[name] if name in leaves else (leaves[f"{name}.left"] @ leaves[f"{name}.right"]).view(t.shape)
            for name, t in first.items()
        }

    return Form(leaves, weights)


class FormNet(nn.Module):
    """A p-net whose weights are computed from the leaves of a form.

    The leaves are the parameters of the module, with `_` instead of dots in their names. A vector is stored with a
    first dimension of 1, because direct vectors are not quantized in messages.
    """

    def __init__(self, pnet: nn.Module, form: Form) -> None:
        super().__init__()
        call, self.shapes = PureNet(pnet), {name: leaf.shape for name, leaf in form.leaves.items()}
        # These are functions, because copies of the module share functions.
        self.weights, self.call = form.weights, lambda weights, buffers, x: call(weights, buffers, x)
        for name, leaf in form.leaves.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.atleast_2d(leaf).clone()))
        self.of_pnet = {name: b.clone() for name, (b, _) in buffers_of(pnet).items()}

    def leaves(self) -> Params:
        given = zip(self.shapes.items(), self.parameters(), strict=True)
        return {name: leaf.view(shape) for (name, shape), leaf in given}

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            weights = self.weights(self.leaves())
        return self.call(weights, self.of_pnet, x)


def first_of(pnet: nn.Module) -> Params:
    return {info.name: info.tensor.detach() for info in parameter_infos(pnet)}


def subspace_net(numbers: int = 1_994, seed: int = 0, sizes: tuple[int, ...] = (784, 200, 200, 10)) -> nn.Module:
    """Make an MLP whose weights are in a random subspace of `numbers` dimensions."""
    weights = Subspace(pnet := mlp(tuple(sizes), seed), numbers, seed)
    return FormNet(pnet, Form({"z": torch.zeros(numbers)}, lambda leaves: weights(leaves["z"])))


def low_rank_net(rank: int = 1, seed: int = 0, sizes: tuple[int, ...] = (784, 200, 200, 10)) -> nn.Module:
    """Make an MLP whose matrices are products of two factors of this rank."""
    pnet = mlp(tuple(sizes), seed)
    return FormNet(pnet, low_rank(first_of(pnet), rank, seed))


@dataclass(frozen=True)
class Formed:
    """A method that stores the leaves of a form, the p-net's buffers and the seed of random numbers."""

    ranks: tuple[int, ...]  # ranks of the factors; 0 means no factors
    seeded: bool  # whether the factors are combinations of random factors; otherwise the factors are trained

    def candidates(self, problem: Problem) -> list[Settings]:
        task, found = problem.task, []

        def fits(leaves: Params, pnet: PNet, rank: int) -> bool:
            about = self.about(pnet, task, rank, LAST_SEED)
            return len(base.pack(leaves, problem.dtype, about)) <= problem.budget

        for rank in self.ranks:
            if self.seeded:
                buffers, first = base.saved_buffers(pnet := task.build(0)), outer(pnet, rank, 0).leaves
                room = lambda d, z=buffers, r=rank: fits(z | {"z": torch.zeros(d)}, task.pnet, r)  # noqa: E731
                if d := base.largest(room, sum(t.numel() for t in first.values())):
                    found += base.grid(d=(d,), rank=(rank,), lr=RATES)
                continue
            pnet = widest(task, lambda p, r=rank: fits(low_rank(blank(p), r, 0).leaves, p, r))
            # If no matrix is larger than its factors, the net is a smaller dense net, which is another method.
            if pnet and len(low_rank(state := blank(pnet), rank, 0).leaves) > len(state):
                found += base.of_nets([pnet], task, rank=(rank,), lr=RATES)
        if not found:
            raise BudgetTooSmall("no net of factors, or no file of a single number, is as small as that")
        return found

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        family = base.pnet_about(settings, problem.task)
        pnet = family.build(seed)
        form = self.form(pnet, settings["rank"], seed, settings.get("d", 0))
        net = FormNet(pnet, form)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        buffers = {name: net.of_pnet[name] for name in base.saved_buffers(pnet)}
        about = self.about(family, problem.task, settings["rank"], seed)
        return Trained(
            base.pack(buffers | net.leaves(), problem.dtype, about), sum(t.numel() for t in form.leaves.values())
        )

    def load(self, data: bytes, task: Task) -> Net:
        about = base.text_of(data)
        rank, seed = about.get("rank", 0), about.get("seed", 0)
        pnet = base.pnet_about(about, task).build(seed)
        state = base.saved_buffers(pnet)
        if self.seeded:
            state = unpack_last(data, state, "z")
        else:
            state = base.unpack(data, state | outer(pnet, rank, seed).leaves)
        return base.restore(pnet, state | self.form(pnet, rank, seed, len(state.get("z", ()))).weights(state))

    def about(self, pnet: PNet, task: Task, rank: int, seed: int) -> dict[str, Any]:
        drawn = {"seed": seed} if self.seeded else {}
        return base.about_pnet(pnet, task) | drawn | ({"rank": rank} if rank else {})

    def form(self, pnet: nn.Module, rank: int, seed: int, d: int) -> Form:
        factors = outer(pnet, rank, seed)
        if not self.seeded:
            return factors
        inner = seeded_networks(factors.leaves, d, seed)
        return Form(inner.leaves, lambda leaves: factors.weights(inner.weights(leaves)))


def widest(task: Task, fits: Callable[[PNet], bool]) -> PNet | None:
    """Find the widest p-net that fits and is at most as wide as the task's p-net. Return None if none fits."""
    if (make := task.pnet.scaled) is None:
        return task.pnet if fits(task.pnet) else None
    factor = base.largest(lambda n: fits(make(n / 256)), 256)
    return make(factor / 256) if factor else None


def blank(pnet: PNet) -> Params:
    with torch.device("meta"):
        return base.blanks(base.state_of(pnet.make()))


def outer(pnet: nn.Module, rank: int, seed: int) -> Form:
    """Return the form from factors to the p-net's weights. With rank 0, the weights themselves are the leaves."""
    first = first_of(pnet)
    return low_rank(first, rank, seed) if rank else Form(first, lambda leaves: leaves)


FINEST, COARSEST = -75, 12
"""Range of the quantization parameter qp. A quantization step is about 2^(qp / 4)."""


def nncodec() -> Any:
    return import_extra("nncodec.nnc", "comparing with Neural Network Coding", "nncodec")


@dataclass(frozen=True)
class Coded(Dense):
    """A net in the bitstream of Neural Network Coding."""

    rates = (1e-3, 3e-3, 1e-2, 3e-2)

    def candidates(self, problem: Problem) -> list[Settings]:
        """Return learning rates, and nets that fit if a number takes 6, 4 or 2.5 bits and a tensor 20 bytes."""
        nncodec()
        nets: list[PNet] = []
        for bits in (6.0, 4.0, 2.5):

            def fits(pnet: PNet, bits: float = bits) -> bool:
                state = base.blank(pnet)
                text = len(base.pack({}, torch.float32, base.about_pnet(pnet, problem.task)))
                numbers = sum(x.numel() for x in state.values())
                return text + bits / 8 * numbers + 20 * len(state) <= problem.budget

            nets += base.narrow_pnets(problem.task, fits)
        return base.of_nets(nets, problem.task, lr=self.rates)

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        def encoded(finer: int) -> bytes:
            code = torch.frombuffer(bytearray(encode_nnc(state, COARSEST - finer)), dtype=torch.uint8)
            return base.pack({"code": code}, torch.float32, base.about_pnet(pnet, problem.task))

        finer = base.largest(lambda n: len(encoded(n)) <= problem.budget, COARSEST - FINEST)
        if not finer:
            raise BudgetTooSmall("the coarsest steps take more")
        return encoded(finer)

    def load(self, data: bytes, task: Task) -> Net:
        net = base.pnet_about(base.text_of(data), task).build(0)
        code = unpack_last(data, {}, "code", torch.uint8)["code"]
        return base.restore(net, decode_nnc(code.numpy().tobytes(), base.in_use(net)))


def encode_nnc(state: Params, qp: int) -> bytes:
    """Encode all tensors in one bitstream, named by their positions. `qp` sets the quantization step."""
    parts = {str(i): x.detach().float().numpy() for i, x in enumerate(state.values())}
    with tempfile.TemporaryDirectory() as folder:
        # The package always writes a file.
        options = {"qp": qp, "nonweight_qp": qp, "row_skipping": True, "return_bitstream": True}
        return bytes(nncodec().compress(parts, str(Path(folder) / "net.nnc"), **options))


def decode_nnc(code: bytes, like: Params) -> Params:
    parts = nncodec().decompress(bytearray(code))
    return {name: torch.as_tensor(parts[str(i)]).float().view(x.shape) for i, (name, x) in enumerate(like.items())}


@dataclass(frozen=True)
class FourierFT(Adapted):
    def shapes(self, linears: Linears, kinds: Kinds) -> Iterator[tuple[Sequence[int], Settings]]:
        yield range(1, min(math.prod(linears.kinds[k]) for k in kinds) + 1), {}


@dataclass(frozen=True)
class UniLora(Adapted):
    def shapes(self, linears: Linears, kinds: Kinds) -> Iterator[tuple[Sequence[int], Settings]]:
        yield range(1, 4 * len(linears.blocks) * sum(sum(linears.kinds[k]) for k in kinds) + 1), {}


@dataclass(frozen=True)
class TinyLora(Adapted):
    def shapes(self, linears: Linears, kinds: Kinds) -> Iterator[tuple[Sequence[int], Settings]]:
        for rank in (2, 8):
            # Limit the vector: projections grow with its length, the number of layers and the square of the rank.
            yield range(1, min(len(linears.blocks) * len(kinds) * rank**2, 2_304) + 1), {"r": rank}

    def state(self, net: nn.Module) -> Params:
        names = (".tinylora_A", ".tinylora_B")
        return {name: t for name, t in super().state(net).items() if not name.endswith(names)}


PAIRS, SLOW = (("query", "value"), ()), (3e-3, 1e-2, 3e-2)
ADAPTERS = {
    "fourierft": FourierFT("FourierFTConfig", (3e-2, 1e-1, 3e-1), PAIRS, size="n_frequency"),
    "unilora": UniLora("UniLoraConfig", (*SLOW, 1e-1), PAIRS, size="theta_d_length", fixed={"r": 4}),
    "tinylora": TinyLora(
        "TinyLoraConfig", SLOW, ((),), size="u", fixed={"weight_tying": 1.0, "save_projection": False}
    ),
}
RIVALS = {
    "random_subspace": RandomSubspace(),
    "pruned": Pruned(),
    "int8": Quantised(8),
    "int4": Quantised(4),
    "low_rank": Formed((1, 2, 4, 8, 16), seeded=False),
    "seeded_networks": Formed((0,), seeded=True),
    "seeded_factors": Formed((2, 8), seeded=True),
    "nnc": Coded(),
}

tradeoff_figure = command.tradeoff_figure


def with_published(known: Any, metric: Any, levels: Any) -> Figure:
    """Draw the figure of `gbfunc compare` and add published networks as hollow points."""
    figure = tradeoff_figure(known, metric, levels)
    task = next(row.task for parts in known.values() for part in parts for row in part.rows)
    (axes,), drawn = figure.axes, []
    for marker, (label, points) in zip("osD^vPX", PUBLISHED.get(task, {}).items(), strict=False):
        sizes, errors = zip(*((size, 100 - accuracy) for size, accuracy in points), strict=True)
        drawn += axes.plot(sizes, errors, marker, markerfacecolor="none", color="0.45", label=label)
    if drawn:
        figure.set_figheight(4.7 + 0.18 * len(drawn))
        figure.legend(handles=drawn, frameon=False, loc="outside lower left", fontsize="x-small")
    return figure


if __name__ == "__main__":
    # The method nnc needs the package nncodec, so it is only run if it is named.
    known = {name: method for name, method in RIVALS.items() if name != "nnc" or name in sys.argv}
    compare.METHODS, command.tradeoff_figure = {**compare.METHODS, **known}, with_published
    compare.PRETRAINED_METHODS = {**compare.PRETRAINED_METHODS, **ADAPTERS}
    sys.exit(main(["compare", *sys.argv[1:]]))
