r"""A random-subspace genome: the p-net's seeded first weights, and a random combination of a few trained numbers.

C. Li, H. Farkhoor, R. Liu, J. Yosinski, "Measuring the intrinsic dimension of objective landscapes" (2018):
`theta = theta_0 + P z`; only z and the seed are stored. Every tensor's part of P z is in units of its first deviation.

P takes d numbers to D in memory O(D) and time O(D log d), by Hadamard transforms: with $n$ the power of two from $d$
up, block $b$ of the result is $H_n \,\mathrm{diag}(s_b)\,[z; 0] / \sqrt{D}$ for random signs $s_b$ (N. Ailon and B.
Chazelle, 2009; the first half of Fastfood: Q. Le, T. Sarlos, A. Smola, 2013). Its columns are orthonormal where n
divides D, and nearly so where the last block is cut. Every entry is $\pm 1/\sqrt{D}$.

Suffixes: B blocks, n entries of a block, p q the sides of a block as a matrix, n = p q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.pnet import PureNet, buffers_of, parameter_infos
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import n_params
from gbfunc.types import Params


def hadamard(n: int) -> Tensor:
    """The Hadamard matrix [n, n] of Sylvester's construction, entries +-1.

    Raises:
        ValueError: if n is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard matrix of this kind has a power of two rows, not {n}")
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


class Projection:
    """`projection(z_d) -> theta_D`: linear, differentiable, the same for the same seed."""

    def __init__(self, d: int, D: int, seed: int) -> None:
        """See the module.

        Args:
            d: numbers that are given.
            D: numbers that are made.
            seed: of the signs.

        Raises:
            ValueError: unless 1 <= d <= D.
        """
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


RATES = (3e-2, 1e-1, 3e-1, 1.0)


def subspace_weights(task: Task, d: int, seed: int) -> Callable[[Tensor], Params]:
    """From z [d] to every parameter of the task's p-net."""
    pnet = task.build(seed)
    first = {o.name: o.tensor.detach() for o in parameter_infos(pnet)}
    sizes = [t.numel() for t in first.values()]
    projection = Projection(d, sum(sizes), seed)
    # So that z of unit deviation moves every weight by about its first deviation.
    scales = {name: float(t.std()) if t.numel() > 1 else 1.0 for name, t in first.items()}

    def weights(z_d: Tensor) -> Params:
        pieces = (projection(z_d) * (projection.D / d) ** 0.5).split(sizes)
        return {
            name: torch.add(t, piece.view_as(t), alpha=scales[name] or 1.0)
            for (name, t), piece in zip(first.items(), pieces, strict=True)
        }

    return weights


@dataclass(frozen=True)
class RandomSubspace:
    """The safetensors file of z, with the seed beside it."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """As many numbers as fit, and learning rates."""
        pnet = problem.task.build(0)
        buffers = {name: b for name, (b, _) in buffers_of(pnet).items()}

        def fits(d: int) -> bool:
            return len(_encode(torch.zeros(d), buffers, problem.dtype, 0)) <= problem.budget

        d = base.largest(fits, n_params(pnet))
        if not d:
            raise BudgetTooSmall("no file has room for a single number")
        return grid(d=(d,), lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on z, from the p-net's first weights."""
        d, pnet = settings["d"], problem.task.build(seed)
        weights, call = subspace_weights(problem.task, d, seed), PureNet(pnet)
        buffers = {name: b.clone() for name, (b, _) in buffers_of(pnet).items()}
        z_d = torch.zeros(d, requires_grad=True)
        base.train_net(problem, [z_d], lambda x: call(weights(z_d), buffers, x), settings["lr"], seed)
        return Trained(_encode(z_d, buffers, problem.dtype, seed), d)

    def load(self, data: bytes, task: Task) -> Net:
        """The p-net with the weights that seed and z give."""
        state, about = base.unpack(data)
        seed, z_d = int(about["seed"]), state.pop("z")
        return base.restore(task.build(seed), state | subspace_weights(task, len(z_d), seed)(z_d))


def _encode(z_d: Tensor, buffers: Params, dtype: torch.dtype, seed: int) -> bytes:
    return base.pack({"z": z_d, **buffers}, dtype, {"seed": str(seed)})
