"""The naive baseline: g-nets applied to the code of every single weight, all their activations kept for backward.

This is the arithmetic of the published implementations. Nothing but the benchmark uses it.

Suffixes: T tiles; r, c rows and columns of a tile; n = r c weights of a tile; b bits of a code; H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from gbfunc.genome import codes_of
from gbfunc.hypernets.mlp import GNet
from gbfunc.layers import KINDS
from gbfunc.plan import Ensemble, Plan
from gbfunc.tiling import join_tiles
from gbfunc.trees import DIRECT, GNET
from gbfunc.types import Params


class NaiveGenerator:
    """`generator(leaves) -> {name: weight}` for a plan of ReLU g-nets of one hidden layer.

    Raises:
        ValueError: if the plan has other g-nets.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        others = [e.hypernet for e in plan.ensembles if not _is_plain(e)]
        if others:
            raise ValueError(f"expected ReLU g-nets of one hidden layer, got {others}")
        self._plan = plan
        self._codes = {e.name: _codes(e, dtype, device) for e in plan.ensembles}

    def __call__(self, leaves: Params) -> Params:
        """All parameters of the p-net by name, as `Generator` gives them from the same leaves."""
        parts: dict[tuple[int, int], Tensor] = {}
        for e in self._plan.ensembles:
            codes_Tnb, scale_T = self._codes[e.name]
            of = {k: leaves[f"{GNET}{e.name}/{k}"] for k in e.leaves}
            tiles_Tn = vmap(_weights)(of, codes_Tnb) * scale_T[:, None]
            tiles_Trc = tiles_Tn.unflatten(1, (e.dims.rows, e.dims.cols))
            for p in e.spans:
                grid = p.slot.grid
                parts[p.tensor, p.part] = join_tiles(tiles_Trc[p.first : p.first + grid.n_tiles], grid) + p.slot.offset
        weights: Params = {}
        for i, tensor in enumerate(self._plan.tensors):
            matrices = [parts[i, part] for part in range(len(tensor.slots))]
            direct = leaves.get(f"{DIRECT}{tensor.name}")
            weights[tensor.name] = KINDS[tensor.kind].fold(matrices, tensor.shape) if direct is None else direct
        return weights


def _is_plain(e: Ensemble) -> bool:
    h = e.hypernet
    return isinstance(h, GNet) and h.type == "gnet" and h.activation == "relu" and len(h.hidden or ()) == 1


def _codes(e: Ensemble, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Constants of an ensemble: the code of every weight [T, n, b] and the scale of every tile [T]."""
    row_Urp, col_Ucq = codes_of(e, dtype, device)
    shape = (e.n_tiles, e.dims.rows, e.dims.cols)
    rows = row_Urp.unsqueeze(2).expand(*shape, e.dims.row_width)
    cols = col_Ucq.unsqueeze(1).expand(*shape, e.dims.col_width)
    scales = [p.slot.scale for p in e.spans for _ in range(p.slot.grid.n_tiles)]
    return torch.cat([rows, cols], -1).flatten(1, 2), torch.tensor(scales, dtype=dtype, device=device)


def _weights(leaves: Params, codes_nb: Tensor) -> Tensor:
    """One g-net on the codes of its weights: [n, b] -> [n]."""
    weight_bH = torch.cat([leaves[k] for k in ("row_weight", "col_weight") if k in leaves])
    hidden_nH = torch.relu(codes_nb @ weight_bH + leaves["bias"])
    return hidden_nH @ leaves["out_weight"] + leaves["out_bias"]
