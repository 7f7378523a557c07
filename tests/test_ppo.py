"""PPO's arithmetic against slow float64 loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.tasks.ppo import Settings, Transitions, gae, ppo_loss


def advantages_by_definition(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lam: float
) -> Tensor:
    """Sum of discounted one-step errors up to the end of the episode, each from its own formula."""
    n_steps, n_envs = rewards.shape
    found = torch.zeros_like(rewards)
    for n in range(n_envs):
        for t in range(n_steps):
            for k in range(t, n_steps):
                future = 0.0 if terminated[k, n] else float(values[k + 1, n])
                error = float(rewards[k, n]) + gamma * future - float(values[k, n])
                found[t, n] += (gamma * lam) ** (k - t) * error
                if terminated[k, n] or truncated[k, n]:
                    break
    return found


@given(
    n_steps=st.integers(1, 12),
    n_envs=st.integers(1, 3),
    gamma=st.floats(0.0, 1.0),
    lam=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_gae_is_its_definition(n_steps: int, n_envs: int, gamma: float, lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(n_steps, n_envs, generator=generator, dtype=torch.float64)
    values = torch.randn(n_steps + 1, n_envs, generator=generator, dtype=torch.float64)
    ends = [torch.rand(n_steps, n_envs, generator=generator) < 0.2 for _ in range(2)]
    arguments = (rewards, values, ends[0], ends[1], gamma, lam)
    torch.testing.assert_close(gae(*arguments), advantages_by_definition(*arguments))


def transitions(discrete: bool, seed: int = 0, n: int = 9) -> Transitions:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(4)]
    actions = torch.randint(0, 3, (n,), generator=generator) if discrete else torch.randn(n, 2, generator=generator)
    valid = (torch.arange(n) % 4 != 1).double()
    obs = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    actions = actions if discrete else actions.double()
    return Transitions(obs, actions, -1 + 0.3 * draw[0], draw[1], draw[2], draw[3], valid)


class LinearNet:
    def __init__(self, n_numbers: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.policy = (0.5 * torch.randn(5, n_numbers, generator=generator, dtype=torch.float64)).requires_grad_()
        self.value = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()

    def __call__(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return obs @ self.policy, obs @ self.value


def loss_by_hand(net: LinearNet, batch: Transitions, settings: Settings, discrete: bool) -> dict[str, float]:
    """The loss by its formulas, over the transitions that count."""
    clip, kept = settings.clip, batch.valid > 0
    obs, actions, old_log_prob, gain, target, old = (x[kept] for x in batch[:6])
    numbers, value = (x.detach() for x in net(obs))
    if discrete:
        p = numbers.exp() / numbers.exp().sum(1, keepdim=True)
        log_prob, entropy = p[range(len(p)), actions].log(), -(p * p.log()).sum(1)
    else:
        mean, log_std = numbers.chunk(2, 1)
        log_prob = -(0.5 * ((actions - mean) / log_std.exp()) ** 2 + log_std + 0.5 * math.log(2 * math.pi)).sum(1)
        entropy = (0.5 + 0.5 * math.log(2 * math.pi) + log_std).sum(1)
    ratio = (log_prob - old_log_prob).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    near = old + (value - old).clamp(-clip, clip)
    terms = {
        "policy_loss": -torch.minimum(gain * ratio, gain * ratio.clamp(1 - clip, 1 + clip)),
        "value_loss": 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2),
        "entropy": entropy,
        "kl": ratio - 1 - ratio.log(),
        "clipped": ((ratio - 1).abs() > clip).double(),
    }
    means = {name: float(x.mean()) for name, x in terms.items()}
    loss = means["policy_loss"] + settings.value * means["value_loss"] - settings.entropy * means["entropy"]
    return {"loss": loss, **means}


@pytest.mark.parametrize("discrete", [True, False])
def test_loss_by_hand(discrete: bool) -> None:
    settings = Settings(clip=0.3, entropy=0.07, value=0.4)
    net, batch = LinearNet(3 if discrete else 4), transitions(discrete)
    loss, aux = ppo_loss(net, batch, settings, discrete)
    found = {k: float(v.detach()) for k, v in {"loss": loss, **aux}.items()}
    assert found == pytest.approx(loss_by_hand(net, batch, settings, discrete), rel=1e-9)


@pytest.mark.parametrize("discrete", [True, False])
def test_steps_that_only_restart_do_not_count(discrete: bool) -> None:
    net, batch = LinearNet(3 if discrete else 4), transitions(discrete)
    off = batch.valid == 0
    other = batch._replace(
        log_probs=torch.where(off, -1e9, batch.log_probs),
        advantages=torch.where(off, 1e9, batch.advantages),
        returns=torch.where(off, -1e9, batch.returns),
    )
    found = []
    for one in (batch, other):
        loss, _ = ppo_loss(net, one, Settings(), discrete)
        found.append((loss.detach(), *torch.autograd.grad(loss, (net.policy, net.value))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
