"""P-nets of which later stages need more than the first block's input, and such as a pipeline refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6


class Blocks(nn.Module):
    """Four blocks of which the function `use` makes an output: `use(net, embedded, tokens)`."""

    def __init__(
        self, use: Callable[..., Any], block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)
    ) -> None:
        super().__init__()
        self.tokens, self.head, self.use = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11), use
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, tokens: Tensor) -> Any:
        return self.use(self, self.tokens(tokens), tokens)


def run_blocks(net: Any, x: Any) -> list[Any]:
    """The outputs of all blocks, each of the one before."""
    found = []
    for block in net.blocks:
        x = torch.tanh(block(x))
        found.append(x)
    return found


class Listed(Blocks):
    """Its first and last block have other names too, by which modules come."""

    def __init__(self) -> None:
        super().__init__(straight)
        self._modules = {"ends": nn.Sequential(self.blocks[0], self.blocks[3]), **self._modules}


def straight(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return net.head(x)


def shifted(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    first = net.blocks[0](x)
    first += 0.5
    x = first
    for block in net.blocks[1:]:
        x = torch.tanh(block(x))
    return net.head(x + first)


class Skipping(Blocks):
    """With a skip from the first block to the head, if asked for."""

    def __init__(self) -> None:
        super().__init__(gate)

    def forward(self, tokens: Tensor, skip: bool = False) -> Tensor:
        outs = run_blocks(self, self.tokens(tokens))
        return self.head(outs[-1] + outs[0] if skip else outs[-1])


def gate(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] * (outs[0] > 0))


def order(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1].gather(-1, outs[0].argsort(-1)))


def padding(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    kept = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
    return net.head(run_blocks(net, x)[-1] * kept)


def unet(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    a = torch.tanh(net.blocks[0](x))
    b = torch.tanh(net.blocks[1](a))
    c = torch.tanh(net.blocks[2](b) + a)
    return net.head(net.blocks[3](c) + x + net.shift)


def in_place(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    h = x.clone()
    h[:, 0] = outs[1][:, 0]
    h += net.shift
    return net.head(outs[-1] + h) * (tokens != 0)[..., None]


class Routed(nn.Module):
    """Takes and gives activations, integers, a mask, and a tensor in half the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Any = None) -> tuple[Tensor, dict[str, Any]]:
        y = torch.tanh(self.line(x))
        best, mask, kept = y.argmax(-1), y > 0, y.float()
        if more is not None:
            y = y * more["mask"] + more["kept"].double() * 0.1 + more["best"][..., None]
        return y, {"best": best, "mask": mask, "kept": kept, "name": "routed", "none": None}


def tuples(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    first = more = None
    for block in net.blocks:
        x, more = block(x, more)
        first = more if first is None else first
    assert more is not None and first is not None and more["name"] == "routed"
    return net.head(x) + first["best"][..., None] * more["mask"].any()


def hidden(net: Any, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    outs = run_blocks(net, x)
    return net.head(outs[-1]), x, outs


def next_token(net: Callable[..., Any], tokens: Tensor) -> Tensor:
    out = net(tokens[:, :-1])
    return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())


def of_hidden(net: Callable[..., Any], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out, x, outs = net(tokens[:, :-1])
    kept = tokens[:, 1:] > 2
    loss = F.cross_entropy(out[kept], tokens[:, 1:][kept])
    near = (outs[0] - outs[-1]).square().mean() + torch.where(outs[1] > 0, x, 0).square().mean()
    return loss + near, {"near": near}


class Counted(nn.Module):
    """Gives the mean of the tokens, a plain number, beside the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, float]:
        return torch.tanh(self.line(x)), float(tokens.double().mean())


def plain_value(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    means = []
    for block in net.blocks:
        x, mean = block(x, tokens)
        means.append(mean)
    return net.head(x * means[0])


class Stemmed(nn.Module):
    """Statistics of what comes before the blocks, by a layer that is registered last, and a count of calls."""

    count: Tensor
    gone: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("gone", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens.add_(1).remainder_(11)
        self.count += 1
        self.gone.mul_(torch.nan)
        x = self.norm(self.tokens(tokens).flatten(0, 1)).unflatten(0, tokens.shape) * (1 + 0.1 * self.count)
        return self.head(run_blocks(self, x)[-1]) / self.count


def detached(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    for block in net.blocks:
        x = torch.tanh(block(x)).detach()
    return net.head(x)


class Spectrum(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        x = super().forward(input.real)
        return torch.fft.fft(x), x.tanh(), x.argmax(-1)


def spectra(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    sides = []
    for block in net.blocks:
        x, *side = block(x)
        sides.append(side)
    return net.head(x.abs() + sides[0][0] + sides[1][1][..., None])


class Recurrent(nn.Module):
    """Its layer turns its output around in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Boxed(nn.Linear):
    """Gives a number in a box."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), [SimpleNamespace(n=3.0)]


def boxes(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    for block in net.blocks:
        x, (box,) = block(x)
    return net.head(x * box.n)


def unused(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return net.head([block(F.one_hot(tokens, 11)[..., :WIDTH].to(net.shift)) for block in net.blocks][-1])


def exported(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] * torch.from_dlpack(outs[0].detach()))


class Sometimes(nn.Linear):
    """Returns what it gets, unless that has an odd sum of tokens."""

    def forward(self, input: Tensor, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input) if int(tokens.sum()) % 2 else input


def sometimes(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = [x]
    for block in net.blocks:
        outs.append(block(outs[-1], tokens))
    return net.head(outs[-1] + outs[1])


def branch(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] * 2 if bool(outs[0].sum() > 0) else outs[-1])


class Leaves(nn.Linear):
    """Leaves a number and a tensor in Python."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain, self.dropout = 1.0, nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        self.gain, self.__dict__["seen"] = 2.0, super().forward(input)
        return self.dropout(self.__dict__["seen"] * 1)


def by_the_side(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] + net.blocks[0].__dict__["seen"] * 2)


def by_attribute(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] * net.blocks[0].gain)


