"""Checks an optimizer's options for each role of leaves (`ROLES`), and turns torch schedulers into tables of rates."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.optim import lr_scheduler

LearningRate: TypeAlias = float | Callable[[int], float]  # a number, or a function of the training step: 0, 1, ...
ROLES: tuple[str, ...] = ("code", "linear", "direct")  # code weights, linear coefficients, direct parameters
# Dtypes with fused kernels of Adam and AdamW. Tests compare the kernels with the unfused classes, on CPU and CUDA.
FUSED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Kernel(NamedTuple):
    """A fused optimizer kernel of torch."""

    function: Callable[..., None]
    entries: tuple[str, ...]  # names of the state's tensors, in the order of the function's arguments
    options: dict[str, Any]  # options other than `lr`


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """An optimizer class with options for some leaves. With `by_tile`, each `leaf[tile]` is a matrix of its own."""

    cls: Callable[..., torch.optim.Optimizer]
    lr: LearningRate
    options: dict[str, Any]
    by_tile: bool

    @cached_property
    def adam(self) -> Kernel | None:
        """The fused kernel of Adam or AdamW. It is None for any other class and for options that the kernel lacks."""
        name = {torch.optim.Adam: "_fused_adam_", torch.optim.AdamW: "_fused_adamw_"}.get(cast(Any, self.cls))
        known = {"betas", "eps", "weight_decay", "amsgrad", "maximize"}
        if name is None or self.options.get("fused") is False or self.options.keys() - known - {"fused"}:
            return None
        options = {k: v for k, v in self.cls([torch.zeros(1)], **self.options).defaults.items() if k in known}
        options["beta1"], options["beta2"] = map(float, options.pop("betas"))
        largest = ("max_exp_avg_sq",) if options["amsgrad"] else ()
        return Kernel(getattr(torch, name), ("step", "exp_avg", "exp_avg_sq", *largest), options)


def param_groups(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], by_role: Mapping[str, Mapping[str, Any] | None]
) -> Callable[[str, str, tuple[int, ...]], ParamGroup]:
    """Check the options for every role. Return a function `(name, role, shape) -> ParamGroup`."""
    muon = getattr(torch.optim, "Muon", None)  # The oldest supported torch has no Muon.
    matrices_only = muon is not None and issubclass(cls, muon)
    mixes = matrices_only or issubclass(cls, torch.optim.Adafactor)
    plain = _make_group(cls, options, "all leaves")
    stacked = replace(plain, by_tile=True) if mixes else plain
    groups: dict[str, ParamGroup] = {"code": stacked, "linear": stacked, "direct": plain}

    def adamw(options: dict[str, Any]) -> ParamGroup:
        kept = {k: v for k, v in options.items() if k in ("lr", "weight_decay")}
        return _make_group(torch.optim.AdamW, kept, "leaves that fall back to AdamW")

    fallbacks: dict[str, ParamGroup] = dict.fromkeys(ROLES, adamw(options)) if mixes else {}
    for role, differing in by_role.items():
        if differing is not None and not isinstance(differing, Mapping):
            raise TypeError(f"{role} must be a dict of options or None, got {differing!r}")
        if differing:
            merged = options | dict(differing)
            groups[role] = _make_group(cls, merged, f"{role} leaves", by_tile=groups[role].by_tile)
            fallbacks |= {role: adamw(merged)} if mixes else {}

    def group_of(name: str, role: str, shape: tuple[int, ...]) -> ParamGroup:
        group = groups[role]
        if group.by_tile and not shape:
            raise ValueError(f"leaf {name!r} of role {role!r} must have a leading dimension of tiles, got a scalar")
        refused = mixes and (0 in shape or (matrices_only and len(shape) - group.by_tile != 2))
        return fallbacks[role] if refused else group

    return group_of


def _make_group(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], where: str, *, by_tile: bool = False
) -> ParamGroup:
    lr = cast(LearningRate, options["lr"])
    options = {k: v for k, v in options.items() if k != "lr"}
    if not (callable(lr) or isinstance(lr, Real)) or isinstance(lr, bool):
        raise TypeError(f"lr of {where} must be a number or a function of the step, got {lr!r}")
    if options.get("differentiable"):
        raise ValueError("differentiable=True must be left out: the results of a pure update have no graph")
    rate = learning_rate(lr, 0)
    try:
        cls([torch.zeros(2, 2)], lr=rate, **options)  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError, RuntimeError) as error:
        known = [k for k in inspect.signature(cls).parameters if k != "params"]
        raise ValueError(f"{cls.__name__} refuses the options of {where}: {error}; its options are {known}") from error
    if options.get("fused") and cls not in (torch.optim.Adam, torch.optim.AdamW):
        # On a CPU, torch's fused SGD updates only a part of a half-precision tensor (torch 2.5 to 2.13).
        del options["fused"]
    return ParamGroup(cast("Callable[..., torch.optim.Optimizer]", cls), lr if callable(lr) else rate, options, by_tile)


def learning_rate(lr: LearningRate, step: int) -> float:
    """Return the learning rate at a training step. Check the rate, because torch does not check schedules."""
    rate = float(lr(step) if callable(lr) else lr)
    if not 0 <= rate or not isfinite(rate):
        raise ValueError(f"lr must be finite and >= 0, got {rate} at step {step}")
    return rate


def torch_schedule(
    scheduler_cls: type[lr_scheduler.LRScheduler], lr: float, steps: int, **options: Any
) -> Callable[[int], float]:
    """Run a torch scheduler once, and return the learning rate as a function of the training step.

    After `steps` steps, the last rate stays. Only the learning rate is scheduled, not momentum. OneCycleLR (Smith and
    Topin, 2018) gets `max_lr=lr` and `total_steps=steps`, unless `options` has other values.

    Args:
        scheduler_cls: a class of `torch.optim.lr_scheduler`.
        lr: learning rate.
        steps: number of training steps in the schedule: 0 to `steps - 1`.
        options: options of the scheduler class.

    Raises:
        TypeError: if `scheduler_cls` is not a scheduler class, or needs a measured loss (ReduceLROnPlateau).
        ValueError: for options out of range.

    >>> schedule = torch_schedule(lr_scheduler.StepLR, 0.1, steps=5, step_size=2, gamma=0.5)
    >>> [schedule(step) for step in (0, 1, 2, 3, 4, 99)]
    [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    """
    if not isinstance(scheduler_cls, type) or not issubclass(scheduler_cls, lr_scheduler.LRScheduler):
        raise TypeError(f"scheduler_cls must be a subclass of LRScheduler, got {scheduler_cls!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}")
    learning_rate(lr, 0)
    if options.get("cycle_momentum"):
        raise ValueError("cycle_momentum must be False: only the learning rate is scheduled")
    if issubclass(scheduler_cls, lr_scheduler.OneCycleLR):
        options = {"max_lr": lr, "total_steps": steps, "cycle_momentum": False} | options
    optimizer, table = torch.optim.SGD([torch.zeros(1)], lr=lr), list[float]()
    scheduler = scheduler_cls(optimizer, **options)
    for _ in range(steps):
        table.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        if len(table) < steps:
            scheduler.step()
    return partial(_rate_at, table=table)


def _rate_at(step: int, table: Sequence[float]) -> float:
    return table[min(step, len(table) - 1)]
