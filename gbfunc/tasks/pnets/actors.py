"""Policy and value networks for tasks of control.

They map observations [B, O] to parameters of a policy [B, P] (`gbfunc.tasks.ppo.policy`) and values of states [B]. A
recurrent network has an attribute `memory`, the size M of its memory, and maps sequences:

    observations [B, T, O], starts of episodes [B, T], memory [B, M] -> policy [B, T, P], values [B, T], memory [B, M]

The network forgets its memory wherever an episode starts.

Suffixes: B environments or examples, T steps, O numbers of an observation, P parameters of a policy, M numbers of a
memory, H hidden units; C channels, h rows and w columns of an image.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from gbfunc.encoding import binary, grid, per_axis
from gbfunc.hypernets import constant
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, check_reads, family


class Normalizer(nn.Module):
    """Scales each observed number to mean 0 and variance 1, and clips it to -10 to 10: [B, O] -> [B, O].

    The running mean and variance are buffers. In training mode, they are updated after a batch is normalised.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, n_obs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_obs))
        self.register_buffer("variance", torch.ones(n_obs))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, obs_BO: Tensor) -> Tensor:
        near_BO = ((obs_BO - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)
        if self.training:
            variance_O, mean_O = torch.var_mean(obs_BO.detach(), 0, correction=0)
            self.count = self.count + len(obs_BO)
            fraction, moved_O = len(obs_BO) / self.count, mean_O - self.mean
            self.variance = self.variance.lerp(variance_O, fraction) + fraction * (1 - fraction) * moved_O.square()
            self.mean = self.mean + fraction * moved_O
        return near_BO


class ActorCritic(nn.Module):
    """Two tanh networks, `actor` and `critic`: observations [B, O] -> parameters of a policy [B, P], values [B].

    `sizes` are the actor's numbers of units, from the observation to the output. The critic has the same hidden layers
    and one output. Initial weights are orthogonal, with the gain sqrt(2), but 0.01 in the actor's last layer and 1 in
    the critic's last layer. Initial biases are 0. With `vectors`, actions are normally distributed vectors; their log
    standard deviation `log_std` is trained. With `normalize`, a `Normalizer` scales the observations.
    """

    def __init__(self, sizes: Sequence[int], vectors: bool = False, normalize: bool = False) -> None:
        super().__init__()
        self.normalizer = Normalizer(sizes[0]) if normalize else nn.Identity()
        self.actor = _tanh_mlp(sizes, 0.01)
        self.critic = _tanh_mlp((*sizes[:-1], 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(sizes[-1])) if vectors else None

    def forward(self, obs_BO: Tensor) -> tuple[Tensor, Tensor]:
        x_BO = self.normalizer(obs_BO)
        out = self.actor(x_BO)
        numbers_BP = out if self.log_std is None else torch.cat([out, self.log_std.expand_as(out)], -1)
        return numbers_BP, self.critic(x_BO).squeeze(-1)


def _tanh_mlp(sizes: Sequence[int], head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 2):
        layers += [_orthogonal(nn.Linear(n_in, n_out), head_gain if i == len(sizes) else 2**0.5), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            nn.init.orthogonal_(parameter, gain)
        else:
            nn.init.zeros_(parameter)
    return layer


def actor_critic(
    interface: Interface, *, hidden: Sequence[int] = (64, 64), odd: bool = False, normalize: bool = False
) -> PNet:
    """Describe policy and value networks for a task of control, with `hidden` units per hidden layer.

    With `normalize`, a `Normalizer` scales the observations. With `odd`, the plan fixes the actor's hidden biases
    at 0. A grown actor, apart from its output biases, is then an odd function of the observation. Odd functions suit
    environments in which left and right are symmetric.
    """
    check_reads("actor_critic", interface, "observations", 1)
    layers = (*interface.inputs, *hidden, interface.outputs)
    biases = "|".join(str(2 * i) for i in range(len(layers) - 2))
    rules = ((rf"^actor\.({biases})\.bias$", constant(0.0)),) if odd and hidden else ()
    widths, plan = {"hidden": list(layers[1:-1])}, PlanOptions(rules=rules)
    make = partial(ActorCritic, layers, interface.actions == "vector", normalize)
    config = widths | {"odd": odd, "normalize": normalize}
    return family("actor_critic", actor_critic, interface, make, plan, config, widths)


class RecurrentActorCritic(nn.Module):
    """A tanh layer and a GRU (Cho et al., 2014) of H units each, with heads for the policy and the value."""

    def __init__(self, n_obs: int, hidden: int, n_actions: int, vectors: bool) -> None:
        super().__init__()
        self.memory = hidden
        self.first = _orthogonal(nn.Linear(n_obs, hidden))
        self.cell = _orthogonal(nn.GRUCell(hidden, hidden), 1.0)
        self.heads = ActorCritic((hidden, n_actions), vectors)

    def forward(
        self, obs_BTO: Tensor, starts_BT: Tensor | None = None, memory_BM: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Process sequences. If only observations [B, O] are given, process each as the first step of an episode."""
        if starts_BT is None or memory_BM is None:
            blank = obs_BTO.new_zeros(len(obs_BTO), self.memory)
            numbers, values, _ = self(obs_BTO[:, None], blank[:, :1], blank)
            return numbers[:, 0], values[:, 0]
        x_BTH, memories = torch.tanh(self.first(obs_BTO)), []
        memory: Tensor = memory_BM
        goes_on_BT1 = 1 - starts_BT.to(x_BTH)[..., None]
        for x_BH, goes_on_B1 in zip(x_BTH.unbind(1), goes_on_BT1.unbind(1), strict=True):
            memory = self.cell(x_BH, memory * goes_on_B1)
            memories.append(memory)
        return *self.heads(torch.stack(memories, 1)), memory


def recurrent_actor_critic(interface: Interface, *, hidden: int = 64) -> PNet:
    """Describe a `RecurrentActorCritic` for a control task whose observations (vectors) show only part of the state."""
    name, vectors = "recurrent_actor_critic", interface.actions == "vector"
    check_reads(name, interface, "observations", 1)
    make = partial(RecurrentActorCritic, interface.inputs[0], hidden, interface.outputs, vectors)
    plan, config = PlanOptions(include=(r"^cell\.weight_",)), {"hidden": hidden}
    return family(name, recurrent_actor_critic, interface, make, plan, config, config)


class ConvActorCritic(nn.Module):
    """Convolutions, a wide linear layer, and heads: images [B, C, h, w] -> policy [B, P], values [B].

    For images of 36 x 36 pixels or more, the net has the three convolutions of Mnih et al. (2015). For smaller images,
    it has two of 3 x 3. The first has `width` channels, the others 2 x `width`. Images of uint8 are divided by 255.
    """

    def __init__(self, inputs: Sequence[int], width: int, hidden: int, n_actions: int, vectors: bool) -> None:
        super().__init__()
        channels, *size = inputs
        small, large = ((3, 1), (3, 1)), ((8, 4), (4, 2), (3, 1))
        layers: list[nn.Module] = []
        for i, (kernel, stride) in enumerate(large if min(size) >= 36 else small):
            out = 2 * width if i else width
            layers += [_orthogonal(nn.Conv2d(channels, out, kernel, stride)), nn.ReLU()]
            channels, size = out, [(n - kernel) // stride + 1 for n in size]
        self.size = tuple(size)
        self.convolutions = nn.Sequential(*layers)
        self.wide = _orthogonal(nn.Linear(channels * size[0] * size[1], hidden))
        self.heads = ActorCritic((hidden, n_actions), vectors)

    def forward(self, obs_BChw: Tensor) -> tuple[Tensor, Tensor]:
        x_BChw = obs_BChw / 255 if obs_BChw.dtype == torch.uint8 else obs_BChw
        return self.heads(torch.relu(self.wide(self.convolutions(x_BChw).flatten(1))))


def conv_actor_critic(interface: Interface, *, width: int = 32, hidden: int = 512) -> PNet:
    """Describe a `ConvActorCritic` for a task of control with images as observations."""
    check_reads("conv_actor_critic", interface, "observations", 3, least=5)
    vectors = interface.actions == "vector"
    make = partial(ConvActorCritic, interface.inputs, width, hidden, interface.outputs, vectors)
    with torch.device("meta"):
        size = make().size
    places = per_axis(binary(), grid(*size), size[0] * size[1])
    plan, config = PlanOptions(encodings={"wide.weight": (None, places)}), {"width": width, "hidden": hidden}
    return family("conv_actor_critic", conv_actor_critic, interface, make, plan, config, config)