class Cuts(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach()


class Descends(nn.Linear):
    """Takes a step down an energy of its own."""

    def forward(self, input: Tensor) -> Tensor:
        line = super().forward
        return input - 0.1 * torch.func.grad(lambda x: torch.tanh(line(x)).square().sum())(input)


class Climbs(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        energy = super().forward(input).tanh().square().sum()
        return input + torch.autograd.grad(energy, input, create_graph=True)[0]


class Counts(nn.Linear):
    """Multiplies by the number of its calls."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * self.calls


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, proj_size=WIDTH // 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def by_gradient(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = [x]
    for block in net.blocks:
        outs.append(block(outs[-1]))
    return net.head(outs[-1] + outs[1] * (2 if outs[1].requires_grad else 3))


def noise(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    drawn = torch.rand_like(x)
    return net.head(run_blocks(net, x + drawn)[-1] + drawn)


def noise_before(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = x + torch.rand_like(x)
    drawn = torch.rand(x.shape, dtype=x.dtype)
    return net.head(run_blocks(net, x + drawn)[-1] + drawn)


def noise_of_a_generator(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    drawn = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    return net.head(run_blocks(net, x + drawn)[-1] + drawn)


def signs(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """Of an odd function of `x`, so that stages which draw the same give what no draw gives."""
    before = (torch.randint(0, 2, ()) * 2 - 1) * float(np.random.choice([-1, 1]))
    x = net.blocks[0](x * before)
    between = (torch.randint(0, 2, ()) * 2 - 1) * random.choice([-1, 1])
    for block in net.blocks[1:]:
        x = torch.tanh(block(x * between)) * between
    return net.head(x * before)


def hugging(name: str) -> nn.Module:
    import transformers as tf

    if name == "t5":
        sizes: dict[str, Any] = {"vocab_size": 22, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "num_layers": 2}
        sizes |= {"num_decoder_layers": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
        return tf.T5ForConditionalGeneration(tf.T5Config(**sizes))
    sizes = {"vocab_size": 22, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def hugging_loss(net: Callable[..., Any], tokens: Tensor) -> Tensor:
    mask = (tokens != 0).long()
    return net(input_ids=tokens, attention_mask=mask, labels=tokens).loss


class Sharpened(nn.Module):
    """Its softmax over features is another function of a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gate": (partial(Blocks, gate), next_token),
    "argsort": (partial(Blocks, order), next_token),
    "padding": (partial(Blocks, padding), next_token),
    "unet": (partial(Blocks, unet), next_token),
    "in place": (partial(Blocks, in_place), next_token),
    "relu in place": (
        partial(Blocks, straight, lambda: nn.Sequential(nn.ReLU(True), nn.Linear(WIDTH, WIDTH))),
        next_token,
    ),
    "shift in place": (partial(Blocks, shifted), next_token),
    "tuples": (partial(Blocks, tuples, Routed), next_token),
    "blocks listed twice": (Listed, next_token),
    "loss of hidden": (partial(Blocks, hidden), of_hidden),
    "stem": (Stemmed, next_token),
    "detached": (partial(Blocks, detached), next_token),
    "complex": (partial(Blocks, spectra, lambda: Spectrum(WIDTH, WIDTH)), next_token),
    "gru": (partial(Blocks, straight, Recurrent), next_token),
    "signs": (partial(Blocks, signs, lambda: nn.Linear(WIDTH, WIDTH, bias=False)), next_token),
    "gradients inside": (partial(Blocks, straight, lambda: Descends(WIDTH, WIDTH)), next_token),
    "t5": (partial(hugging, "t5"), hugging_loss),
    "gpt2": (partial(hugging, "gpt2"), hugging_loss),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch": (partial(Blocks, branch), "'blocks.0'"),
    "by the side": (partial(Blocks, by_the_side, Leaves), "made inside of 'blocks.0'"),
    "box": (partial(Blocks, boxes, lambda: Boxed(WIDTH, WIDTH)), "'blocks.0' must return tensors"),
    "unused": (partial(Blocks, unused), "each stage must need a tensor"),
    "exported": (partial(Blocks, exported), "'blocks.0'"),
    "noise": (partial(Blocks, noise), "random numbers that several stages use"),
    "noise before": (partial(Blocks, noise_before), "random numbers that several stages use"),
    "noise of a generator": (partial(Blocks, noise_of_a_generator), "random numbers that several stages use"),
    "autograd inside": (partial(Blocks, straight, lambda: Climbs(WIDTH, WIDTH)), "by torch.func.grad, not"),
}
UNPROVEN: dict[str, Callable[[], nn.Module]] = {
    "an attribute": partial(Blocks, by_attribute, Leaves),
    "an attribute, beside dropout": partial(Blocks, by_attribute, partial(Leaves, 0.5)),
    "whether a gradient is wanted": partial(Blocks, by_gradient, lambda: Cuts(WIDTH, WIDTH)),
    "a counter": partial(Blocks, straight, lambda: Counts(WIDTH, WIDTH)),
    "dropout alone": partial(Blocks, straight, partial(Leaves, 0.5)),
}
CHANGES: dict[str, Callable[[], nn.Module]] = {
    "plain value": partial(Blocks, plain_value, Counted),
    "argument": partial(Blocks, sometimes, lambda: Sometimes(WIDTH, WIDTH)),
}
