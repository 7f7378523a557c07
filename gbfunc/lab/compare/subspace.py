r"""Ways to give all weights of a p-net by fewer numbers, which are what is trained and stored.

*Low rank*: every matrix is a product of two thin ones (T. N. Sainath et al., "Low-rank matrix factorization for deep
neural network training with high-dimensional output targets", 2013); one that is smaller than its factors stays itself.

*Random subspace* (C. Li, H. Farkhoor, R. Liu, J. Yosinski, "Measuring the intrinsic dimension of objective landscapes",
2018): `theta = theta_0 + P z`; only z and the seed are stored. Every tensor's part of P z is in units of its first
deviation. P takes d numbers to D in memory O(D) and time O(D log d), by Hadamard transforms: with $n$ the power of two
from $d$ up, block $b$ of the result is $H_n \,\mathrm{diag}(s_b)\,[z; 0] / \sqrt{D}$ for random signs $s_b$ (N. Ailon
and B. Chazelle, 2009; the first half of Fastfood: Q. Le, T. Sarlos, A. Smola, 2013). Its columns are orthonormal where
n divides D, and nearly so where the last block is cut. Every entry is $\pm 1/\sqrt{D}$.

*Seeded networks* (PRANC: P. Nooralinejad et al., ICCV 2023): `theta = sum_k z_k theta_k`, with theta_k drawn from the
seed. Where all of them would take too much memory, the weights are cut into chunks, each with its part of the numbers.
NOLA (S. Koohpayegani et al., ICLR 2024) combines the factors of a low-rank net in the same way.

Suffixes: B blocks or chunks, n entries of one, k numbers of one, p q the sides of a block as a matrix, n = p q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.pnet import PureNet, buffers_of, parameter_infos
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, mlp
from gbfunc.types import Params


def hadamard(n: int) -> Tensor:
    """The Hadamard matrix [n, n] of Sylvester's construction, entries +-1."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard matrix of this kind has a power of two rows, not {n}")
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


