"""One training step in any mode, and its oracle: dense weights, `functional_call` and autograd.

The oracle sees no mode: it generates the dense weights once, runs the p-net on them by `torch.func.functional_call` as
leaves, as an ordinary p-net's parameters are, and hands their gradients through generation by `torch.autograd.grad`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from tests.support.zoo import SGD

LossFn = Callable[[Callable[..., Any], Tensor], Any]


def _keep_gradients(grads: Any, state: Any, params: Any, roles: Any, *, donate: bool = False) -> Any:
    return grads, state


READ_GRADIENTS = SGD._replace(update=_keep_gradients)
"""An optimizer that returns the gradients in place of the parameters: exact in every dtype."""


class Answer(NamedTuple):
    loss: Tensor  # mean over the microbatches
    gradients: dict[str, Tensor]  # of every trained leaf of the genome: `gnets/ENSEMBLE/LEAF`, `direct/NAME`
    buffers: dict[str, Tensor]  # of the p-net, after the step


def flat_leaves(genome: Any, pnet: nn.Module) -> dict[str, Tensor]:
    parameters = dict(pnet.named_parameters())
    flat = {f"gnets/{e}/{k}": leaf for e, leaves in genome.gnets.items() for k, leaf in leaves.items()}
    return flat | {f"direct/{k}": v for k, v in genome.direct.items() if parameters[k].requires_grad}


def step_answer(
    plan: gb.Plan, pnet: nn.Module, loss_fn: LossFn, batch: Tensor, *, seed: int = 0, **options: Any
) -> Answer:
    step = gb.make_train_step(plan, pnet, loss_fn, READ_GRADIENTS, **options)
    start = step.init(seed)
    if plan.base is not None:
        start = start._replace(gnets=moved_deltas(plan, start.gnets))
    state, info = step(start, batch)
    assert bool(info.finite)
    return Answer(info.loss, flat_leaves(state, pnet), state.buffers)


def moved_deltas(plan: gb.Plan, gnets: Any) -> Any:
    """Leaves with other numbers than zeros, with which deltas of a base begin."""
    draw = torch.Generator().manual_seed(11)
    return {
        e: {
            k: leaf + 0.5 * torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf)
            for k, leaf in own.items()
        }
        for e, own in gnets.items()
    }


def weights_of(plan: gb.Plan, genome: gb.Genome, pnet: nn.Module) -> dict[str, Tensor]:
    if plan.base is None:
        return gb.generate(plan, genome)
    alone = gb.Plan(tuple(replace(t, base=False) for t in plan.tensors), plan.buffers)
    made = gb.generate(alone, genome)
    deltas = {t.name for t in plan.tensors if t.base}
    # New rows are zero in the base.
    base = {k: p.detach() for k, p in pnet.named_parameters()} | getattr(plan.base_tensors(pnet), "params", {})
    return base | {k: (base[k] + w).to(base[k].dtype) if k in deltas else w for k, w in made.items()}


def dense_answer(
    plan: gb.Plan, pnet: nn.Module, loss_fn: LossFn, batch: Tensor, *, seed: int = 0, microbatches: int = 1
) -> Answer:
    """The same by the oracle. The p-net may keep what its forward leaves on it: pass a fresh one."""
    genome = gb.init_genome(plan, pnet, seed)
    if plan.base is not None:
        genome = genome._replace(gnets=moved_deltas(plan, genome.gnets))
    leaves = {k: v.detach().requires_grad_() for k, v in flat_leaves(genome, pnet).items()}
    gnets = {e: {k: leaves[f"gnets/{e}/{k}"] for k in own} for e, own in genome.gnets.items()}
    direct = {k: leaves.get(f"direct/{k}", v) for k, v in genome.direct.items()}
    made = weights_of(plan, gb.Genome(gnets, direct, genome.buffers), pnet)
    weights = {k: w.detach().requires_grad_(w.requires_grad) for k, w in made.items()}
    trained = [k for k, w in made.items() if w.requires_grad]
    losses, parts = [], []
    buffers = {k: b.clone() for k, b in pnet.named_buffers()} | dict(genome.buffers)
    with torch.random.fork_rng(devices=[]):
        for small in batch.chunk(microbatches):
            loss = _loss_on(pnet, weights, buffers, loss_fn, small)
            parts.append(torch.autograd.grad(loss / microbatches, [weights[k] for k in trained], allow_unused=True))
            losses.append(loss.detach())
    sums = {k: _sum(found) for k, *found in zip(trained, *parts, strict=True)}
    used = {k: total for k, total in sums.items() if total is not None}
    found = torch.autograd.grad([made[k] for k in used], list(leaves.values()), list(used.values()), allow_unused=True)
    zero_filled = (torch.zeros_like(v) if g is None else g for v, g in zip(leaves.values(), found, strict=True))
    buffers = {k: buffers[k] for k in genome.buffers}
    return Answer(torch.stack(losses).mean(), dict(zip(leaves, zero_filled, strict=True)), buffers)


def _sum(gradients: list[Tensor | None]) -> Tensor | None:
    found = [g for g in gradients if g is not None]
    return torch.stack(found).sum(0) if found else None


def _loss_on(
    pnet: nn.Module, weights: Mapping[str, Tensor], buffers: dict[str, Tensor], loss_fn: LossFn, batch: Tensor
) -> Tensor:
    tensors = {**weights, **buffers}
    out = loss_fn(lambda *args, **kwargs: functional_call(pnet, tensors, args, kwargs), batch)
    buffers.update({k: tensors[k].detach() for k in buffers})
    return out[0] if isinstance(out, tuple) else out


def assert_same(actual: Answer, expected: Answer, tolerance: float = 1e-9) -> None:
    def close(name: str, found: Tensor, target: Tensor, scale: float = 1.0) -> None:
        torch.testing.assert_close(
            found, target, rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{name}: {text}"
        )

    close("loss", actual.loss, expected.loss)
    assert actual.gradients.keys() == expected.gradients.keys()
    scale = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
    for name, target in expected.gradients.items():
        close(f"gradient of {name}", actual.gradients[name], target, max(scale, 1e-3))
    assert actual.buffers.keys() == expected.buffers.keys()
    for name, target in expected.buffers.items():
        close(f"buffer {name}", actual.buffers[name], target)
