"""Generates the p-net's weights from a genome in one autograd graph.

    leaves + codes --vmap(apply)--> tiles [T, r, c], or factors [T, r, k] and [T, c, k]     one `Stack` per ensemble
    slots --form.of--> the layer's input: a weight, factors or leaves             one form (`layers.forms`) per tensor

A slot is one generated matrix. A span is the range of a slot's tiles in its ensemble. A form determines how a layer
gets its weight (`DenseWeight`, `WeightForm`). `make_generator` chooses forms, and the tensors that ranks gather.

Suffixes: T tiles, S spans; r rows and c columns of a tile, R rows and C columns of a matrix; k rank of the factors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from gbfunc.genome import Noise, codes_of
from gbfunc.hypernets import new_rows
from gbfunc.hypernets.ensemble import Constants, Evaluation, is_exporting, joined, with_factors
from gbfunc.layers.forms import DenseWeight, Needs, Source, Target, WeightForm, outside_autocast
from gbfunc.plan import Ensemble
from gbfunc.tiling import Cut, join_all
from gbfunc.trees import DIRECT, GNET
from gbfunc.types import Factors, Kernel, Params

_RUN_BYTES = 2**22
"""Least bytes of tiles to evaluate at once. Smaller parts would take more time, much larger parts more memory."""


class Generated(NamedTuple):
    """A `Source` that is already generated: the matrix of a slot, or the factors of the slot's tiles."""

    value: Tensor | Factors
    cut: Cut

    def matrix(self) -> Tensor:
        value = self.value
        return self.cut.crop(value if isinstance(value, Tensor) else joined(value, self.cut.grid))

    def factors(self) -> Factors:
        assert isinstance(self.value, Factors)
        return self.value

    def inputs(self) -> Sequence[Tensor]:
        return ()


class Local(NamedTuple):
    """A `Source` that generates a slot's matrix or factors when a `WeightForm` requests the matrix or factors."""

    evaluation: Evaluation
    cut: Cut

    def matrix(self) -> Tensor:
        return self.cut.crop(self.evaluation.matrix(self.cut.grid))

    def factors(self) -> Factors:
        return Generated(self.evaluation.tiles(), self.cut).factors()

    def inputs(self) -> Sequence[Tensor]:
        return *self.evaluation.leaves.values(), *(self.evaluation.noise or {}).values()


