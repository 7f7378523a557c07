r"""A random subspace of a p-net's weights, `theta = theta_0 + P z`: a file contains only z and the seed.

Source: C. Li, H. Farkhoor, R. Liu, J. Yosinski, "Measuring the intrinsic dimension of objective landscapes" (2018). P
maps d numbers to D weights in memory O(D) and time O(D log d), by Hadamard transforms. Let $n$ be the smallest power of
two that is at least $d$. Block $b$ of the result is $H_n \,\mathrm{diag}(s_b)\,[z; 0] / \sqrt{D}$ for random signs
$s_b$ (N. Ailon and B. Chazelle, 2009; the first half of Fastfood: Q. Le, T. Sarlos, A. Smola, 2013). The columns of P
are orthonormal if n divides D. Otherwise the last block is cut, and the columns are nearly orthonormal. Every entry of
P is $\pm 1/\sqrt{D}$.

Suffixes: B blocks of n entries; p and q are the sides of a block as a matrix, n = p q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.pnet.describe import buffers_of, parameter_infos
from gbfunc.pnet.pure import PureNet
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import n_params
from gbfunc.types import Params, TensorMap

_LAST_SEED = 9_999
"""Largest seed. The size of a file is computed for a seed with as many digits."""


def unpack_last(data: bytes, like: TensorMap, name: str, dtype: torch.dtype | None = None) -> Params:
    """Read a file of `base.pack` that ends with a vector of unknown length. `like` has all other tensors."""
    stored = base.FLOATS[data[0]]
    known = len(base.pack(base.blanks(like), stored)) + int.from_bytes(data[1:3], "little")
    length = (len(data) - known) // (dtype or stored).itemsize
    return base.unpack(data, {**like, name: torch.zeros(length, dtype=dtype)})


def generated_net(pnet: nn.Module, weights: Callable[[], TensorMap]) -> Net:
    """Return the p-net as a function that computes its weights in each call, outside autocast, as for a genome."""
    call = PureNet(pnet)

    def net(x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            made = weights()
        return call(made, {name: b for name, (b, _) in buffers_of(pnet).items()}, x)

    return net


class Projection:
    """The linear map `projection(z_d) -> theta_D` that the seed determines, for 1 <= d <= D."""

    def __init__(self, d: int, D: int, seed: int) -> None:
        if not 1 <= d <= D:
            raise ValueError(f"a projection needs 1 <= d <= D, got d={d}, D={D}")
        self.d, self.D, log_n = d, D, (d - 1).bit_length()
        # H_n = H_p (x) H_q: two products with small matrices instead of log n passes over memory.
        self._left_pp, self._right_qq = (
            reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * k, torch.ones(1, 1))
            for k in (log_n // 2, log_n - log_n // 2)
        )
        generator = torch.Generator().manual_seed(seed)
        self._signs_Bn = torch.randint(0, 2, (-(-D // 2**log_n), 2**log_n), generator=generator).float() * 2 - 1

    def __call__(self, z_d: Tensor) -> Tensor:
        """Project a vector [d] to [D]."""
        blocks_Bn = self._signs_Bn * F.pad(z_d, (0, self._signs_Bn.shape[1] - self.d))
        blocks_Bpq = blocks_Bn.view(-1, len(self._left_pp), len(self._right_qq))
        mixed_Bpq = self._left_pp @ (blocks_Bpq @ self._right_qq)
        return mixed_Bpq.reshape(-1)[: self.D] * self.D**-0.5


class Subspace:
    """Weights of a p-net as a function of z.

    If z has standard deviation 1, weights differ from their initial values by about their initial standard deviation.
    """

    def __init__(self, pnet: nn.Module, d: int, seed: int) -> None:
        self._first = {info.name: info.tensor.detach() for info in parameter_infos(pnet)}
        self._project = Projection(d, sum(t.numel() for t in self._first.values()), seed)

    def __call__(self, z_d: Tensor) -> Params:
        """Return every parameter by name, for z of shape [d]."""
        flat_D = self._project(z_d) * (self._project.D / self._project.d) ** 0.5
        parts = flat_D.split([t.numel() for t in self._first.values()])
        moved = zip(self._first.items(), parts, strict=True)
        # The initial entries of biases and norms are all equal, with a standard deviation of 0. Use 1 instead.
        return {name: t + x.view_as(t) * ((t.numel() > 1 and float(t.std())) or 1.0) for (name, t), x in moved}


class RandomSubspace:
    """A method that trains as many numbers z as fit, which begin at 0, and stores z and the seed."""

    rates = (3e-2, 1e-1, 3e-1, 1.0)

    def candidates(self, problem: Problem) -> list[Settings]:
        pnet = problem.task.build(0)

        def fits(d: int) -> bool:
            state = base.saved_buffers(pnet) | {"z": torch.zeros(d)}
            return len(base.pack(state, problem.dtype, {"seed": _LAST_SEED})) <= problem.budget

        if d := base.largest(fits, n_params(pnet)):
            return grid(d=(d,), lr=self.rates)
        raise BudgetTooSmall("no file has room for a single number")

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet = problem.task.build(seed)
        z_d = torch.zeros(settings["d"], requires_grad=True)
        subspace = Subspace(pnet, len(z_d), seed)
        net = generated_net(pnet, lambda: subspace(z_d))
        base.train_net(problem, [z_d], net, settings["lr"], seed)
        return Trained(base.pack(base.saved_buffers(pnet) | {"z": z_d}, problem.dtype, {"seed": seed}), len(z_d))

    def load(self, data: bytes, task: Task) -> Net:
        seed = base.text_of(data)["seed"]
        pnet = task.build(seed)
        state = unpack_last(data, base.saved_buffers(pnet), "z")
        return base.restore(pnet, state | Subspace(pnet, len(state["z"]), seed)(state["z"]))
