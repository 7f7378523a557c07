"""The options of a training step, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gbfunc.parallel import Placement
from gbfunc.plan import StoredDtype, stored_name
from gbfunc.types import Kernel

Lazy = bool | Literal["auto"]
Remat = Literal["none", "generate", "layer"]


@dataclass(frozen=True)
class StepOptions:
    """Options of `make_train_step`, which says what each means.

    Raises:
        ValueError: for options out of range, or that exclude each other.
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
    placement: Placement | Literal["auto"] = "auto"
    check_every: int = 100
    pipeline: str | None = None
    stages: tuple[str, ...] | None = None
    rounding: StoredDtype | None = None

    def __post_init__(self) -> None:
        for name, least in (("microbatches", 1), ("check_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be a number > 0 or None, got {self.clip_norm!r}")
        if self.amp not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"amp must be None, torch.bfloat16 or torch.float16, got {self.amp!r}")
        for name, known in (
            ("lazy", (True, False, "auto")),
            ("remat", ("none", "generate", "layer")),
            ("on_nonfinite", ("skip", "raise")),
            ("kernel", ("auto", "eager", "compiled", "reference")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.rounding is not None:
            stored_name(self.rounding, "rounding")
        if self.pipeline is None and self.stages is not None:
            raise ValueError("stages= are those of a pipeline: say pipeline=")
        if self.compile and self.pipeline is not None:
            raise ValueError("compile=True and pipeline= do not go together")
        if self.compile and (self.microbatches > 1 or self.remat != "none"):
            raise ValueError("compile=True decides itself what to keep: it needs microbatches=1 and remat='none'")

    @property
    def usable_lazy(self) -> Lazy:
        """`lazy`, but for compiled steps of torch 2.5, whose Dynamo does not trace forms of layers."""
        return self.lazy if not self.compile or torch.__version__ >= "2.6" else False

    def check_placement(self, sharded: bool, placement: Placement) -> None:
        """Raise ValueError for options that cannot be where the genome is placed so."""
        if sharded and self.remat == "layer" and self.microbatches > 1:
            # Ranks with fewer rows may have fewer microbatches, and would miss the gathers of the others.
            raise ValueError("remat='layer' on a split genome gathers for each use: it needs microbatches=1")
        if sharded and self.rounding is not None:
            # Tiles of several ranks may have a scale in common.
            raise ValueError("rounding= needs the whole genome on each rank: take placement='replicated'")
        if sharded and placement == "sharded" and self.lazy is True:
            raise ValueError("lazy=True needs factors, and placement='sharded' gathers tiles: take placement='factors'")
