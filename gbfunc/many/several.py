"""Genomes of several plans and p-nets in a batch."""

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
    """A module in which each row of a batch has its genome, of several p-nets, such as one body and several heads."""

    def __init__(self, nets: Sequence[ManyGenomes], numbers: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.nets, self.n_genomes = nn.ModuleList(nets), len(numbers)
        self.register_buffer("numbers", torch.tensor(numbers), persistent=False)

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As `ManyGenomes.forward`; tensors of different sizes are padded at the end, with -inf (integers: -1)."""
        inputs = tree_leaves((args, kwargs), "inputs")
        split = check_call(index, self.n_genomes, inputs)
        shared = {
            len(x) for (_, x), own in zip(inputs, split, strict=True) if isinstance(x, Tensor) and x.ndim and not own
        }
        net_B, number_B = self.get_buffer("numbers")[index].unbind(-1)
        places, parts = list[Tensor](), list[Any]()
        for n, net in enumerate(self.nets):
            if len(rows := (net_B == n).nonzero()[:, 0]):
                # Rows come again where an input for all rows would have as many.
                size = next(size for size in range(len(rows), 2 * len(index) + 9) if size not in shared)
                more = rows[torch.arange(size, device=rows.device) % len(rows)]
                given, options = cut(more, args, kwargs, split)
                parts.append(net(number_B[more], *given, **options))
                # These sort behind the batch.
                places.append(torch.cat([rows, rows.new_full((size - len(rows),), len(index))]))
        return joined(parts, torch.cat(places).argsort()[: len(index)])


def materialize_many(
    plan: Plan | Sequence[Plan],
    genomes: Sequence[GenomeLike],
    pnet: nn.Module | Sequence[nn.Module],
    *,
    grown: int | None = None,
) -> ManyGenomes | ManyNets:
    """A module for many genomes, each row of a batch with its genome: to serve, compare or ensemble them.

    Row b of `net(index, x)` is `net(x[b : b + 1])` on genome `index[b]`, in eval mode. Shared tensors are used once for
    the batch: a base's, and tensors that are equal in all genomes. Factors of linear layers stay factors, each row with
    its own. Other modules with tensors that differ run under `torch.func.vmap`; the p-net around them runs once for the
    batch, and must not mix rows. Gradients reach the inputs, not the genomes. `net.generate(index, tokens)` writes
    text by a p-net of transformers.

    Genomes may have different plans of a p-net or base: other sizes, other layers. Genomes with different heads have
    different p-nets, which may share their body; the rows of each p-net then run together. Their outputs are padded at
    the end to the largest, with -inf, so that a softmax or argmax sees only the classes of the row (integers: -1).

    At the first call of each kind (structure, dtypes and shapes of the inputs without the number of rows), a few rows
    with different genomes are computed one by one as well. Where they differ from a batch of them, the p-net as a whole
    runs under `vmap`; where that fails or differs too, rows run one by one, with a warning.

    Torch's fused encoders (`nn.TransformerEncoder` in eval mode without gradients) are not used: at padded positions of
    `src_key_padding_mask`, where fused encoders may give zeros, outputs follow the layers' own forward.

    A genome grows in the first batch that has it. `to` moves or casts the grown tensors, a base's too.

    Args:
        plan: the plan, or a plan per genome.
        genomes: each a `Genome` or `TrainState`.
        pnet: the plan's p-net or base, or one per genome, which must not change while the module is used.
        grown: number of genomes whose weights or factors are kept once they have grown in a batch; None keeps all.

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
    parts = [([plans[i] for i in own], [genomes[i] for i in own], pnets[own[0]]) for own in groups.values()]
    nets = [ManyGenomes(*part, grown) for part in parts]
    numbers = {i: (n, place) for n, own in enumerate(groups.values()) for place, i in enumerate(own)}
    return nets[0] if len(nets) == 1 else ManyNets(nets, [numbers[i] for i in range(len(genomes))])