class Stack:
    """Generates the matrices (slots) of an ensemble from the ensemble's leaves, with all tiles on this rank.

    `slots` are the indices of the matrices to generate, `cuts` the tiles of each matrix (`Cut`). `needs` is what the
    `WeightForm` of a weight needs: "matrix", "factors" or "leaves". `split` turns an `Evaluation` of the g-nets into
    one `Source` per matrix. `names` maps the ensemble's leaves to the names that `flat_genome` gives to the leaves.
    """

    def __init__(self, ensemble: Ensemble, kernel: Kernel, cuts: Mapping[int, Cut], needs: Needs = "matrix") -> None:
        if kernel not in get_args(Kernel):
            raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {kernel!r}")
        self.ensemble, self.needs, spans = ensemble, needs, ensemble.spans
        self._kernel: Kernel = kernel
        self.slots, self.cuts = [*cuts], [*cuts.values()]
        self._grids = [cut.grid for cut in self.cuts]
        self._counts = [grid.n_tiles for grid in self._grids]
        self._local_counts: Sequence[int] = self._counts  # number of tiles per slot on this rank
        self.names = {k: f"{GNET}{ensemble.name}/{k}" for k in ensemble.leaves}
        self._noise = [*ensemble.hypernet.noise_shapes(ensemble.dims)]
        self._shared = tuple(k for k, leaf in ensemble.leaves.items() if leaf.scope == "group")
        self._tiles: slice | Tensor = slice(0, ensemble.n_tiles)
        self._some = len(cuts) < len(spans) or any(cut.tiles is not None for cut in self.cuts)
        if self._some:
            of_slots = [(i, range(spans[i].slot.grid.n_tiles) if c.tiles is None else c.tiles) for i, c in cuts.items()]
            tiles = [spans[i].first + n for i, numbers in of_slots for n in numbers]
            self._tiles = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        self._built: dict[tuple[torch.dtype, torch.device], Constants] = {}
        self.split = {"matrix": self._matrices, "factors": self.of_tiles, "leaves": self._apart}[needs]

    def constants(self, dtype: torch.dtype, device: torch.device) -> Constants:
        key, exporting = (dtype, device), is_exporting()
        if key in self._built and not exporting:
            return self._built[key]
        e = self.ensemble
        first, scales = [p.first for p in e.spans], [p.slot.scale for p in e.spans]
        scaled = e.hypernet.standardised or isinstance(e.hypernet, new_rows)
        scale = _of_spans(first, scales, e.n_tiles, dtype, device) if scaled else None
        more = *codes_of(e, dtype, device), scale, self._groups(device) if self._shared else None
        constants = Constants.make(e.hypernet, e.dims, self._kernel, *more).of(self._tiles)
        if not exporting:
            self._built[key] = constants
        return constants

    def _groups(self, device: torch.device) -> Tensor:
        """Return the index of every tile's group [T] (see `Slot.group`). An exported graph computes the indices."""
        groups = self.ensemble.groups
        if not is_exporting():
            return torch.from_numpy(groups).to(device, torch.int64)
        first = np.flatnonzero(np.diff(groups, prepend=-2) != 1)
        offsets = (groups[first] - first).tolist()
        offsets_T = _of_spans(first.tolist(), offsets, len(groups), torch.int64, device)
        return offsets_T + torch.arange(len(groups), device=device)

    def evaluation(self, leaves: Params, noise: Params | None, dtype: torch.dtype, device: torch.device) -> Evaluation:
        """Select constants, leaves and noise of this rank's tiles, from a `flat_genome` and the noise of all tiles."""
        leaves = {k: leaves[name] for k, name in self.names.items()}
        if self._some:
            leaves = {k: v if k in self._shared else v[self._tiles] for k, v in leaves.items()}
        noise = noise and {k: v[self._tiles] for k, v in noise.items()}
        return Evaluation(self.constants(dtype, device), leaves, noise)

    def slot(self, number: int, inputs: Iterator[Tensor]) -> Source:
        """Return the `Source` of a slot. `inputs` yields leaves and noise of the slot's tiles (see `Source.inputs`)."""
        return Local(self._filled(number, inputs), self.cuts[number])

    def _filled(self, number: int, inputs: Iterator[Tensor]) -> Evaluation:
        leaves = {k: next(inputs) for k in self.names}
        noise = {k: next(inputs) for k in self._noise} or None
        like, first = next(iter(leaves.values())), sum(self._local_counts[:number])
        constants = self.constants(like.dtype, like.device).of(slice(first, first + self._local_counts[number]))
        return Evaluation(constants, leaves, noise)

    def _apart(self, evaluation: Evaluation) -> list[Local]:
        return [Local(slot, cut) for slot, cut in zip(evaluation.split(self._local_counts), self.cuts, strict=True)]

    def _matrices(self, evaluation: Evaluation) -> list[Generated]:
        """Generate the slots as matrices. Large matrices are generated one after the other, to save memory."""
        dims = self.ensemble.dims
        spans = _spans([n * dims.rows * dims.cols * evaluation.constants.row.itemsize for n in self._counts])
        split = evaluation.split([sum(self._counts[span]) for span in spans])
        matrices = [m for i, slots in enumerate(split) for m in slots.matrices(self._grids[spans[i]])]
        return [Generated(m, self.cuts[i]) for i, m in enumerate(matrices)]

    def of_tiles(self, of: Evaluation | Tensor | Factors) -> list[Generated]:
        """Divide the ensemble's tiles, or the factors of its tiles, among the slots."""
        tiles = of.tiles() if isinstance(of, Evaluation) else of
        if isinstance(tiles, Tensor):
            return [Generated(m, cut) for m, cut in zip(join_all(tiles, self._grids), self.cuts, strict=True)]
        if len(self._counts) == 1:
            return [Generated(tiles, self.cuts[0])]
        left, right = tiles.left.split(self._counts), tiles.right.split(self._counts)
        return [Generated(Factors(a, b), cut) for a, b, cut in zip(left, right, self.cuts, strict=True)]


