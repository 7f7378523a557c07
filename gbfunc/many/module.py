"""Many genomes of one plan at once: a batch in which every row has its genome, and their sum as one module.

A module of the p-net that holds tensors in which genomes differ runs under `vmap` over the rows, each row with the
tensors of its genome; all else, and every product with tensors that genomes share, runs once for the whole batch:

    x [B, ...] --shared modules--> --vmap(module)(tensors[index], rows)--> ... --> y [B, ...]

Suffixes: N genomes, B rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.generate import Generator
from gbfunc.layers.forms import WeightForm
from gbfunc.many.merge import check_genomes
from gbfunc.many.row_wise import NoRowsError, RowWise, without_fused
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet import PureNet, parameter_infos
from gbfunc.trees import flat_genome, tree_leaves, tree_map
from gbfunc.types import GenomeLike, Params


class ManyGenomes(nn.Module):
    """A p-net with many genomes: `net(index, *args, **kwargs)`, with the number of its genome for each row.

    Made by `materialize_many`. It is for inference: always in eval mode; gradients reach the inputs, not the genomes.
    Tensors are on the device of the genomes and move with `to`.

    Attributes:
        n_genomes: number of genomes.
        row_wise: the modules of the p-net, by path, that run under `vmap`; "" is the whole p-net.
    """

    def __init__(self, plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> None:
        super().__init__()
        check_genomes(plan, genomes, pnet)
        self._plan, self._pnet, self.n_genomes, self._base = plan, pnet, len(genomes), plan.base_tensors(pnet)
        tensors, forms, buffers = _all_tensors(plan, genomes, self._generator())
        self._forms, self._keys, self._rows = forms, {"weights": [*tensors], "buffers": [*buffers]}, set[str]()
        for i, (key, values) in enumerate((tensors | buffers).items()):
            shared = all(x is values[0] or torch.equal(x, values[0]) for x in values[1:])
            self._rows |= set() if shared else {key}
            self.register_buffer(f"tensor_{i}", values[0] if shared else torch.stack(values), persistent=False)
        self.row_wise = _outermost(_module_of(pnet, name) for key in self._rows for name in self._names(key))
        self._net = self._build()
        # Kinds of calls, by which inputs had rows: the first one of a kind tells where inside of the p-net they are.
        self._kinds: set[Any] = set()

    def _names(self, key: str) -> list[str]:
        """All names of a tensor of a tie."""
        for tensor in self._plan.tensors:
            if key == tensor.name or key.startswith(f"{tensor.name}_form."):
                return [name + key.removeprefix(tensor.name) for name in (tensor.name, *tensor.aliases)]
        return [key]

    def _build(self) -> PureNet:
        """The p-net whose `row_wise` modules take a tensor for each row."""
        named = [name for key in self._rows for name in self._names(key)]
        row_wise = []
        for path in self.row_wise:
            varying = {_local(name, path) for name in named if _inside(name, path)}
            forms = {_local(k, path): v for k, v in self._fresh_forms().items() if _inside(k, path)}
            row_wise.append(RowWise(self._pnet, path, forms, self._present(path, varying)))

        def adapt(skeleton: nn.Module) -> list[str]:
            skeleton.eval()
            without_fused(skeleton)
            return [name for module in row_wise for name in module.install(skeleton)]

        return PureNet(self._pnet, self._fresh_forms(), adapt, self._base)

    def _generator(self) -> Generator:
        return Generator(self._plan, pnet=self._pnet, lazy=True, base=self._base)

    def _fresh_forms(self) -> dict[str, WeightForm]:
        """Forms belong to one function each."""
        return {name: form for name, form in self._generator().forms.items() if name in self._forms}

    def _present(self, path: str, varying: set[str]) -> set[str]:
        """Without second names of tensors that are tied inside of the module."""
        module = self._pnet.get_submodule(path)
        again = {alias for info in parameter_infos(module) for alias in info.aliases}
        return {name for name in varying if not any(name == a or name.startswith(f"{a}_form.") for a in again)}

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The p-net's outputs, of row b with genome `index[b]`.

        Args:
            index: int64 [B].
            *args: the p-net's inputs: tensors whose first dimension is B have a row each, others are for all rows.
            **kwargs: likewise.

        Raises:
            TypeError: if the index is not an int64 tensor.
            ValueError: if it is not [B], names a genome that there is not, no input has B rows, or some output has not.
        """
        n_rows = self._check(index, (args, kwargs))
        call = _padded(index, args, kwargs)
        inputs = tree_leaves(call[1:])
        kind = tuple((path, isinstance(x, Tensor) and (x.ndim, x.shape[:1] == call[0].shape)) for path, x in inputs)
        while True:
            try:
                if kind not in self._kinds:
                    # A dimension inside that has as many entries by chance has not one more when the batch has.
                    with torch.no_grad():
                        self._run(*_padded(*call, more=1))
                out = self._run(*call)
                break
            except NoRowsError as error:
                if not error.path:
                    raise
                # Rows are seen further out: positions of a transformer, or [time, batch] inside of one.
                self.row_wise = _outermost([*self.row_wise, error.path.rpartition(".")[0]])
                self._net, self._kinds = self._build(), set()
        self._kinds.add(kind)
        return tree_map(lambda x: self._cut(x, len(call[0]), n_rows), out)

    def _run(self, index: Tensor, args: Any, kwargs: Any) -> Any:
        """The p-net's outputs for these rows."""
        keys = [*self._keys["weights"], *self._keys["buffers"]]
        stored = {key: self.get_buffer(f"tensor_{i}") for i, key in enumerate(keys)}
        given = {key: x[index.to(x.device)] if key in self._rows else x for key, x in stored.items()}
        weights, buffers = ({key: given[key] for key in self._keys[kind]} for kind in ("weights", "buffers"))
        return self._net(weights, buffers, *args, **kwargs)

    def _check(self, index: Tensor, inputs: Any) -> int:
        """The number of rows of a call; raises as `forward`."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            got = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"index must be an int64 tensor [B] of genomes' numbers, got {got}")
        if index.ndim != 1 or not len(index):
            raise ValueError(f"index must have shape [B] with B >= 1, got {tuple(index.shape)}")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= self.n_genomes:
            raise ValueError(f"index must be within 0 .. {self.n_genomes - 1}, got {low} .. {high}")
        shapes = [tuple(x.shape) for _, x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if not any(s[:1] == (len(index),) for s in shapes):
            raise ValueError(f"index has {len(index)} rows, and no input has: their shapes are {shapes}")
        return len(index)

    @staticmethod
    def _cut(x: Any, padded: int, n_rows: int) -> Any:
        """An output without the rows that were added."""
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 0 or len(x) != padded:
            raise ValueError(f"outputs must have the batch's rows first, got shape {tuple(x.shape)} for {padded} rows")
        return x[:n_rows]


def _padded(index: Tensor, args: Any, kwargs: Any, more: int = 0) -> tuple[Tensor, Any, Any]:
    """The call with the last row repeated, `more` times or until no other dimension of the inputs has as many rows."""
    tensors = [x for _, x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    n_rows = len(index)
    taken = {size for x in tensors for size in x.shape[1:]} | {len(x) for x in tensors if x.ndim and len(x) != n_rows}
    more = next(n for n in count(n_rows + more) if n not in taken) - n_rows

    def pad(x: Any) -> Any:
        rows = isinstance(x, Tensor) and x.ndim > 0 and len(x) == n_rows
        return torch.cat([x, x[-1:].expand(more, *x.shape[1:])]) if rows else x

    return (pad(index), *tree_map(pad, (args, kwargs))) if more else (index, args, kwargs)


def _all_tensors(
    plan: Plan, genomes: Sequence[GenomeLike], generator: Generator
) -> tuple[dict[str, list[Tensor]], set[str], dict[str, list[Tensor]]]:
    """What the p-net takes, of every genome by name; names of the parameters that are factors; and buffers."""
    with torch.no_grad():
        made = [generator(flat_genome(genome)) for genome in genomes]
    tensors = {name: [x[name] for x in made] for name in generator.unchanged}
    forms: set[str] = set()
    for tensor in plan.tensors:
        name, dtype, form = tensor.name, DTYPES[tensor.dtype], generator.forms.get(tensor.name)
        keys = [f"{name}_form.{k}" for k in form.inputs] if form else []
        if form and sum(made[0][key].numel() for key in keys if not key.endswith(".base")) < tensor.numel:
            forms |= {name, *tensor.aliases}
            # Beside a base factors are as they were in training.
            tensors |= {key: [x[key] if tensor.base else x[key].to(dtype) for x in made] for key in keys}
        else:
            tensors[name] = [_dense(form, x, name).detach().to(dtype) for x in made]
    buffers = {b.name: [g.buffers[b.name].detach() for g in genomes] for b in plan.buffers}
    return tensors, forms, buffers


def _dense(form: WeightForm | None, tensors: Params, name: str) -> Tensor:
    """A dense weight, or factors multiplied out."""
    if form is None:
        return tensors[name]
    form.hold({k: tensors[f"{name}_form.{k}"] for k in form.inputs})
    return form.make()


def _inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _local(name: str, path: str) -> str:
    return name.removeprefix(f"{path}.") if path else name


def _module_of(pnet: nn.Module, name: str) -> str:
    """The path of the module that uses a tensor: of attention for its output projection, which it does not call."""
    path = name.partition(".parametrizations.")[0].rpartition(".")[0]
    if "_form." in name:
        path = name.rpartition("_form.")[0].rpartition(".")[0]
    parent = path.rpartition(".")[0]
    return parent if path and isinstance(pnet.get_submodule(parent), nn.MultiheadAttention) else path


def _outermost(paths: Any) -> list[str]:
    """Paths without those inside of others."""
    given = set(paths)
    return sorted(path for path in given if not any(other != path and _inside(path, other) for other in given))


def materialize_many(plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> ManyGenomes:
    """One module for many genomes of a plan, each row of a batch with its genome: to serve, compare or ensemble them.

    What genomes share is computed once for the batch: a base, and tensors that are equal in all of them. Factors stay
    factors. Modules with tensors that differ run under `torch.func.vmap`; the p-net around them runs as it is, so it
    may do what `vmap` cannot. It must keep the batch in the first dimension between them. Where it does not (learned
    positions of all rows at once), the module around runs under `vmap`, in the end the whole p-net.

    Rows are computed as for batches of one in eval mode; a p-net that mixes rows, by a mean over the batch, mixes them
    here too. The first call of its kind runs twice, once with a row more, to see where rows are inside of the p-net.
    Batches whose size is also that of another dimension of the inputs get some rows more, so that the two cannot be
    mistaken for each other. Buffers may differ between genomes.

    Args:
        plan: the plan.
        genomes: genomes of the plan, on one device; all are generated now, and their tensors kept.
        pnet: the p-net the plan was made for, or its base; it is not changed, and must not be while it is used here.

    Raises:
        ValueError: if genomes, plan and p-net do not fit together.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> genomes = [gb.init_genome(plan, pnet, seed) for seed in range(5)]
    >>> net = gb.materialize_many(plan, genomes, pnet)
    >>> net(torch.tensor([3, 0, 3]), torch.ones(3, 30)).shape
    torch.Size([3, 20])
    """
    return ManyGenomes(plan, genomes, pnet)
