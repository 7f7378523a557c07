"""A trained network's outputs as targets: knowledge distillation (Hinton, Vinyals and Dean, 2015).

Suffixes: R rows of logits (examples, or positions of texts), K classes or tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.tasks.base import LossFn, Net, Task, example_batches, logits_of


def taught(task: Task, teacher: nn.Module, weight: float = 0.5, temperature: float = 2.0) -> Task:
    r"""Add a teacher to the loss of a task (distillation).

    With $z$ the logits of the network in training and $t$ those of the teacher, at temperature $T$:
    $(1 - a) L + a T^2 KL(softmax(t / T) || softmax(z / T))$, where $L$ is the task's loss.

    Args:
        task: of examples.
        teacher: maps inputs to logits as the task's p-net does, on the device of the task's examples; it is used in
            eval mode.
        weight: a, from 0 (no teacher) to 1 (nothing else).
        temperature: T.

    Returns:
        The task; its loss reports `teacher_kl`, the divergence at temperature T, beside the other metrics of a batch.

    Raises:
        ValueError: for a task without examples, or numbers out of range.
    """
    if task.batches is not example_batches:
        raise ValueError(f"a teacher is for tasks of examples, got {task.name}, whose batches come from an environment")
    if not 0 <= weight <= 1:
        raise ValueError(f"the teacher's weight must be from 0 to 1, got {weight}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"the teacher's temperature must be a positive number, got {temperature}")
    return replace(task, loss=_distillation(task.loss, teacher.eval().requires_grad_(False), weight, temperature))


def _distillation(base: LossFn, teacher: nn.Module, weight: float, temperature: float) -> LossFn:
    def loss_fn(net: Net, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        outputs: list[Any] = []

        def heard(x: Tensor) -> Any:
            outputs.append(net(x))
            return outputs[-1]

        loss, aux = base(heard, batch)
        if batch[0].is_meta:
            # Only shapes are asked for, and operations of the p-net.
            return loss, aux
        student = logits_of(outputs[-1])
        with torch.no_grad():
            target = logits_of(teacher(batch[0]))
        divergence = soft_divergence(student, target, temperature)
        return (1 - weight) * loss + weight * temperature**2 * divergence, {**aux, "teacher_kl": divergence.detach()}

    return loss_fn


def soft_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean KL divergence (nats) of a student's softened predictions from a teacher's: 2 x [..., K] -> []."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"the teacher must give logits {list(student.shape)} as the p-net does, got {list(teacher.shape)}"
        )
    log_RK, target_RK = (F.log_softmax(z.flatten(0, -2) / temperature, -1) for z in (student, teacher))
    return F.kl_div(log_RK, target_RK, reduction="batchmean", log_target=True)
