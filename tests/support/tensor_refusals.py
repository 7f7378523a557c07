"""What tensor-parallel ranks must refuse, by what the error says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.parametrizations import weight_norm

import gbfunc as gb
from gbfunc.parallel import Mesh
from tests.support.ranks import PATIENCE, said
from tests.support.tensor_cases import ADAMW, Toy, draw, plain_styles, squared

COLUMN, ROW = ColwiseParallel(), RowwiseParallel()


def step_of(
    mesh: Mesh,
    make: Callable[[], nn.Module] = Toy,
    styles: Any = None,
    batches: Any = None,
    loss_fn: Any = squared,
    **options: Any,
) -> Any:
    """Steps on tensor ranks, one for each batch: rows, and those of another rank than the first."""
    pnet = make().double()
    plan = gb.make_plan(pnet, gb.periodic(2))
    parallel = plain_styles() if styles is None else styles(mesh) if callable(styles) else styles
    step = gb.make_train_step(plan, pnet, loss_fn, ADAMW, mesh=mesh, parallel=parallel, **options)
    state = step.init(0)
    for x, y in [(draw(6, 10), draw(6, 5))] if batches is None else batches(mesh):
        state, _ = step(state, (x, y))


class Reader(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.in_proj.weight.sum()


def tied() -> nn.Module:
    pnet = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    pnet[1].weight = pnet[0].weight
    return pnet


def between(*layers: nn.Module, width: int = 8) -> dict[str, Any]:
    pnet = nn.Sequential(nn.Linear(10, width), layers[0], *layers[2:], nn.Linear(width, 5), *layers[1:2])
    return {"make": lambda: pnet, "styles": {"0": COLUMN, f"{len(pnet) - 1 - len(layers[1:2])}": ROW}}


def mean_of_sequence(net: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(net(batch[0]).mean(1), batch[1])


def penalised(net: Any, batch: Any) -> Tensor:
    return squared(net, batch)[0] + sum(x.square().sum() for x in net.parameters())


def of_other_lengths(mesh: Mesh) -> Any:
    yield draw(6, 10), draw(6, 5)
    yield draw(6 - 2 * mesh.rank, 10), draw(6 - 2 * mesh.rank, 5)


REFUSED: dict[str, dict[str, Any]] = {
    'tensor ranks must get the same batch: different from rank 0 are rank 1 in the batch ({"batch[0]": ': {
        "batches": lambda mesh: [(draw(6, 10, seed=mesh.rank), draw(6, 5))]
    },
    '"batch[1]": "torch.float64 [4, 5]': {
        # The check of step 2 finds examples that differ from step 1 on.
        "batches": lambda mesh: [(draw(4, 10), draw(4, 5, seed=mesh.rank * i)) for i in range(3)],
        "check_every": 2,
    },
    'are rank 1 in shapes ({"batch[0]": "[4, 10], ': {"batches": of_other_lengths},
    "a part of the sequence a style": {
        "make": lambda: nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 8), nn.Linear(8, 5)),
        "styles": {"1": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))},
        "batches": lambda mesh: [(draw(6, 10, seed=mesh.rank), draw(6, 5, seed=mesh.rank))],
    },
    "parallel['in_project'] names no module; on that level there are ['in_proj', 'relu', 'out_proj']": {
        "styles": {"in_project": COLUMN}
    },
    "must be a ParallelStyle of torch, got str": {"styles": {"in_proj": "colwise"}},
    "tied between layers that split it in different ways": {"make": tied, "styles": {"0": COLUMN, "1": ROW}},
    "the mesh has a tensor axis: parallel= must say": {"styles": lambda mesh: None},
    "ranks must have the same options: different from rank 0 are rank 1 in parallel (": {
        "styles": lambda mesh: plain_styles() if mesh.rank == 0 else {"in_proj": COLUMN}
    },
    '"output_layouts": ["Shard(dim=-1)': {
        "styles": lambda mesh: {"in_proj": ColwiseParallel(output_layouts=Shard(-1) if mesh.rank else Replicate())}
    },
    "over tensor ranks an operator failed (running_mean should contain 4 elements not 8): code between layers": between(
        nn.BatchNorm1d(8)
    ),
    "code between layers gets only this rank's part of the features": between(nn.Softmax(-1)),
    "on one rank: code between layers": between(nn.Softmax(-1), nn.Identity(), nn.Dropout(0.5)),
    "dropout parts of equal size": between(nn.Dropout(), nn.Dropout(), width=7),
    "a softmax, mean or loss of a part differs": {
        "make": lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5)),
        "styles": {"0": COLUMN, "2": RowwiseParallel(output_layouts=Shard(1))},
        "batches": lambda mesh: [(draw(6, 4, 10), draw(6, 5))],
        "loss_fn": mean_of_sequence,
    },
    "split over ranks and made in pieces": {"make": Reader, "lazy": False, "remat": "layer"},
    "give each layer that takes a split tensor a style": {"loss_fn": penalised},
    "must be a linear layer or embedding to be split, got a LayerNorm": {
        "make": lambda: nn.Sequential(nn.LayerNorm(6)),
        "styles": {"0": COLUMN},
    },
    "must have a parameter as its weight to be split": {
        "make": lambda: nn.Sequential(weight_norm(nn.Linear(6, 6))),
        "styles": {"0": COLUMN},
    },
    "got max_norm=1.0": {"make": lambda: nn.Sequential(nn.Embedding(6, 6, max_norm=1.0)), "styles": {"0": COLUMN}},
}
"""Arguments of `step_of`, by what the error says."""


CALLS: dict[str, Callable[[Mesh], Any]] = {
    "ranks must make the same mesh, got ": lambda mesh: gb.mesh(tensor=2) if mesh.rank else gb.mesh(data=2),
}
CALLS |= {words: partial(step_of, **arguments) for words, arguments in REFUSED.items()}


def run_refused(init_method: str) -> dict[str, str]:
    with gb.mesh(tensor=2, timeout=20 * PATIENCE, init_method=init_method) as mesh:
        return {words: said(case, mesh) for words, case in CALLS.items()}
