"""Distillation: labels and a trained network in one loss."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.tasks import TASKS
from gbfunc.tasks.base import taught

CLASSES, NUMBERS = torch.arange(5) % 3, torch.ones(5, 3)


def naive_divergence(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """The mean over rows of sum p log(p / q), in float64."""
    q, p = ((z.detach().double() / temperature).exp() for z in (student, teacher))
    q, p = (x / x.sum(-1, keepdim=True) for x in (q, p))
    return float((p * (p / q).log()).sum(-1).mean())


def nets() -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    made = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9))
    for p in (*made[0].parameters(), *made[1].parameters()):
        nn.init.normal_(p, generator=generator)
    return made


@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 2.0), (0.3, 4.0), (1.0, 0.7)])
@pytest.mark.parametrize("own", [False, True])
def test_the_loss_mixes_labels_and_teacher(weight: float, temperature: float, own: bool) -> None:
    def labels(net: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(net(input=batch[0]).logits, batch[1]), {"mine": batch[1].sum()}

    (student, teacher), x = nets(), torch.linspace(-2, 2, 20).reshape(5, 4)
    of = {"temperature": temperature, "weight": weight, "loss_fn": labels if own else None}
    call: Any = (lambda input: SimpleNamespace(logits=student(input))) if own else student
    loss, aux = gb.distillation(teacher, **of)(call, (x, CLASSES))
    divergence = naive_divergence(student(x), teacher.eval()(x), temperature)
    plain = float(F.cross_entropy(student(x), CLASSES).detach())
    assert loss.item() == pytest.approx((1 - weight) * plain + weight * temperature**2 * divergence, rel=1e-4)
    assert float(aux.pop("teacher_kl")) == pytest.approx(divergence, rel=1e-4)
    assert aux == ({"mine": CLASSES.sum()} if own else {})
    teacher.train()
    loss.backward()
    # The teacher stays as it was: the loss has a copy.
    assert teacher.training and all(p.grad is None and p.requires_grad for p in teacher.parameters())


def test_numbers_are_compared_by_their_distance_and_classes_have_any_dimension() -> None:
    (student, teacher), x = nets(), torch.ones(5, 4)
    loss, aux = gb.distillation(teacher, weight=0.25)(student, (x, NUMBERS))
    expected = [F.mse_loss(student(x), y).item() for y in (NUMBERS, teacher.eval()(x))]
    assert loss.item() == pytest.approx(0.75 * expected[0] + 0.25 * expected[1]) and list(aux) == ["teacher_mse"]
    pixels = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
    images, y = torch.rand(4, 2, 6, 5), torch.arange(120).reshape(4, 6, 5) % 3
    loss, _ = gb.distillation(pixels[1], temperature=1.0, weight=0.5, dim=1)(pixels[0], (images, y))
    z, t = (net(images) for net in pixels)
    divergence = naive_divergence(z.movedim(1, -1), t.movedim(1, -1), 1.0) * 5 * 6 * 4 / 120
    assert loss.item() == pytest.approx(0.5 * F.cross_entropy(z, y).item() + 0.5 * divergence, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "layer"}, {"amp": torch.bfloat16}])
def test_steps_take_it_also_where_the_teacher_is_the_p_net(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    nn.init.normal_(pnet.get_parameter("3.weight"))
    loss_fn = gb.distillation(pnet, temperature=4.0, weight=1.0)
    plan, adam = gb.make_plan(pnet, gb.periodic(features=4)), gb.torch_optimizer(torch.optim.Adam, lr=1e-2)
    step = gb.make_train_step(plan, pnet, loss_fn, adam, **options)
    state, batch = step.init(), (torch.randn(16, 30, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)
    losses = []
    for _ in range(20):
        state, info = step(state, batch)
        losses.append(float(info.loss))
    assert losses[-1] < 0.7 * losses[0]
    states, many = gb.population(gb.make_train_step(plan, pnet, loss_fn, adam), 2).init(), batch
    assert gb.population(gb.make_train_step(plan, pnet, loss_fn, adam), 2)(states, many)[1].loss.shape == (2,)


def test_what_cannot_teach_is_refused() -> None:
    (student, teacher), x = nets(), torch.ones(5, 4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weight": 1.5}, "weight must be from 0 to 1, got 1.5"),
        ({"temperature": 0.0}, "temperature must be a positive number, got 0"),
        ({"temperature": math.inf}, "temperature must be a positive number, got inf"),
    ]
    for options, expected in wrong:
        with pytest.raises(ValueError, match=expected):
            gb.distillation(teacher, **options)
    with pytest.raises(ValueError, match=r"targets must have the shape \[5, 3\] of the outputs, got \[5\]"):
        gb.distillation(teacher)(student, (x, torch.ones(5)))
    with pytest.raises(RuntimeError, match="target"):
        gb.distillation(teacher)(student, (x, CLASSES[:, None]))
    with pytest.raises(ValueError, match=r"must give logits \[5, 3\] as the p-net does, got \[5, 4\]"):
        gb.distillation(nn.Flatten())(student, (x, CLASSES))
    with pytest.raises(ValueError, match=r"loss_fn must call net\(...\)"):
        gb.distillation(teacher, loss_fn=lambda net, batch: batch.sum())(student, x)
    # No teacher is asked for shapes.
    meta = (x.to("meta"), CLASSES.to("meta"))
    assert gb.distillation(nn.Flatten())(student.to("meta"), meta)[0].is_meta
    with pytest.raises(ValueError, match="a teacher needs a task of examples"):
        taught(TASKS["control"](), teacher)
