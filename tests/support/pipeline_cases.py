"""What two ranks of a pipeline must find as one process does, or refuse."""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from tests.support.ranks import PATIENCE, said
from tests.support.tensor_cases import next_token

WIDTH = 6


class Blocks(nn.Module):
    """Four blocks of which the function `use` makes an output: `use(net, embedded, tokens)`."""

    count: Tensor
    sums: Tensor

    def __init__(
        self, use: Callable[..., Any], block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)
    ) -> None:
        super().__init__()
        self.tokens, self.head, self.use = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11), use
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sums", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Any:
        return self.use(self, self.tokens(tokens), tokens)


class Stemmed(Blocks):
    """Statistics before the blocks by a layer that is registered last; the last block has another name, too."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self._modules = {"ends": nn.Sequential(self.blocks[0], self.blocks[3]), **self._modules}
        self.norm = nn.BatchNorm1d(WIDTH)


def run_blocks(net: Any, x: Any) -> list[Any]:
    found = []
    for block in net.blocks:
        x = torch.tanh(block(x))
        found.append(x)
    return found


def straight(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return net.head(x)


def gates(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    kept = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
    outs = run_blocks(net, x)
    return net.head(outs[-1].gather(-1, outs[0].argsort(-1)) * (outs[0] > 0) * kept)


def unet(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    a = torch.tanh(net.blocks[0](x))
    b = torch.tanh(net.blocks[1](a))
    c = torch.tanh(net.blocks[2](b) + a)
    return net.head(net.blocks[3](c) + x + net.shift)


def in_place(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    first = net.blocks[0](x)
    first += 0.5
    outs = [first, *run_blocks(net, first)]
    h = x.clone()
    h[:, 0] = outs[1][:, 0]
    h += net.shift
    return net.head((outs[-1] + h + first).relu_()) * (tokens != 0)[..., None]


class Routed(nn.Module):
    """Takes and gives activations, integers, a mask, a tensor in half the precision, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Any = None) -> tuple[Tensor, dict[str, Any]]:
        y = torch.tanh(self.line(x))
        best, mask, kept = y.argmax(-1), y > 0, y.float()
        if more is not None:
            y = y * more["mask"] + more["kept"].double() * 0.1 + more["best"][..., None] + more["wave"].abs()
        return y, {"best": best, "mask": mask, "kept": kept, "wave": torch.fft.fft(y), "name": "routed", "none": None}


