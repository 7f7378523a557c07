"""The options of a training step, which are checked when they are created."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.cuda import is_available

from gbfunc.formats import AUTO, Stored, stored_as
from gbfunc.parallel import Layout, Mesh, Placement
from gbfunc.train.optimizers import Optimizer
from gbfunc.types import Kernel, Lazy

Remat = Literal["none", "generate", "layer"]


@dataclass(frozen=True)
class StepOptions:
    """Options of `make_train_step`.

    Attributes:
        donate: whether the step may update the state in place, which saves memory and time. Use only the returned state
            afterwards. To keep an earlier state, copy it first with `copy.deepcopy(state)`.
        microbatches: number of equal microbatches into which a batch is split. Weights are generated once for all
            microbatches, and the loss is the mean of their losses. In training mode, a batch norm normalises by the
            statistics of one microbatch, and updates the running statistics once per microbatch.
        clip_norm: maximum Euclidean norm of the genome's gradient.
        amp: `torch.bfloat16` or `torch.float16` runs the p-net under autocast; weights are generated in float32.
        lazy: whether a layer multiplies by the factors of its weight instead of the dense weight. True: whenever
            possible. False: never. `"auto"`: if factors are faster, estimated from operations and bytes. Layers with a
            custom forward, and code outside of layers, read the dense weight (`dense_reads` counts how often).
        remat: which tensors backward recomputes to save memory. `"none"`: no tensor (the fastest). `"generate"`:
            tensors between genome and weights. `"layer"`: also weights, each time a layer uses a weight. Layers then
            use no factors, and all ranks must call the same layers, because each use gathers a split genome.
        on_nonfinite: what to do if loss or gradient is not finite: `"skip"` keeps the state, `"raise"` raises an error.
        kernel: implementation of ReLU, periodic and bilinear g-nets: "compiled" (C++ on a CPU, Triton on a GPU),
            "eager" (PyTorch) or "auto" (compiled where available).
        compile: whether to compile generation, p-net, loss and gradient with `torch.compile`, if possible as one graph.
            The first training step takes long, and calls the p-net and the loss function three times.
        cuda_graph: True captures the training step as one CUDA graph per batch shape (at most four shapes, each after
            three eager steps), with the same losses as eager steps. This needs a GPU, `donate=True`, one rank, and a
            p-net, a loss function and an optimizer that read no values on the CPU. If a training step cannot be
            captured, True raises ValueError, and `"auto"` continues eagerly, with a warning on a GPU.
        mesh: the ranks (`gb.mesh`) that run each training step together, each on its share of the batch. The loss is
            the mean over the global batch. All ranks must use the same arguments. By default, there is a single rank.
        placement: how ranks divide the genome. `"replicated"`: each rank has the whole genome and generates every
            weight; ranks exchange only the genome's gradient. `"sharded"`: each rank along the mesh's g-net axis
            generates an equal share of every ensemble's tiles, and ranks gather the tiles. `"factors"`: like
            `"sharded"`, but ranks gather factors if g-nets have factors. `"auto"`: the fastest, as estimated.
        check_every: number of training steps between checks that ranks have equal states; 0 checks only the first step.
        parallel: how layers are split over the mesh's tensor axis: a style of `torch.distributed.tensor.parallel` per
            module name, as for `parallelize_module` (`gbfunc.parallel.styles.tensor_styles` makes styles). A rank
            generates and applies its block of a weight. All ranks along the axis get the same rows. If the first layer
            takes a sharded input, each rank gets only a slice of every row.
        pipeline: the schedule of microbatches along the mesh's pipeline axis: torch's `"gpipe"`, `"1f1b"`,
            `"interleaved"` or `"zbv"`. All ranks along the axis get the same rows. `microbatches` must divide the
            number of rows. `torch.export` must be able to trace the loss function and the p-net.
        stages: name of the first block of each pipeline stage after the first. By default, stages have similar costs.
        rounding: the dtype for `gb.save`, or quantization steps. The loss is computed from the rounded genome, and
            gradients pass straight through the rounding. Quantization steps from `allocate_steps(..., batch_size=...)`
            add a penalty on the genome's bits. `"auto"` chooses quantization steps for a file of at most `genome_bytes`
            five times, after 60 to 85 % of `total_steps`. At the end, pass `train_step.stored(state)` to `gb.save`.
        genome_bytes: maximum size of the whole file in bytes, for `rounding="auto"`.
        total_steps: number of training steps, for `rounding="auto"`.
        metadata: the metadata that `gb.save` will store, which counts towards `genome_bytes`.
        local_steps: number of training steps on a rank between averages of the genomes (`gbfunc.train.local`). Each
            rank has the whole genome, runs the whole p-net, and reports the loss of its own rows.
        outer: with `local_steps`, the optimizer whose gradient is the ranks' mean update; by default
            `gb.torch_optimizer(torch.optim.SGD, lr=1.0, momentum=0.5, nesterov=True)`.

    Raises:
        ValueError: for options that are out of range or cannot be combined.
    """

    donate: bool = False
    microbatches: int = 1
    clip_norm: float | None = None
    amp: torch.dtype | None = None
    lazy: Lazy = "auto"
    remat: Remat = "none"
    on_nonfinite: Literal["skip", "raise"] = "skip"
    kernel: Kernel = "auto"
    compile: bool = False
    cuda_graph: bool | Literal["auto"] = False
    mesh: Mesh | None = None
    placement: Placement | Literal["auto"] = "auto"
    check_every: int = 100
    parallel: Mapping[str, Any] | None = None
    pipeline: str | None = None
    stages: Sequence[str] | None = None
    rounding: Stored | None = None
    genome_bytes: int | None = None
    total_steps: int | None = None
    metadata: Any = None
    local_steps: int | None = None
    outer: Optimizer | None = None

    def __post_init__(self) -> None:
        counts = {"microbatches": 1, "check_every": 0, "local_steps": 1, "genome_bytes": 1, "total_steps": 1}
        for name, least in counts.items():
            value = getattr(self, name)
            if value is None and name not in ("microbatches", "check_every"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be a number > 0 or None, got {self.clip_norm!r}")
        if self.amp not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"amp must be None, torch.bfloat16 or torch.float16, got {self.amp!r}")
        choices = {"remat": get_args(Remat), "on_nonfinite": ("skip", "raise"), "kernel": get_args(Kernel)}
        for name, known in {"lazy": (True, False, "auto"), "cuda_graph": (True, False, "auto"), **choices}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if (self.rounding == AUTO) != (self.genome_bytes is not None and self.total_steps is not None):
            raise ValueError("rounding='auto' needs genome_bytes= and total_steps=, which go with no other rounding")
        if self.rounding == AUTO and (self.local_steps is not None or self.placement not in ("auto", "replicated")):
            # A quantization step depends on all tiles that share the step, so a rank needs all of these tiles.
            words = f"placement={self.placement!r}, local_steps={self.local_steps}"
            raise ValueError(f"rounding='auto' needs the whole genome on each rank, the same on all, got {words}")
        if self.rounding is not None:
            stored_as(self.rounding, "rounding")
        if self.outer is not None and (self.local_steps is None or not isinstance(self.outer, Optimizer)):
            words = "an optimizer from gb.torch_optimizer, and one for local_steps="
            raise ValueError(f"outer must be {words}, got {type(self.outer).__name__}, local_steps={self.local_steps}")
        for name in (name for name in ("pipeline", "parallel") if getattr(self, name) is not None):
            if self.compile:
                raise ValueError(f"compile=True does not support {name}=: leave out compile=True or {name}=")
        if self.cuda_graph is True and (words := self.graph_lacks()):
            raise ValueError(f"cuda_graph=True needs {words}")
        if self.compile and (self.microbatches > 1 or self.remat != "none"):
            raise ValueError("compile=True needs microbatches=1 and remat='none': the compiler plans what to recompute")

    def graph_lacks(self) -> str:
        """Return what CUDA graphs need and the options lack, as text for an error; "" if nothing is missing."""
        if not is_available():
            return "a CUDA device, got none: take cuda_graph='auto' or False"
        needs = {"donate=True": self.donate, "on_nonfinite='skip'": self.on_nonfinite == "skip"}
        needs |= {"rounding='auto' left out": self.rounding != AUTO, "local_steps=None": self.local_steps is None}
        needs["a mesh of one rank"] = self.mesh is None or self.mesh.world == 1
        missing = [words for words, met in needs.items() if not met]
        return f"{', '.join(missing)}: a graph is of one process and reads nothing" if missing else ""

    def check_layout(self, layout: Layout) -> None:
        """Raise ValueError if options do not fit the plan, the mesh or the genome's placement."""
        sizes = layout.mesh.sizes
        local = "local_steps= needs the whole {} on each rank: {}, got {}".format
        if self.local_steps is not None and sizes["tensor"] * sizes["pipeline"] > 1:
            raise ValueError(local("p-net", "a mesh with only a data axis", layout.mesh))
        if self.local_steps is not None and layout.placement != "replicated":
            raise ValueError(local("genome", "take placement='replicated'", repr(layout.placement)))
        if self.parallel is None and sizes["tensor"] > 1:
            raise ValueError("the mesh has a tensor axis: parallel= must say how layers are split over it")
        if self.pipeline is None and sizes["pipeline"] > 1:
            raise ValueError("the mesh has a pipeline axis: pipeline= must say by which schedule")
        if layout.plan.base is not None and (self.parallel is not None or self.pipeline is not None):
            raise ValueError("a p-net with a base is not split: parallel= and pipeline= are for plans without one")
        if not layout.sharded:
            return
        if self.remat == "layer" and self.microbatches > 1:
            # A rank with fewer rows may have fewer microbatches, and the other ranks would wait forever in gathers.
            raise ValueError("remat='layer' on a split genome gathers for each use: it needs microbatches=1")
        if self.rounding is not None:
            raise ValueError("rounding= needs the whole genome on each rank: take placement='replicated'")
        if layout.placement == "sharded" and self.lazy is True:
            raise ValueError("lazy=True needs factors, and placement='sharded' gathers tiles: take placement='factors'")