def _of_spans(first_S: list[int], values_S: list[float], n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Repeat each span's value for the tiles of the span: [S] -> [T]. Span s begins at tile `first_S[s]`."""
    if len(set(values_S)) == 1:
        # Do not use `torch.full`, whose value ONNX rounds to float32.
        return torch.tensor(values_S[:1], dtype=dtype, device=device).expand(n)
    values, first = torch.tensor(values_S, dtype=dtype, device=device), torch.tensor(first_S, device=device)
    if is_exporting():
        return values[(torch.arange(n, device=device)[:, None] >= first).sum(1) - 1]
    return values.repeat_interleave(torch.diff(first, append=first.new_tensor([n])))


def _spans(sizes: list[int]) -> list[slice]:
    """Divide consecutive slots of `sizes` bytes into runs of at least `_RUN_BYTES`. The last run may be smaller."""
    spans: list[slice] = []
    first = total = 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or i == len(sizes):
            spans.append(slice(first, i))
            first, total = i, 0
    return spans


Form = DenseWeight | WeightForm


class Generator:
    """Generates weights from a genome's leaves: `generator(leaves) -> {name: tensor}`. See `make_generator`."""

    def __init__(
        self,
        stacks: Sequence[Stack],  # Last: every `Stack` with needs="leaves", whose g-nets a call does not evaluate
        places: Sequence[tuple[Form, list[tuple[int, int]]]],  # Per tensor: form; (stack, its slot) index per matrix
        forms: dict[str, WeightForm],  # How layers get weights that are not dense; a key for each tied name
        direct: Sequence[Target],
        unchanged: Mapping[str, Callable[[torch.device], Tensor]],  # device -> the base's parameter, if it has no delta
        order: Sequence[str],  # The names that a call returns
        dtype: torch.dtype,
    ) -> None:
        # Call `sin` and `tanh` now: simultaneous first calls by threads have errors of 8e-5 (pytorch issue 188792).
        torch.tanh(torch.sin(torch.zeros(1, dtype=torch.float32, device="cpu")))
        self.stacks, self.forms, self.unchanged = stacks, forms, unchanged
        self.frozen = {*unchanged, *(key for form in forms.values() for key in form.frozen)}
        self.places, self.order, self._dtype = places, order, dtype
        self._direct = {f"{DIRECT}{t.name}": t for t in direct}
        self._evaluated = sum(stack.needs != "leaves" for stack in stacks)
        self._like = next((name for stack in stacks for name in stack.names.values()), None)

    def __call__(self, leaves: Params, noise: Noise | None = None, *, counts: bool = True) -> Params:
        """Generate all parameters by name; for a weight with a `WeightForm`, the form's `inputs`, such as factors.

        `leaves` is a dict of `flat_genome`, or this rank's rows of a split genome. `noise` is for all tiles;
        without noise, weights are mean weights. `counts=False` (a rank without data) makes this rank's gradients zero.
        """
        dtype, device = self._kind(leaves)
        noise = noise or {}
        with outside_autocast(device):
            evaluations = [s.evaluation(leaves, noise.get(s.ensemble.name), dtype, device) for s in self.stacks]
            evaluations[: self._evaluated] = with_factors(evaluations[: self._evaluated])
            slots = self._slots(evaluations, counts)
            tensors = {name: on(device) for name, on in self.unchanged.items()}
            for form, places in self.places:
                tensors.update(form.of([slots[stack][slot] for stack, slot in places]))
            for leaf, target in self._direct.items():
                tensors[target.name] = target.block(leaves[leaf])
            return {k: tensors[k] for k in self.order}

    def _slots(self, evaluations: Sequence[Evaluation], counts: bool) -> list[Sequence[Source]]:
        # Do not use `zip(strict=True)`, which torch.compile of torch 2.5 cannot trace.
        return [stack.split(evaluations[i]) for i, stack in enumerate(self.stacks)]

    def prepare(self, leaves: Params) -> None:
        """Build codes and scales for the dtype and device of `leaves`, because compiled code cannot build codes."""
        dtype, device = self._kind(leaves)
        for on in self.unchanged.values():
            on(device)
        for stack in self.stacks:
            stack.constants(dtype, device)

    def _kind(self, leaves: Params) -> tuple[torch.dtype, torch.device]:
        if self._like is not None:
            return leaves[self._like].dtype, leaves[self._like].device
        like = next(iter(leaves.values()), None)
        return self._dtype, torch.device("cpu") if like is None else like.device
