"""Applies genomes of several plans and p-nets to one batch: `index` gives the number of each row's genome."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.genome import check_type
from gbfunc.many.genomes import ManyGenomes, check_call, cut
from gbfunc.many.rows import joined
from gbfunc.plan import Plan
from gbfunc.trees import tree_leaves
from gbfunc.types import GenomeLike


class ManyNets(nn.Module):
    """A module in which each row of a batch uses its own genome and p-net, such as a shared body with several heads."""

    def __init__(self, nets: Sequence[ManyGenomes], numbers: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.nets, self.n_genomes = nn.ModuleList(nets), len(numbers)
        self.register_buffer("numbers", torch.tensor(numbers), persistent=False)

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute as `ManyGenomes.forward`, and pad smaller outputs at the end with -inf (integers: -1)."""
        inputs = tree_leaves((args, kwargs), "inputs")
        split = check_call(index, self.n_genomes, inputs)
        shared = {
            len(x) for (_, x), own in zip(inputs, split, strict=True) if isinstance(x, Tensor) and x.ndim and not own
        }
        net_B, number_B = self.get_buffer("numbers")[index].unbind(-1)
        places, outputs = list[Tensor](), list[Any]()
        for n, net in enumerate(self.nets):
            if len(rows := (net_B == n).nonzero()[:, 0]):
                # Repeat rows: `net` would split inputs in `shared` whose first dimension equals its number of rows.
                size = next(size for size in range(len(rows), 2 * len(index) + 9) if size not in shared)
                more = rows[torch.arange(size, device=rows.device) % len(rows)]
                own_args, own_kwargs = cut(more, args, kwargs, split)
                outputs.append(net(number_B[more], *own_args, **own_kwargs))
                # Give repeated rows a number beyond the batch, so that `argsort` moves the repeated rows to the end.
                places.append(torch.cat([rows, rows.new_full((size - len(rows),), len(index))]))
        return joined(outputs, torch.cat(places).argsort()[: len(index)])


def materialize_many(
    plan: Plan | Sequence[Plan],
    genomes: Sequence[GenomeLike],
    pnet: nn.Module | Sequence[nn.Module],
    *,
    grown: int | None = None,
) -> ManyGenomes | ManyNets:
    """Make a module that applies a different genome to each row of a batch, to serve, compare or ensemble genomes.

    Row b of `net(index, x)` is `net(x[b : b + 1])` with genome `index[b]`, in eval mode. Linear layers in which genomes
    differ use a pair of factors for each row. Other modules in which genomes differ run under `torch.func.vmap`. All
    other code of the p-net runs once for the whole batch, and must not mix rows. Gradients reach `x`, but not the
    genomes. If the p-net is a model of transformers, `net.generate(index, tokens)` generates text.

    Genomes may have different plans for a p-net or base, for example different sizes or different layers. Genomes with
    different heads have different p-nets, which may share a body. The rows of one p-net run together. Smaller outputs
    are padded at the end with -inf (integers: -1), so that a softmax or argmax ignores the classes of other heads.

    The first call with a new structure, new dtypes or new shapes of the inputs (apart from the number of rows) is
    checked: a few rows with different genomes run as a batch and one by one. If the outputs differ, the whole p-net
    runs under `vmap`. If `vmap` fails or also gives different outputs, rows run one by one, with a warning.

    Torch's fused encoders (`nn.TransformerEncoder` in eval mode without gradients) are not used: they may output zeros
    at the padded positions of `src_key_padding_mask`, where this module returns the outputs of the unfused layers.

    Weights are generated in the first batch that uses their genome. `to` also moves or casts these weights.

    Args:
        plan: the plan, or one plan per genome.
        genomes: genomes, each a `Genome` or `TrainState`.
        pnet: the plan's p-net or base, or one per genome. P-nets must not change while the module is used.
        grown: number of genomes whose generated weights or factors are kept for later batches, by default all.

    Raises:
        ValueError: if genomes, plans and p-nets do not fit together.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> genomes = [gb.init_genome(plan, pnet, seed) for seed in range(5)]
    >>> net = gb.materialize_many(plan, genomes, pnet)
    >>> net(torch.tensor([3, 0, 3]), torch.ones(3, 30)).shape
    torch.Size([3, 20])
    """
    for each in [plan] if isinstance(plan, Plan) else plan:
        check_type(each)
    genomes = [*genomes]
    plans = [plan] * len(genomes) if isinstance(plan, Plan) else [*plan]
    pnets = [pnet] * len(genomes) if isinstance(pnet, nn.Module) else [*pnet]
    if not len(genomes) == len(plans) == len(pnets) or not genomes:
        words = "expected at least one genome, and a plan and a p-net for each or for all"
        raise ValueError(f"{words}, got {len(genomes)} genomes, {len(plans)} plans, {len(pnets)} p-nets")
    groups: dict[int, list[int]] = {}
    for i, net in enumerate(pnets):
        groups.setdefault(id(net), []).append(i)
    by_pnet = [([plans[i] for i in own], [genomes[i] for i in own], pnets[own[0]]) for own in groups.values()]
    nets = [ManyGenomes(*arguments, grown) for arguments in by_pnet]
    numbers = {i: (n, place) for n, own in enumerate(groups.values()) for place, i in enumerate(own)}
    return nets[0] if len(nets) == 1 else ManyNets(nets, [numbers[i] for i in range(len(genomes))])
