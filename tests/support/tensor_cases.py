"""What tensor-parallel ranks must find as one process does: each case returns tensors, for a mesh or for none."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from gbfunc.parallel.activations import chunk_sizes
from gbfunc.parallel.styles import tensor_styles
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.rank_cases import TYPES
from tests.support.ranks import PATIENCE, said

ADAMW = gb.torch_optimizer(torch.optim.AdamW, lr=0.25)


class Toy(nn.Module):
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
    return {"in_proj": ColwiseParallel(input_layouts=Shard(0)), "out_proj": RowwiseParallel(output_layouts=Shard(0))}


def plain_styles() -> dict[str, Any]:
    return {"in_proj": ColwiseParallel(), "out_*": RowwiseParallel()}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(mesh: Mesh, x: Tensor, dim: int) -> Tensor:
    """This tensor rank's part of a tensor along a dimension, maybe empty."""
    axis = mesh.axis("tensor")
    start = sum(chunk_sizes(x.shape[dim], axis.size)[: axis.rank])
    return x.narrow(dim, start, chunk_sizes(x.shape[dim], axis.size)[axis.rank])


def steps(plan: Any, pnet: nn.Module, loss_fn: Any, batches: Any, mesh: Mesh | None, lr: float, **options: Any) -> Any:
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.AdamW, lr=lr), mesh=mesh, **options)
    state, reports = step.init(3), []
    for batch in batches:
        state, info = step(state, batch)
        reports.append(torch.stack([info.loss, info.grad_norm, *info.aux.values()]))
    return {"reports": torch.stack(reports), "state": step.gather(state)}