class Projection:
    """`projection(z_d) -> theta_D`: linear, differentiable, the same for the same seed; needs 1 <= d <= D."""

    def __init__(self, d: int, D: int, seed: int) -> None:
        if not 1 <= d <= D:
            raise ValueError(f"a projection needs 1 <= d <= D, got d={d}, D={D}")
        self.d, self.D = d, D
        self._n = n = 1 << (d - 1).bit_length()
        # H_n = H_p (x) H_q: two products with small matrices instead of log n passes over memory.
        p = 1 << (n.bit_length() - 1) // 2
        self._left_pp, self._right_qq = hadamard(p), hadamard(n // p)
        generator = torch.Generator().manual_seed(seed)
        n_blocks = -(-D // n)
        self._signs_Bn = torch.randint(0, 2, (n_blocks, n), generator=generator).float() * 2 - 1

    def __call__(self, z_d: Tensor) -> Tensor:
        """[d] -> [D]."""
        blocks_Bn = self._signs_Bn * F.pad(z_d, (0, self._n - self.d))
        blocks_Bpq = blocks_Bn.view(-1, len(self._left_pp), len(self._right_qq))
        mixed_Bpq = self._left_pp @ (blocks_Bpq @ self._right_qq)
        return mixed_Bpq.reshape(-1)[: self.D] * self.D**-0.5


class Form(NamedTuple):
    """How a p-net's parameters are given."""

    leaves: Params  # what is trained, as it is at first
    weights: Callable[[Params], Params]  # from them to every parameter, or to the leaves of another form


Draw = Callable[[Params, int, int], Form]
"""`(first tensors, numbers d, seed) -> Form` with the one leaf `z` [d]."""

_LAST_SEED = 9_999
"""Files have room for the digits of a seed up to this one."""

_MOST_NUMBERS = 2**26
"""Of the random networks that are held in memory (256 MB)."""


def _is_drawn(t: Tensor) -> bool:
    """Whether the entries of a first tensor differ; those of biases and norms are all alike."""
    return t.numel() > 1 and bool((t != t.flatten()[0]).any())


def _units(first: Params, constant: float) -> list[float]:
    """The deviation of every tensor, of one whose entries are all alike `constant`."""
    return [float(t.std()) if _is_drawn(t) else constant for t in first.values()]


def _spread(flat_D: Tensor, first: Params, units: list[float]) -> Params:
    """The flat numbers in the tensors' shapes, each in its unit."""
    pieces = flat_D.split([t.numel() for t in first.values()])
    return {k: x.view_as(t) * unit for (k, t), x, unit in zip(first.items(), pieces, units, strict=True)}


def subspace(first: Params, d: int, seed: int) -> Form:
    """First tensors plus a random projection of z, which starts at 0."""
    projection, units = Projection(d, sum(t.numel() for t in first.values()), seed), _units(first, 1.0)

    def weights(leaves: Params) -> Params:
        # So that z of unit deviation moves every weight by about its first deviation.
        moved = _spread(projection(leaves["z"]) * (projection.D / d) ** 0.5, first, units)
        return {name: t + moved[name] for name, t in first.items()}

    return Form({"z": torch.zeros(d)}, weights)


def seeded_networks(first: Params, d: int, seed: int) -> Form:
    """A combination of d random networks; tensors whose entries are all alike at first stay near that."""
    D = sum(t.numel() for t in first.values())
    n_chunks = max(1, math.ceil(d * D / _MOST_NUMBERS))
    k, n = math.ceil(d / n_chunks), math.ceil(D / n_chunks)
    generator, units = torch.Generator().manual_seed(seed), _units(first, 0.1)
    networks_Bnk = torch.randn(n_chunks, n, k, generator=generator)
    kept = {name: torch.zeros(()) if _is_drawn(t) else t for name, t in first.items()}

    def weights(leaves: Params) -> Params:
        z_Bk1 = F.pad(leaves["z"], (0, n_chunks * k - d)).view(n_chunks, k, 1)
        moved = _spread((networks_Bnk @ z_Bk1).flatten()[:D] * k**-0.5, first, units)
        return {name: moved[name] + t for name, t in kept.items()}

    return Form({"z": torch.randn(d, generator=generator)}, weights)


def low_rank(first: Params, rank: int, seed: int) -> Form:
    """Matrices as products of two of this rank, of the same deviation; the rest as it is."""
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
    """A p-net whose weights are of a form.

    Its leaves are parameters, their names with `_` in the place of dots; vectors have a first dimension of 1, as codes
    are for matrices.
    """

    def __init__(self, pnet: nn.Module, form: Form) -> None:
        super().__init__()
        call = PureNet(pnet)
        # A function, of which copies of this module do not make another.
        self._call = lambda leaves, x: call(form.weights(leaves), {}, x)
        self._shapes = {name: leaf.shape for name, leaf in form.leaves.items()}
        for name, leaf in form.leaves.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.atleast_2d(leaf).clone()))

    def forward(self, x: Tensor) -> Any:
        """What the p-net makes of an input."""
        given = zip(self._shapes.items(), self.parameters(), strict=True)
        leaves = {name: leaf.view(shape) for (name, shape), leaf in given}
        return self._call(leaves, x)


def subspace_net(numbers: int = 1_994, seed: int = 0, sizes: tuple[int, ...] = (784, 200, 200, 10)) -> nn.Module:
    """An MLP in a random subspace of so many numbers, as a p-net for `--dense`."""
    pnet = mlp(tuple(sizes), seed)
    return FormNet(pnet, subspace(_first(pnet), numbers, seed))


def low_rank_net(rank: int = 1, seed: int = 0, sizes: tuple[int, ...] = (784, 200, 200, 10)) -> nn.Module:
    """An MLP whose matrices are products of two of this rank, as `subspace_net`."""
    pnet = mlp(tuple(sizes), seed)
    return FormNet(pnet, low_rank(_first(pnet), rank, seed))


def _first(pnet: nn.Module) -> Params:
    return {info.name: info.tensor.detach() for info in parameter_infos(pnet)}


def _train(problem: Problem, pnet: nn.Module, form: Form, lr: float, seed: int, about: Mapping[str, Any]) -> Trained:
    """Adam on the leaves of a form; they are stored with the p-net's buffers."""
    call, leaves = PureNet(pnet), {name: t.clone().requires_grad_() for name, t in form.leaves.items()}
    buffers = _buffers(pnet)

    def net(x: Tensor) -> Any:
        # Weights are made in full precision, as a genome's are.
        with torch.autocast(x.device.type, enabled=False):
            weights = form.weights(leaves)
        return call(weights, buffers, x)

    base.train_net(problem, leaves.values(), net, lr, seed)
    data = base.pack({**leaves, **_saved(pnet, buffers)}, problem.dtype, about)
    return Trained(data, sum(leaf.numel() for leaf in leaves.values()))


def _buffers(pnet: nn.Module) -> Params:
    return {name: b.clone() for name, (b, _) in buffers_of(pnet).items()}


