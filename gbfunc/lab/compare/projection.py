r"""A seeded random projection of d numbers to D in memory O(D) and time O(D log d), by Hadamard transforms.

With $n$ the power of two from $d$ up, block $b$ of the result is $H_n \,\mathrm{diag}(s_b)\,[z; 0] / \sqrt{D}$ for
random signs $s_b$ (N. Ailon and B. Chazelle, 2009; the first half of Fastfood: Q. Le, T. Sarlos, A. Smola, 2013). Its
columns are orthonormal where n divides D, and nearly so where the last block is cut. Every entry is $\pm 1/\sqrt{D}$.

Suffixes: B blocks, n entries of a block, p q the sides of a block as a matrix, n = p q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
