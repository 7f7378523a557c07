"""What tensor-parallel ranks must refuse, by what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.parametrizations import weight_norm

import gbfunc as gb
from gbfunc.parallel import Mesh
from gbfunc.parallel.styles import tensor_styles
from gbfunc.parallel.tensor import TensorParallel, resolve
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.ranks import PATIENCE
from tests.support.tensor_cases import ADAMW, Toy, draw, plain_styles, squared

REFUSED: dict[str, Callable[[Mesh], Any]] = {}
"""What must be refused on tensor ranks, by what the error says."""


def refused(words: str) -> Callable[[Callable[[Mesh], Any]], Callable[[Mesh], Any]]:
    """Note a case of `REFUSED`."""
    return lambda case: REFUSED.setdefault(words, case)


def one_step(mesh: Mesh, pnet: nn.Module, parallel: Any, batch: Any, **options: Any) -> Any:
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, parallel=parallel, **options)
    return step(step.init(0), batch)


@refused("tensor ranks must get the same batch")
def another_batch(mesh: Mesh) -> Any:
    return one_step(mesh, Toy().double(), plain_styles(), (draw(6, 10, seed=mesh.rank), draw(6, 5)))


@refused("needs a style")
def no_style_in_a_sequence(mesh: Mesh) -> Any:
    pnet = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 8), nn.Linear(8, 5)).double()
    styles = {"1": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    return one_step(mesh, pnet, styles, (draw(6, 10, seed=mesh.rank), draw(6, 5, seed=mesh.rank)))


@refused(r"parallel['in_project'] names no module; on that level there are ['in_proj', 'relu', 'out_proj']")
def no_such_module(mesh: Mesh) -> Any:
    return one_step(mesh, Toy().double(), {"in_project": ColwiseParallel()}, ())


@refused("must be a ParallelStyle of torch, got str")
def no_style(mesh: Mesh) -> Any:
    return one_step(mesh, Toy().double(), {"in_proj": "colwise"}, ())


@refused("tied between layers that split it in different ways")
def tied_in_two_ways(mesh: Mesh) -> Any:
    pnet = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
    pnet[1].weight = pnet[0].weight
    return one_step(mesh, pnet, {"0": ColwiseParallel(), "1": RowwiseParallel()}, ())


@refused("'blocks.0.qkv', heads: 2 cannot be split over 3 tensor ranks, 1, 2 would fit")
def heads_that_ranks_do_not_divide(mesh: Mesh) -> Any:
    pnet, ranks = GPT(11, 6, 1, 6, 2, 6), Mesh({"tensor": 3})
    return TensorParallel(pnet, resolve(pnet, tensor_styles(pnet)), ranks)


@refused("the mesh has a tensor axis: parallel= must say")
def no_styles(mesh: Mesh) -> Any:
    return one_step(mesh, Toy().double(), None, ())


@refused("tensor ranks must get the same batch: different from rank 0 are rank 1 in shapes ([0]: '[4, 10], ")
def other_rows_in_a_later_step(mesh: Mesh) -> Any:
    pnet = Toy().double()
    step = gb.make_train_step(
        gb.make_plan(pnet), pnet, squared, ADAMW, mesh=mesh, parallel=plain_styles(), check_every=1
    )
    state, _ = step(step.init(0), (draw(6, 10), draw(6, 5)))
    rows = 6 - 2 * mesh.rank
    return step(state, (draw(rows, 10), draw(rows, 5)))


@refused(
    "over tensor ranks an operator failed (running_mean should contain 4 elements not 8): code between layers gets"
)
def statistics_of_a_part(mesh: Mesh) -> Any:
    pnet = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    return one_step(mesh, pnet, {"0": ColwiseParallel(), "2": RowwiseParallel()}, (draw(6, 10), draw(6, 5)))


@refused("ranks must have the same options: different from rank 0 are rank 1 in parallel (out_")
def other_styles(mesh: Mesh) -> Any:
    styles = plain_styles() if mesh.rank == 0 else {"in_proj": ColwiseParallel()}
    return one_step(mesh, Toy().double(), styles, (draw(6, 10), draw(6, 5)))


@refused("ranks must make the same mesh, got ")
def another_mesh(mesh: Mesh) -> Any:
    return gb.mesh(tensor=2) if mesh.rank else gb.mesh(data=2)


@refused("rank 1 in parallel (in_proj.output_layouts[0]: 'Shard(dim=-1)', not 'Replicate()')")
def other_arguments_of_a_style(mesh: Mesh) -> Any:
    out = Replicate() if mesh.rank == 0 else Shard(-1)
    return one_step(mesh, Toy().double(), {"in_proj": ColwiseParallel(output_layouts=out)}, (draw(6, 10), draw(6, 5)))


def a_softmax_over_a_part(mesh: Mesh, *more: nn.Module) -> Any:
    pnet = nn.Sequential(nn.Linear(10, 8), nn.Softmax(-1), *more, nn.Linear(8, 5)).double()
    styles = {"0": ColwiseParallel(), f"{len(pnet) - 1}": RowwiseParallel()}
    return one_step(mesh, pnet, styles, (draw(6, 10), draw(6, 5)))


REFUSED["code between layers gets a rank's part of the features"] = a_softmax_over_a_part
REFUSED["on one rank: code between layers"] = lambda mesh: a_softmax_over_a_part(mesh, nn.Dropout(0.5))


@refused("as is that of a loss over a part of the sequence")
def a_mean_over_a_part_of_the_sequence(mesh: Mesh) -> Any:
    pnet = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    plan, styles = gb.make_plan(pnet), {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(1))}

    def pooled(net: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(net(batch[0]).mean(1), batch[1])

    step = gb.make_train_step(plan, pnet, pooled, ADAMW, mesh=mesh, parallel=styles)
    return step(step.init(0), (draw(6, 4, 10), draw(6, 5)))


@refused("split over ranks and made in pieces")
def a_piece_is_read(mesh: Mesh) -> Any:
    class Reader(Toy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.in_proj.weight.sum()

    return one_step(mesh, Reader().double(), plain_styles(), (draw(6, 10), draw(6, 5)), lazy=False, remat="layer")


REFUSED["only linear layers and embeddings are split"] = lambda mesh: one_step(
    mesh, nn.Sequential(nn.LayerNorm(6)), {"0": ColwiseParallel()}, ()
)
REFUSED["computes its weight (a parametrization?)"] = lambda mesh: one_step(
    mesh, nn.Sequential(weight_norm(nn.Linear(6, 6))), {"0": ColwiseParallel()}, ()
)
REFUSED["'0' has max_norm=1.0"] = lambda mesh: one_step(
    mesh, nn.Sequential(nn.Embedding(6, 6, max_norm=1.0)), {"0": ColwiseParallel()}, ()
)


@refused("dropout takes equal parts")
def dropout_of_uneven_parts(mesh: Mesh) -> Any:
    pnet = nn.Sequential(nn.Linear(10, 7), nn.Dropout(), nn.Linear(7, 5), nn.Dropout()).double()
    return one_step(mesh, pnet, {"0": ColwiseParallel(), "2": RowwiseParallel()}, (draw(6, 10), draw(6, 5)))


@refused("(in_proj.weight, in_proj.bias, out_proj.weight, or a style's output): give each layer that takes it a style")
def a_penalty_of_all(mesh: Mesh) -> Any:
    pnet = Toy().double()

    def penalised(net: Any, batch: Any) -> Tensor:
        return squared(net, batch)[0] + sum(x.square().sum() for x in net.parameters())

    step = gb.make_train_step(gb.make_plan(pnet), pnet, penalised, ADAMW, mesh=mesh, parallel=plain_styles())
    return step(step.init(0), (draw(6, 10), draw(6, 5)))


def run_refused(init_method: str) -> dict[str, str]:
    """The words of each error on this rank."""
    with gb.mesh(tensor=2, timeout=20 * PATIENCE, init_method=init_method) as mesh:
        said = {}
        for words, case in REFUSED.items():
            try:
                said[words] = f"nothing: {case(mesh)}"
            except (ValueError, TypeError, RuntimeError) as error:
                said[words] = str(error)
        return said