def toy(
    mesh: Mesh | None,
    hypernet: Any,
    lead: tuple[int, ...],
    styles: Callable[[], dict[str, Any]] = sequence_styles,
    max_tile: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    pnet = Toy().double()
    batches: Any = [(draw(*lead, 10, seed=i), draw(*lead, 5, seed=100 + i)) for i in range(2)]
    if mesh is not None:
        options["parallel"] = styles()
        batches = [mesh.shard_batch(batch) for batch in batches]
        if styles is sequence_styles:
            batches = [tuple(part(mesh, x, 0) for x in batch) for batch in batches]
    return steps(gb.make_plan(pnet, hypernet, max_tile=max_tile), pnet, squared, batches, mesh, 0.25, **options)


CASES: dict[str, Callable[[Mesh | None], Any]] = {}
for _name, _hypernet in TYPES.items():
    CASES[f"whole {_name}"] = partial(toy, hypernet=_hypernet, lead=(20,), styles=plain_styles)
    CASES[f"sequence {_name}"] = partial(toy, hypernet=_hypernet, lead=(12, 12), max_tile=(5, 7))
_toy = partial(toy, hypernet=TYPES["periodic"])
# With three ranks, one or two have no rows.
CASES["4 rows in a sequence"] = partial(_toy, lead=(4,), microbatches=2)
CASES["2 rows in a sequence"] = partial(_toy, lead=(2,))
for _lazy, _remat, _micro in ((True, "none", 2), (True, "layer", 1), (False, "generate", 2), ("auto", "layer", 2)):
    for _styles in (plain_styles, sequence_styles):
        _options: dict[str, Any] = {"lazy": _lazy, "remat": _remat, "microbatches": _micro, "styles": _styles}
        CASES[f"lazy {_lazy} {_remat} {_styles.__name__}"] = partial(_toy, lead=(12,), max_tile=(11, 9), **_options)


class Residual(nn.Module):
    """A block as sequence parallelism splits it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp, self.head = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return self.head(self.norm2(x))


def residual(mesh: Mesh | None, manner: str, **options: Any) -> Any:
    torch.manual_seed(0)
    pnet = Residual().double()
    sequence = {
        "norm*": SequenceParallel(),
        "mlp.0": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    classes = {
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    prepared = sequence | {
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.0": ColwiseParallel(),
    }

    def loss_fn(net: Callable[..., Any], batch: Any) -> Any:
        x, y = batch
        with loss_parallel() if manner == "classes" and mesh is not None else nullcontext():
            return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    batches: Any = []
    for i in range(2):
        x, y = draw(6, 7, 8, seed=i), torch.randint(0, 12, (6, 7), generator=torch.Generator().manual_seed(i))
        if mesh is not None:
            x, y = mesh.shard_batch((x, y))
            x = x if manner == "classes" else part(mesh, x, 1)
        batches.append((x, y))
    if mesh is not None:
        options["parallel"] = {"sequence": sequence, "classes": classes, "prepared": prepared}[manner]
    return steps(gb.make_plan(pnet, TYPES["periodic"], max_tile=6), pnet, loss_fn, batches, mesh, 0.05, **options)


for _manner, _lazy in (("sequence", True), ("classes", False), ("classes", True), ("prepared", False)):
    CASES[f"residual {_manner} lazy {_lazy}"] = partial(residual, manner=_manner, lazy=_lazy)


def next_token(net: Callable[..., Any], tokens: Tensor) -> Tensor:
    out = net(tokens[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def language_model(name: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(22, 9, layers, 16, 4, 24, bias=True)
    import transformers

    if name == "gpt2":
        sizes: dict[str, Any] = {"n_layer": layers, "n_head": 4, "n_embd": 16, "vocab_size": 22, "n_positions": 9}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(config).train()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 22, "max_position_embeddings": 9}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()


def text(mesh: Mesh | None, name: str, hypernet: Any, include: Any = (), layers: int = 2, **options: Any) -> Any:
    pnet = language_model(name, layers).double()
    plan = gb.make_plan(pnet, hypernet, max_tile=10, include=include)
    if mesh is not None and mesh.sizes["tensor"] > 1:
        options["parallel"] = tensor_styles(pnet)
    if mesh is None:
        options = {k: v for k, v in options.items() if k not in ("pipeline", "stages", "microbatches", "placement")}
    rows = 8 if layers > 2 else 4
    batches = [torch.randint(0, 22, (rows, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    batches = batches if mesh is None else [mesh.shard_batch(batch) for batch in batches]
    return steps(plan, pnet, next_token, batches, mesh, 0.02, **options)


for _name, _kind, _words, _options in (
    ("gpt", "gnet", False, {"remat": "layer"}),
    ("gpt", "shared", True, {}),
    ("gpt2", "periodic", True, {"lazy": True, "remat": "layer"}),
    ("llama", "periodic", False, {"lazy": True}),
    ("llama", "gnet", True, {}),
):
    _include = [r"(wte|tokens)\.weight$"] if _words else ()
    _make = partial(text, name=_name, hypernet=TYPES[_kind], include=_include, **_options)
    CASES[f"{_name} {_kind} {'with words' if _words else ''}"] = _make


def one_word(mesh: Mesh | None) -> Any:
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Embedding(1, 6), nn.Linear(6, 5)).double()
    styles = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
    batch: Any = torch.zeros(4, 7, dtype=torch.int64), draw(4, 7, 5)
    options: dict[str, Any] = {} if mesh is None else {"parallel": styles}
    batches = [batch if mesh is None else mesh.shard_batch(batch)]
    return steps(gb.make_plan(pnet, gb.periodic(2)), pnet, squared, batches, mesh, 0.25, **options)


CASES["one word"] = one_word


SHARDED: dict[str, Callable[[Mesh | None], Any]] = {}
"""With a genome that is split over ranks."""
for _placement in ("sharded", "factors"):
    for _kind, _remat in (("periodic", "layer"), ("gnet", "none"), ("shared", "none"), ("stochastic", "layer")):
        _options = {"placement": _placement, "remat": _remat}
        SHARDED[f"{_placement} {_kind}"] = partial(text, name="gpt", hypernet=TYPES[_kind], **_options)
    _options = {"placement": _placement, "layers": 4, "pipeline": "1f1b", "microbatches": 2}
    SHARDED[f"{_placement} pipeline"] = partial(text, name="gpt", hypernet=TYPES["periodic"], **_options)

PIPELINES: dict[str, Callable[[Mesh | None], Any]] = {}
for _schedule, _case, _options in (
    ("gpipe", "gpt2", {"name": "gpt2"}),
    ("gpipe", "gpt periodic", {}),
    ("gpipe", "gpt layer", {"remat": "layer", "lazy": False}),
    ("1f1b", "llama", {"name": "llama", "hypernet": TYPES["gnet"]}),
    ("1f1b", "gpt periodic", {}),
    ("1f1b", "gpt generate", {"hypernet": TYPES["shared"], "remat": "generate", "lazy": True}),
    ("interleaved", "gpt2", {"name": "gpt2"}),
    ("interleaved", "gpt gnet", {"hypernet": TYPES["gnet"]}),
    ("interleaved", "gpt generate", {"remat": "generate", "lazy": True}),
    ("zbv", "llama", {"name": "llama"}),
    ("zbv", "gpt layer", {"remat": "layer", "lazy": False}),
    ("zbv", "gpt gnet", {"hypernet": TYPES["gnet"]}),
):
    _options = {"name": "gpt", "hypernet": TYPES["periodic"], **_options, "layers": 4, "microbatches": 4}
    PIPELINES[f"{_case} {_schedule}"] = partial(text, pipeline=_schedule, **_options)


def before_fork(names: Sequence[str] = (), **arguments: Any) -> None:
    for name in ("gpt2", "llama"):
        if any(case.startswith(name) for case in names):
            with suppress(ImportError):
                language_model(name)


def run_cases(init_method: str, names: list[str], **axes: Any) -> Mapping[str, Any]:
    with gb.mesh(**axes, timeout=30 * PATIENCE, init_method=init_method) as mesh:
        return {name: said((CASES | PIPELINES | SHARDED)[name], mesh) for name in names}


def die_in_a_pipeline(init_method: str, victim: int, timeout: float) -> str:
    from gbfunc.parallel.pipeline import Pipeline

    pnet = language_model("gpt", 4).double()
    plan, compute, steps = gb.make_plan(pnet, TYPES["periodic"], max_tile=10), Pipeline.compute, 0

    def dying(self: Pipeline, net: nn.Module, stage: int, microbatch: Any, received: Tensor) -> Any:
        if stage == victim and steps == 1 and received.sum() != 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, net, stage, microbatch, received)

    Pipeline.compute = dying
    mesh = gb.mesh(pipeline=4, timeout=timeout, init_method=init_method)
    step = gb.make_train_step(plan, pnet, next_token, ADAMW, mesh=mesh, pipeline="1f1b", microbatches=4)
    state = step.init(0)
    try:
        for steps in range(3):
            state, _ = step(state, torch.randint(0, 22, (8, 9), generator=torch.Generator().manual_seed(steps)))
    except CollectiveError as error:
        return str(error)
    return "nobody died"


def rows_in_a_pipeline(init_method: str) -> dict[str, Any]:
    pnet = language_model("gpt", 4).double()
    plan = gb.make_plan(pnet, TYPES["periodic"], max_tile=10)
    batch = torch.randint(0, 22, (4, 9), generator=torch.Generator().manual_seed(0))
    with gb.mesh(pipeline=2, data=2, timeout=30 * PATIENCE, init_method=init_method) as mesh:
        step = gb.make_train_step(plan, pnet, next_token, ADAMW, mesh=mesh, pipeline="1f1b", microbatches=4)
        state = step.init(3)
        words = said(step, state, batch[:3])
        _, info = step(state, batch if mesh.axis("data").rank == 0 else batch[:0])
        return {"words": words, "loss": info.loss, "norm": info.grad_norm}