def _saved(pnet: nn.Module, buffers: Params) -> Params:
    return {name: buffers[name] for name, (_, saved) in buffers_of(pnet).items() if saved}


@dataclass(frozen=True)
class RandomSubspace:
    """The numbers z, with the seed beside them."""

    draw: Draw = subspace  # how numbers become tensors
    rates: tuple[float, ...] = (3e-2, 1e-1, 3e-1, 1.0)  # learning rates to choose from
    ranks: tuple[int, ...] = (0,)  # of the matrices, of which only the factors are drawn; 0 for the matrices themselves

    def candidates(self, problem: Problem) -> list[Settings]:
        """As many numbers as fit, and learning rates."""
        pnet, found = problem.task.build(0), []
        buffers = _saved(pnet, _buffers(pnet))
        for rank in self.ranks:
            about = self._about(rank, _LAST_SEED)

            def fits(d: int, about: Mapping[str, Any] = about) -> bool:
                return len(base.pack({"z": torch.zeros(d), **buffers}, problem.dtype, about)) <= problem.budget

            most = sum(t.numel() for t in self._outer(pnet, rank, 0).leaves.values())
            if d := base.largest(fits, most):
                found += grid(d=(d,), rank=(rank,), lr=self.rates)
        if not found:
            raise BudgetTooSmall("no file has room for a single number")
        return found

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on z."""
        pnet, rank = problem.task.build(seed), settings["rank"]
        form = self._form(pnet, rank, settings["d"], seed)
        return _train(problem, pnet, form, settings["lr"], seed, self._about(rank, seed))

    def load(self, data: bytes, task: Task) -> Net:
        """The p-net with the weights that seed and z give."""
        about = base.text_of(data)
        seed, rank = about["seed"], about.get("rank", 0)
        pnet = task.build(seed)
        like = {"z": torch.empty(0), **_saved(pnet, _buffers(pnet))}
        state = base.unpack(data, like, rest="z")
        z_d = state.pop("z")
        return base.restore(pnet, state | self._form(pnet, rank, len(z_d), seed).weights({"z": z_d}))

    @staticmethod
    def _about(rank: int, seed: int) -> dict[str, int]:
        return {"seed": seed, "rank": rank} if rank else {"seed": seed}

    @staticmethod
    def _outer(pnet: nn.Module, rank: int, seed: int) -> Form:
        """From the tensors that are drawn to the p-net's."""
        first = _first(pnet)
        return low_rank(first, rank, seed) if rank else Form(first, lambda leaves: leaves)

    def _form(self, pnet: nn.Module, rank: int, d: int, seed: int) -> Form:
        outer = self._outer(pnet, rank, seed)
        inner = self.draw(outer.leaves, d, seed)
        return Form(inner.leaves, lambda leaves: outer.weights(inner.weights(leaves)))


@dataclass(frozen=True)
class LowRankTraining:
    """The factors."""

    rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1)
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16)

    def candidates(self, problem: Problem) -> list[Settings]:
        """Ranks, each in a net as wide as fits (at most the p-net's widths), and learning rates."""
        task, found = problem.task, []
        for rank in self.ranks:

            def fits(pnet: PNet, rank: int = rank) -> bool:
                state = base.blank(pnet)
                form = low_rank(state, rank, 0)
                return len(base.pack(form.leaves, problem.dtype, self._about(pnet, task, rank))) <= problem.budget

            pnet = base.widest(task, fits, 1.0)
            # Without a matrix that is larger than its factors the net is a dense one.
            if pnet is not None and len(low_rank(state := base.blank(pnet), rank, 0).leaves) > len(state):
                found += grid(pnet=(dict(pnet.config),), rank=(rank,), lr=self.rates)
        if not found:
            raise BudgetTooSmall("no net of factors is as small as that")
        return found

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on the factors."""
        pnet = base.with_config(problem.task, settings["pnet"])
        net, about = pnet.build(seed), self._about(pnet, problem.task, settings["rank"])
        form = low_rank(_first(net), settings["rank"], seed)
        return _train(problem, net, form, settings["lr"], seed, about)

    def load(self, data: bytes, task: Task) -> Net:
        """The net of the factors."""
        about = base.text_of(data)
        net = base.pnet_about(about, task).build(0)
        form = low_rank(_first(net), about["rank"], 0)
        state = base.unpack(data, {**form.leaves, **_saved(net, _buffers(net))})
        return base.restore(net, state | form.weights(state))

    @staticmethod
    def _about(pnet: PNet, task: Task, rank: int) -> dict[str, Any]:
        return {**base.about_pnet(pnet, task), "rank": rank}
