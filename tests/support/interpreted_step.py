"""A step by the path of a GPU on CPU tensors, a test file of its own: TRITON_INTERPRET=1 must be set at import.

`tests/test_kernels_triton.py` runs it in a process with this setting.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import gbfunc as gb
from gbfunc.hypernets.kernels import waves, waves_triton
from gbfunc.train import step as step_module

SILENT = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"),
    *("t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operators that launch nothing: views, and memory that is not filled."""
READS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero"}


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel, and refuses reads of all but `host` tensors, and copies to a GPU."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.found, self._host = Counter[str](), {x.untyped_storage().data_ptr() for x in host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        on_host = isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() in self._host
        # Tensors made of Python's numbers, and copies between devices.
        placed = name == "lift_fresh" or (name == "_to_copy" and (kwargs or {}).get("device") is not None)
        assert on_host or not (placed or name in READS), f"{name} makes a GPU wait"
        if not on_host and name not in SILENT:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, programs: int, *arguments: Any) -> None:
        self.found[kernel.fn.__name__] += 1
        with _disable_current_modes():
            kernel[(programs,)](*arguments)


@pytest.fixture(autouse=True)
def _path_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(waves_triton.forward_kernel).__name__ == "InterpretedFunction", "set TRITON_INTERPRET=1"
    monkeypatch.setattr(waves, "_native", waves_triton.backend)
    monkeypatch.setattr(step_module, "_READ", set())
    # Few large programs: the interpreter takes milliseconds for each.
    for name, size in {"_ROWS": 1024, "_PART": 1024, "_HIDDEN": 32}.items():
        monkeypatch.setattr(waves_triton, name, size)


def launches(sizes: list[int], features: int, **options: Any) -> Counter[str]:
    """The operators of the third step."""
    torch.manual_seed(0)
    layers = [x for a, b in pairwise(sizes) for x in (nn.Linear(a, b), nn.ReLU())][:-1]
    pnet = nn.Sequential(*layers)
    plan = gb.make_plan(pnet, gb.periodic(features=features))
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, 0.01, 9))
    step = gb.make_train_step(plan, pnet, lambda net, b: F.cross_entropy(net(b[0]), b[1]), optimizer, **options)
    batch = torch.randn(256, sizes[0]), torch.randint(0, sizes[-1], (256,))
    state = step.init(0)
    for _ in range(2):
        state, _ = step(state, batch)
    mode = Launches([state.step, state.seed, state.opt.step])
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(waves_triton, "_launch", mode.launch)
        _, info = step(state, batch)
    assert info.finite
    return mode.found


@pytest.mark.parametrize(
    ("sizes", "features", "most"), [([784, 256, 256, 64, 10], 16, 70), ([2048, 2048, 2048, 10], 32, 60)], ids=str
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_launches_few_operators_and_reads_nothing_back(
    sizes: list[int], features: int, most: int, donate: bool
) -> None:
    found = launches(sizes, features, donate=donate)
    assert sum(found.values()) <= most, found
    assert found["forward_kernel"] == found["partial_kernel"] == found["total_kernel"] == 1
