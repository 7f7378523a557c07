"""Smaller nets of the same family as a standard codes them: Neural Network Coding, ISO/IEC 15938-17.

By the package `nncodec` of its authors (D. Becking et al., "NNCodec", 2023): weights after an ordinary training,
dependent scalar quantisation (a trellis), context-adaptive binary arithmetic coding (DeepCABAC). One quantisation
parameter for all tensors, four to an octave of steps: the finest whose file fits.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gbfunc.extras import import_extra
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, n_params
from gbfunc.types import Params

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_BITS = (6.0, 4.0, 2.5)
"""What a number is expected to take, each for a width."""

_TENSOR_BYTES = 20.0
"""What the standard's header of a tensor takes, about."""

_FINEST, _COARSEST = -75, 12
"""Quantisation parameters: steps of 2^(qp / 4), about, from the package's own for what is no weight."""

_CODE = "code"


def encode_nnc(state: Params, qp: int) -> bytes:
    """A bitstream of all tensors, named by their places; `qp` sets their step."""
    parts = {str(i): x.detach().float().numpy() for i, x in enumerate(state.values())}
    with tempfile.TemporaryDirectory() as folder:
        # It writes a file in any case.
        path = str(Path(folder) / "net.nnc")
        return bytes(_nncodec().compress(parts, path, qp=qp, nonweight_qp=qp, row_skipping=True, return_bitstream=True))


def decode_nnc(code: bytes, like: Params) -> Params:
    """Undo `encode_nnc`, into float32 and the shapes of `like`."""
    parts = _nncodec().decompress(bytearray(code))
    return {name: torch.as_tensor(parts[str(i)]).float().view(x.shape) for i, (name, x) in enumerate(like.items())}


def _nncodec() -> Any:
    return import_extra("nncodec.nnc", "comparing with Neural Network Coding", "nncodec")


@dataclass(frozen=True)
class Coded:
    """The weights of the net in the standard's bitstream."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits if a number takes so many bits; learning rates."""
        _nncodec()
        nets: list[Settings] = []
        for bits in _BITS:

            def fits(pnet: PNet, bits: float = bits) -> bool:
                state = base.blank(pnet, used=True)
                numbers = sum(x.numel() for x in state.values())
                text = len(base.pack({}, torch.float32, base.about_pnet(pnet, problem.task)))
                return text + bits / 8 * numbers + _TENSOR_BYTES * len(state) <= problem.budget

            nets += [dict(pnet.config) for pnet in base.narrow_pnets(problem.task, fits)]
        return grid(pnet=[net for i, net in enumerate(nets) if net not in nets[:i]], lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights, then the finest steps that fit."""
        pnet = base.with_config(problem.task, settings["pnet"])
        net, about = pnet.build(seed), base.about_pnet(pnet, problem.task)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        state = base.in_use(net, base.state_of(net))

        def encode(finer: int) -> bytes:
            code = torch.frombuffer(bytearray(encode_nnc(state, _COARSEST - finer)), dtype=torch.uint8)
            return base.pack({_CODE: code}, torch.float32, about)

        finer = base.largest(lambda n: len(encode(n)) <= problem.budget, _COARSEST - _FINEST)
        if not finer:
            raise BudgetTooSmall("the coarsest steps take more")
        return Trained(encode(finer), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net, with the weights that the bitstream stands for."""
        net = base.pnet_about(base.text_of(data), task).build(0)
        code = base.unpack(data, {_CODE: torch.empty(0, dtype=torch.uint8)}, rest=_CODE)[_CODE]
        return base.restore(net, decode_nnc(code.numpy().tobytes(), base.in_use(net, base.state_of(net))))
