"""What tensor-parallel ranks must find as one process does: each case returns tensors, for a mesh or for none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import gbfunc as gb
from gbfunc.parallel.styles import tensor_styles
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.rank_cases import TYPES
from tests.support.ranks import PATIENCE

ADAMW = gb.torch_optimizer(torch.optim.AdamW, lr=0.25)


class Toy(nn.Module):
    """The model of torch's example of sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.relu(self.in_proj(x)))


def squared(net: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    x, y = batch
    out = net(x)
    return F.mse_loss(out, y), {"mae": (out - y).abs().mean()}


def sequence_styles() -> dict[str, Any]:
    return {
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    }


def plain_styles() -> dict[str, Any]:
    return {"in_proj": ColwiseParallel(), "out_*": RowwiseParallel()}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def toy(
    mesh: gb.Mesh | None,
    hypernet: Any,
    lead: tuple[int, ...],
    styles: Callable[[], dict[str, Any]] = sequence_styles,
    steps: int = 4,
    max_tile: Any = None,
    **options: Any,
) -> Any:
    """Steps of AdamW on the toy; with a sequence-parallel start each rank gets its part of the rows."""
    torch.manual_seed(0)
    pnet = Toy().double()
    plan = gb.make_plan(pnet, hypernet, max_tile=max_tile)
    parallel = None if mesh is None else styles()
    step = gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, parallel=parallel, **options)
    state, reports = step.init(3), []
    for i in range(steps):
        batch = draw(*lead, 10, seed=i), draw(*lead, 5, seed=100 + i)
        if mesh is not None:
            batch = mesh.shard_batch(batch)
            if styles is sequence_styles:
                axis = mesh.axis("tensor")
                batch = tuple(x.chunk(axis.size)[axis.rank] for x in batch)
        state, info = step(state, batch)
        reports.append(torch.stack([info.loss, info.grad_norm, info.aux["mae"]]))
    return {"reports": torch.stack(reports), "state": step.gather(state)}


CASES: dict[str, Callable[[gb.Mesh | None], Any]] = {}
for _name, _hypernet in TYPES.items():
    for _lead in ((20,), (12, 12)):
        CASES[f"sequence {_lead} {_name}"] = partial(toy, hypernet=_hypernet, lead=_lead)
    CASES[f"whole {_name}"] = partial(toy, hypernet=_hypernet, lead=(20,), styles=plain_styles, steps=3)
    for _tile in (4, (5, 7)):
        CASES[f"tiles {_tile} {_name}"] = partial(toy, hypernet=_hypernet, lead=(20,), steps=3, max_tile=_tile)
for _lazy in (True, False, "auto"):
    for _remat in ("none", "generate", "layer"):
        for _micro in (1, 2):
            for _styles in (plain_styles, sequence_styles):
                CASES[f"lazy {_lazy} remat {_remat} micro {_micro} {_styles.__name__}"] = partial(
                    toy,
                    hypernet=TYPES["periodic"],
                    lead=(12,),
                    styles=_styles,
                    steps=3,
                    max_tile=(11, 9),
                    lazy=_lazy,
                    remat=_remat,
                    microbatches=_micro,
                )


def next_token(net: Callable[..., Any], tokens: Tensor) -> Tensor:
    out = net(tokens[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def language_model(name: str, layers: int = 2) -> nn.Module:
    """A small p-net of a kind that has ready-made styles."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(22, 9, layers, 16, 4, 24, bias=True)
    import transformers

    if name == "gpt2":
        sizes: dict[str, Any] = {"n_layer": layers, "n_head": 4, "n_embd": 16, "vocab_size": 22, "n_positions": 9}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=22,
        max_position_embeddings=9,
    )
    return transformers.LlamaForCausalLM(config).train()


def text(mesh: gb.Mesh | None, name: str, hypernet: Any, include: Any = (), layers: int = 2, **options: Any) -> Any:
    """Steps on a language model, its vocabulary split where there is a tensor axis."""
    pnet = language_model(name, layers).double()
    plan = gb.make_plan(pnet, hypernet, max_tile=10, include=include)
    parallel = tensor_styles(pnet) if mesh is not None and mesh.sizes["tensor"] > 1 else None
    if mesh is None:
        options = {k: v for k, v in options.items() if k not in ("pipeline", "stages", "microbatches")}
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=0.02)
    step = gb.make_train_step(plan, pnet, next_token, optimizer, mesh=mesh, parallel=parallel, **options)
    state, reports = step.init(3), []
    for i in range(3):
        batch = torch.randint(0, 22, (8 if layers > 2 else 4, 9), generator=torch.Generator().manual_seed(i))
        state, info = step(state, batch if mesh is None else mesh.shard_batch(batch))
        reports.append(torch.stack([info.loss, info.grad_norm]))
    return {"reports": torch.stack(reports), "state": step.gather(state)}


for _name in ("gpt", "gpt2", "llama"):
    for _kind in ("periodic", "gnet", "shared"):
        CASES[f"{_name} {_kind}"] = partial(text, name=_name, hypernet=TYPES[_kind])
    CASES[f"{_name} tokens"] = partial(text, name=_name, hypernet=TYPES["periodic"], include=[r"(wte|tokens)\.weight$"])
    CASES[f"{_name} thin"] = partial(text, name=_name, hypernet=TYPES["periodic"], lazy=True, remat="layer")
    CASES[f"{_name} layer"] = partial(text, name=_name, hypernet=TYPES["gnet"], remat="layer")


PIPELINES: dict[str, Callable[[gb.Mesh | None], Any]] = {}
for _schedule in ("gpipe", "1f1b", "interleaved", "zbv"):
    _options: dict[str, Any] = {"layers": 4, "pipeline": _schedule, "microbatches": 4}
    for _kind in ("periodic", "gnet", "shared"):
        PIPELINES[f"gpt {_schedule} {_kind}"] = partial(text, name="gpt", hypernet=TYPES[_kind], **_options)
    for _remat in ("generate", "layer"):
        PIPELINES[f"gpt {_schedule} {_remat}"] = partial(
            text, name="gpt", hypernet=TYPES["periodic"], remat=_remat, lazy=_remat == "generate", **_options
        )
    for _name in ("gpt2", "llama"):
        PIPELINES[f"{_name} {_schedule}"] = partial(text, name=_name, hypernet=TYPES["periodic"], **_options)


def before_fork(names: list[str], **axes: int) -> None:
    """Import the libraries of the cases, which takes seconds."""
    for name in ("gpt2", "llama"):
        if any(case.startswith(name) for case in names):
            with suppress(ImportError):
                language_model(name)


def run_cases(init_method: str, names: list[str], **axes: Any) -> Mapping[str, Any]:
    """All cases on this rank; an error as its words."""
    results = {}
    with gb.mesh(**axes, timeout=30 * PATIENCE, init_method=init_method) as mesh:
        for name in names:
            try:
                results[name] = (CASES | PIPELINES)[name](mesh)
            except gb.CollectiveError:
                raise
            except Exception:
                results[name] = traceback.format_exc()
    return results
