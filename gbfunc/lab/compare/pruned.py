"""Magnitude pruning: a dense net is trained, thinned out step by step and trained on; its entries are entropy-coded.

Gradual pruning by M. Zhu and S. Gupta, "To prune, or not to prune" (2017), over the middle third of the training; then
the coder itself says how many weights the budget holds. As S. Han et al., "Deep Compression" (2016), but for the coder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load
from torch import nn
from torch.nn.utils import prune

from gbfunc.lab.compare.base import Problem, Settings, Trained, Unfit, grid
from gbfunc.lab.compare.coding import decode_sparse, encode_sparse
from gbfunc.lab.compare.dense import dense_shapes
from gbfunc.lab.compare.family import Sizes, largest, perceptron_sizes
from gbfunc.lab.compare.training import total_steps, train_net
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import mlp
from gbfunc.types import Params

RATES = (1e-3, 3e-3, 1e-2)
WIDTHS = (1, 1 / 3, 1 / 9)
BITS = 5
_EVENTS = 20
_MARGIN = 0.98
"""Part of the budget that the code may take before the last training, which changes its length a little."""


@dataclass(frozen=True)
class Pruned:
    """The coded net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Widths of the net that is pruned, in parts of the p-net's, and learning rates."""
        n_in, *hidden, n_out = perceptron_sizes(problem.task)
        found = []
        for part in WIDTHS:
            sizes = (n_in, *(max(1, round(part * h)) for h in hidden), n_out)
            empty = {name: torch.zeros(shape) for name, shape in dense_shapes(sizes).items()}
            if len(encode_sparse(empty, BITS)) < 0.9 * problem.budget and sizes not in found:
                found.append(sizes)
        if not found:
            raise Unfit("the biases of the net and the header of its file alone are larger")
        return grid(sizes=found, lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """A third dense, a third pruning, a third with what is left."""
        net = mlp(tuple(settings["sizes"]), seed)
        matrices = [(m, "weight") for m in net if isinstance(m, nn.Linear)]
        for m, name in matrices:
            prune.identity(m, name)
        total = sum(m.weight.numel() for m, _ in matrices)
        steps, target = total_steps(problem), None
        start, end = steps // 3, 2 * steps // 3
        events = {start + (end - start) * i // _EVENTS: i / _EVENTS for i in range(1, _EVENTS)}

        def keep(n: int) -> None:
            left = sum(int(m.get_buffer("weight_mask").sum()) for m, _ in matrices)
            if n < left:
                prune.global_unstructured(matrices, pruning_method=prune.L1Unstructured, amount=left - n)

        def after(done: int) -> None:
            nonlocal target
            if done == start:
                target = most_entries(_state(net), _MARGIN * problem.budget)
            if target is not None and done in events:
                keep(target + round((total - target) * (1 - events[done]) ** 3))
            if done == max(end, start):
                keep(most_entries(_state(net), _MARGIN * problem.budget))

        train_net(problem, net.parameters(), net, settings["lr"], seed, after)
        keep(most_entries(_state(net), problem.budget))
        state = _state(net)
        return Trained(encode_sparse(state, BITS), sum(int(t.count_nonzero()) for t in state.values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net that the code stands for."""
        biases = {int(name.split(".")[0]): t for name, t in load(data).items() if name.endswith(".bias")}
        sizes: Sizes = (perceptron_sizes(task)[0], *(len(biases[i]) for i in sorted(biases)))
        net = mlp(sizes, 0)
        net.load_state_dict(decode_sparse(data, {k: s for k, s in dense_shapes(sizes).items() if len(s) == 2}))
        return net


def most_entries(state: Params, budget: float) -> int:
    """How many of the largest entries of the matrices can be coded in so many bytes."""
    total = sum(int(t.count_nonzero()) for t in state.values() if t.ndim == 2)
    return largest(lambda n: len(encode_sparse(_top(state, n), BITS)) <= budget, total)


def _state(net: nn.Sequential) -> Params:
    """Parameters of a net that is being pruned, by the names that they have without."""
    state: Params = {}
    for i, m in enumerate(net):
        if isinstance(m, nn.Linear):
            weight = m.get_parameter("weight_orig") * m.get_buffer("weight_mask")
            state |= {f"{i}.weight": weight.detach(), f"{i}.bias": m.bias.detach()}
    return state


def _top(state: Params, n: int) -> Params:
    """The same with only the `n` entries of largest magnitude in all matrices."""
    matrices = {name: t for name, t in state.items() if t.ndim == 2}
    flat = torch.cat([t.flatten() for t in matrices.values()])
    thin = torch.zeros_like(flat)
    kept = flat.abs().topk(n).indices
    thin[kept] = flat[kept]
    pieces = thin.split([t.numel() for t in matrices.values()])
    return state | {k: piece.view_as(t) for (k, t), piece in zip(matrices.items(), pieces, strict=True)}