def tuples(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    first = more = None
    for block in net.blocks:
        x, more = block(x, more)
        first = more if first is None else first
    assert more is not None and first is not None and more["name"] == "routed"
    return net.head(x) + first["best"][..., None] * more["mask"].any()


def stem(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """Changes two buffers in place, one of them in a region without gradients."""
    net.count += 1
    with torch.no_grad():
        net.sums.mul_(0.5).add_(x.sum())
    x = net.norm(x.flatten(0, 1)).unflatten(0, tokens.shape) * (1 + 0.1 * net.count)
    return net.head(run_blocks(net, x)[-1]) / net.count


def regions(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """Without gradients, in another precision, and an attribute that is kept for later."""
    outs = run_blocks(net, x)
    with torch.no_grad():
        scale = outs[0].abs().mean() + net.shift.sum()
    with torch.autocast("cpu", torch.bfloat16):
        rough = outs[1].float() @ net.shift.float().diag()
    net.blocks[0].__dict__["seen"] = outs[0] * 2
    return net.head(outs[-1].detach() + outs[2] * scale + rough + net.blocks[0].__dict__["seen"])


def sequence(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)[0]
    return net.head(x)


def of_parts(net: Any, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    x, kept = net.tokens(tokens[:, :-1]), tokens[:, 1:] > 2
    outs = run_blocks(net, x)
    loss = F.cross_entropy(net.head(outs[-1])[kept], tokens[:, 1:][kept])
    near = (outs[0] - outs[-1]).square().mean() + torch.where(outs[1] > 0, x, 0).square().mean()
    return loss + near + net.blocks[0].weight.square().mean(), {"near": near, "none": None, "n": 3}


def hugging(name: str) -> nn.Module:
    import transformers as tf

    small: dict[str, Any] = {"vocab_size": 22, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    if name == "t5":
        sizes: dict[str, Any] = {"vocab_size": 22, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "num_layers": 2}
        sizes |= {"num_decoder_layers": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
        return tf.T5ForConditionalGeneration(tf.T5Config(**sizes))
    if name == "bert":
        bert = tf.BertConfig(**small, intermediate_size=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return tf.BertForMaskedLM(bert)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**small, intermediate_size=12, num_key_value_heads=1))


def hugging_loss(net: Callable[..., Any], tokens: Tensor) -> Tensor:
    return net(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=tokens).loss


class Sharpened(nn.Module):
    """Its softmax over features is another function of a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


def branch(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x)
    return net.head(outs[-1] * 2 if bool(outs[0].sum() > 0) else outs[-1])


def unused(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return net.head([block(F.one_hot(tokens, 11)[..., :WIDTH].to(net.shift)) for block in net.blocks][-1])


def of_a_generator(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    drawn = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    return straight(net, x + drawn, tokens)


def of_python(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return straight(net, x * random.choice([-1, 1]), tokens)


def changed_later(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    outs = run_blocks(net, x * (1 + net.count))
    net.count += outs[-1].detach().sum()
    return net.head(outs[-1])


def assigned(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    net.sums = net.sums * 0.5 + x.detach().sum()
    return straight(net, x, tokens)


def shifts_the_batch(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return straight(net, net.tokens(tokens.add_(1).remainder_(11)), tokens)


class Climbs(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        energy = super().forward(input).tanh().square().sum()
        return input + torch.autograd.grad(energy, input, create_graph=True)[0]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def own_backward(net: Any, x: Tensor, tokens: Tensor) -> Tensor:
    doubled: Any = _Doubled.apply(x)
    return straight(net, doubled, tokens)


ALL = ("gpipe", "1f1b", "interleaved", "zbv")
NETS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "gates": (partial(Blocks, gates), next_token, ("gpipe",)),
    "unet": (partial(Blocks, unet), next_token, ALL),
    "in place": (partial(Blocks, in_place), next_token, ALL),
    "tuples": (partial(Blocks, tuples, Routed), next_token, ("interleaved", "zbv")),
    "stem": (partial(Stemmed, stem), next_token, ("1f1b", "zbv")),
    "regions": (partial(Blocks, regions), next_token, ("gpipe",)),
    "parts": (partial(Blocks, straight), of_parts, ("1f1b",)),
    "gru": (partial(Blocks, sequence, lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)), next_token, ("gpipe",)),
    "t5": (partial(hugging, "t5"), hugging_loss, ("gpipe",)),
    "bert": (partial(hugging, "bert"), hugging_loss, ("1f1b",)),
    "masked llama": (partial(hugging, "llama"), hugging_loss, ("interleaved",)),
}
"""Makers of p-nets, their loss functions, and schedules."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch": (partial(Blocks, branch), "the p-net must be code that torch.export can record"),
    "unused": (partial(Blocks, unused), "each stage must need a tensor"),
    "generator": (partial(Blocks, of_a_generator), "got a torch.Generator or a trained tensor"),
    "python": (partial(Blocks, of_python), "random numbers must be torch's"),
    "buffer": (partial(Blocks, changed_later), "one stage changes the buffer 'count' and another one uses it"),
    "batch": (partial(Blocks, shifts_the_batch), "must not change the batch in place: clone the tensor"),
    "assigned": (partial(Blocks, assigned), "a forward must change buffers in place, got new tensors for sums"),
    "autograd inside": (partial(Blocks, straight, lambda: Climbs(WIDTH, WIDTH)), "a trained tensor"),
    "own backward": (partial(Blocks, own_backward), "the backward of a torch.autograd.Function"),
}
"""Makers of p-nets, and words of the error."""


def gradient(
    mesh: Mesh | None,
    make: Callable[[], nn.Module],
    loss_fn: Any,
    schedule: str = "gpipe",
    dtype: torch.dtype = torch.float64,
    seeds: tuple[int, ...] = (0, 1),
    sizes: tuple[int, ...] = (6, 5),
    kind: torch.dtype = torch.int64,
    **more: Any,
) -> Any:
    """Loss, aux and the gradient, in the change that plain SGD of rate 1 makes; batches of several lengths."""
    torch.manual_seed(0)
    pnet = make().to(dtype)
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=6)
    sgd = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
    options: dict[str, Any] = more if mesh is None else {"mesh": mesh, "pipeline": schedule, **more}
    step = gb.make_train_step(plan, pnet, loss_fn, sgd, microbatches=4, **options)
    state, found = step.init(3), []
    for seed, size in zip(seeds, sizes, strict=True):
        tokens = torch.randint(0, 11, (8, size), generator=torch.Generator().manual_seed(seed)).to(kind)
        new, info = step(state, tokens)
        a, b = step.gather(state), step.gather(new)
        moved = optree.tree_map(lambda x, y: x - y, (a.gnets, a.direct), (b.gnets, b.direct))  # pyright: ignore
        found.append({"loss": info.loss, "aux": info.aux, "moved": moved, "buffers": new.buffers})
        state = new
    return {"reports": [x["loss"] for x in found], "state": found}


CASES: dict[str, Callable[[Mesh | None], Any]] = {
    f"{name} {schedule}": partial(gradient, make=make, loss_fn=loss_fn, schedule=schedule)
    for name, (make, loss_fn, schedules) in NETS.items()
    for schedule in schedules
}
CASES["rounding"] = partial(gradient, make=partial(Blocks, unet), loss_fn=next_token, rounding="int8")
CASES["half"] = partial(
    gradient, make=partial(Blocks, gates), loss_fn=next_token, dtype=torch.float32, amp=torch.bfloat16
)


def words_of_zbv(init_method: str) -> str:
    lstm = partial(nn.LSTM, WIDTH, WIDTH, 2, proj_size=WIDTH // 2, bidirectional=True, batch_first=True)
    with gb.mesh(pipeline=2, init_method=init_method, timeout=20 * PATIENCE) as mesh, suppress(CollectiveError):
        return said(gradient, mesh, partial(Blocks, sequence, lstm), next_token, "zbv")
    return ""


def words_over_tensor_ranks(init_method: str) -> list[str]:
    styles: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    sharpened = partial(Blocks, straight, Sharpened)
    with gb.mesh(pipeline=2, tensor=2, init_method=init_method, timeout=20 * PATIENCE) as mesh:
        each = styles, styles | {"head": SequenceParallel()}
        return [said(gradient, mesh, sharpened, next_token, parallel=parallel) for parallel in each]


def before_fork(**arguments: Any) -> None:
    with suppress(ImportError):
        for name in ("t5", "bert", "llama"):
            hugging(name)


def run_cases(init_method: str) -> dict[str, Any]:
    with gb.mesh(pipeline=2, init_method=init_method, timeout=60 * PATIENCE) as mesh:
        refused: dict[str, Any] = {name: {"make": make} for name, (make, _) in REFUSED.items()}
        refused["another batch"] = {"make": partial(Blocks, gates), "seeds": (mesh.rank, 2)}
        refused["another shape"] = {"make": partial(Blocks, gates), "sizes": (6, 5 + mesh.rank)}
        refused["another dtype"] = {"make": partial(Blocks, gates), "kind": (torch.int64, torch.int32)[mesh.rank]}
        drops: Any = partial(Blocks, straight, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
        refused["dropout"] = {"make": drops}
        found = {name: said(case, mesh) for name, case in CASES.items()}
        return found | {name: said(gradient, mesh, loss_fn=next_token, **more) for name, more in refused.items()}
