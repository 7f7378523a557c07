"""Knowledge distillation: a loss function that trains a student to follow a trained network."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.train.gradients.loss import LossFn, loss_and_aux


def distillation(
    teacher: nn.Module, *, temperature: float = 2.0, weight: float = 0.5, loss_fn: LossFn | None = None, dim: int = -1
) -> LossFn:
    r"""Make a loss function that compares outputs with labels and with a teacher's outputs (Hinton et al., 2015).

    Let $z$ be the student's and $t$ the teacher's logits, $T$ the temperature, $a$ the weight, and $L$ the loss on
    labels. The result is $(1 - a) L + a T^2 KL(softmax(t / T) || softmax(z / T))$. For batches `(x, y)` with
    floating-point `y`, the mean squared error of $z$ and $t$ replaces $T^2 KL$. `aux` has this error or the KL.

    Args:
        teacher: the trained network, which is called with the student's arguments and must return outputs of the same
            shape. The loss function keeps a copy in evaluation mode, on the teacher's device, without gradients.
        temperature: divides the logits of both networks.
        weight: weight $a$ of the teacher's term, from 0 to 1. With 1, labels are ignored.
        loss_fn: the loss on labels, as for `make_train_step`; its `aux`, if any, must be a dict. The default, for
            batches `(x, y)`, is the cross entropy or, for floating-point `y`, the mean squared error.
        dim: dimension of the classes in the outputs.

    Raises:
        TypeError: if the teacher is not a module, or an output is neither a tensor nor has `logits`.
        ValueError: if weight or temperature is out of range, or if outputs of the two networks differ in shape.

    >>> import gbfunc as gb
    >>> trained, pnet = nn.Linear(30, 5), nn.Linear(30, 5)
    >>> loss_fn = gb.distillation(trained, temperature=4.0, weight=0.9)
    >>> plan, optimizer = gb.make_plan(pnet, gb.periodic(features=2)), gb.torch_optimizer(torch.optim.Adam, lr=1e-2)
    >>> train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer)
    >>> state, info = train_step(train_step.init(), (torch.ones(8, 30), torch.arange(8) % 5))
    >>> sorted(info.aux)
    ['teacher_kl']
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be from 0 to 1, got {weight}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"teacher must be a module, such as gb.materialize(plan, genome, pnet), got {type(teacher)}")
    frozen = copy.deepcopy(teacher).eval().requires_grad_(False)

    def labels(net: Any, batch: Any) -> Tensor:
        x, y = batch
        logits = logits_of(net(x))
        if not y.is_floating_point():
            return F.cross_entropy(logits.movedim(dim, 1) if logits.ndim > 1 else logits, y)
        if y.shape != logits.shape:
            raise ValueError(f"targets must have the shape {list(logits.shape)} of the outputs, got {list(y.shape)}")
        return F.mse_loss(logits, y)

    def distilled(net: Any, batch: Any) -> tuple[Tensor, Any]:
        calls: list[tuple[Any, Any, Any]] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs, net(*args, **kwargs)))
            return calls[-1][-1]

        loss, aux = loss_and_aux((loss_fn or labels)(recorded, batch))
        if not calls or not isinstance(aux, Mapping):
            raise ValueError(f"loss_fn must call net(...), and its aux must be a dict, got a {type(aux).__name__}")
        args, kwargs, out = calls[-1]
        student = logits_of(out)
        if student.is_meta:
            return loss, aux  # A dry run on the meta device counts the p-net's operations: do not call the teacher.
        with torch.no_grad():
            target = logits_of(frozen(*args, **kwargs))
        if student.shape != target.shape:
            got = f"{list(student.shape)} as the p-net does, got {list(target.shape)}"
            raise ValueError(f"the teacher must give logits {got}")
        y = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if isinstance(y, Tensor) and y.is_floating_point():
            name, distance, factor = "teacher_mse", F.mse_loss(student, target), 1.0
        else:
            both = (z.movedim(dim, -1).flatten(0, -2) / temperature for z in (student, target))
            rows, soft = (F.log_softmax(z, -1) for z in both)
            distance = F.kl_div(rows, soft, reduction="batchmean", log_target=True)
            name, factor = "teacher_kl", temperature**2
        return (1 - weight) * loss + weight * factor * distance, {**aux, name: distance.detach()}

    return distilled


def logits_of(output: Any) -> Tensor:
    """Return `output` if it is a tensor, otherwise `output.logits`. Raises TypeError if the output has no logits."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"a p-net must return logits or an object with .logits, got {type(output).__name__}")
    return logits
