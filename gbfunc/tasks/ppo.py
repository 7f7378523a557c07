r"""Proximal policy optimisation (Schulman et al., 2017): advantages, policies and the clipped loss, as pure functions.

Details follow "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al., ICLR blog track, 2022) and
CleanRL. Suffixes: T steps of a rollout, N environments, B transitions of a minibatch, O numbers of an
observation, P parameters of the distribution of actions, A numbers of an action, or actions to choose from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

PolicyValue = Callable[..., tuple[Tensor, ...]]
"""Maps observations [B, O] to a policy's parameters [B, P] and values of states [B] (`gbfunc.tasks.pnets.actors`)."""


@dataclass(frozen=True)
class Settings:
    """Settings of PPO; the defaults are CleanRL's."""

    env_steps: int = 500_000  # total number of transitions in all environments
    n_envs: int = 4  # number of parallel environments, N
    horizon: int = 128  # steps of a rollout in each environment, T
    epochs: int = 4  # number of passes over the transitions of a rollout
    minibatches: int = 4  # number of minibatches per pass over a rollout, with one gradient step each
    gamma: float = 0.99  # discount factor of rewards, per step
    lam: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # the loss clips probability ratios to 1 ± `clip`, and changes of a state's value to ± `clip`
    entropy: float = 0.01  # coefficient of the entropy bonus
    value: float = 0.5  # coefficient of the value loss
    clip_norm: float = 0.5  # gradients with a larger Euclidean norm are scaled down to this norm
    reward_scale: float = 1.0  # factor of rewards in training; reported returns are not scaled
    reward_signs: bool = False  # whether training uses only the signs of rewards, as is usual for Atari
    lr: float = 2.5e-3  # learning rate of the genome at the start
    dense_lr: float = 2.5e-4  # learning rate of a dense net at the start
    eval_every: int = 4  # number of rollouts between two evaluations

    def __post_init__(self) -> None:
        if (size := self.n_envs * self.horizon) % self.minibatches:
            raise ValueError(f"minibatches must divide a rollout of {size} transitions, got {self.minibatches}")

    @property
    def updates(self) -> int:
        return max(1, self.env_steps // (self.n_envs * self.horizon))


class Transitions(NamedTuple):
    """The transitions of a minibatch, or of a rollout from which minibatches are drawn.

    Without a memory, B counts steps. With a memory, all shapes but `memory` begin with [B, T]: B sequences of T steps.
    """

    obs: Tensor  # observations [B, O]
    actions: Tensor  # int64 [B], or float [B, A]
    log_probs: Tensor  # log probabilities of the actions, by the policy that chose them [B]
    advantages: Tensor  # [B]
    returns: Tensor  # targets for the predicted values [B]
    values: Tensor  # values that the network predicted when it acted [B]
    valid: Tensor  # 1 for a step of the policy, 0 for a step that only restarted the environment [B]
    starts: Tensor | None = None  # for a network with a memory: 1 where an episode starts [B, T]
    memory: Tensor | None = None  # for a network with a memory: the memory before a sequence's first step [B, M]


def policy(numbers_BP: Tensor, discrete: bool) -> Distribution:
    """Return the policy: categorical from A logits if `discrete`, else normal from A means and A log deviations."""
    if discrete:
        return Categorical(logits=numbers_BP, validate_args=False)
    mean_BA, log_std_BA = numbers_BP.chunk(2, -1)
    return Independent(Normal(mean_BA, log_std_BA.exp(), validate_args=False), 1, validate_args=False)


def gae(
    rewards_TN: Tensor, values_TN: Tensor, terminated_TN: Tensor, truncated_TN: Tensor, gamma: float, lam: float
) -> Tensor:
    r"""Compute generalised advantage estimates [T, N] (Schulman et al., 2016, equation 16).

    $\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$, $\hat A_t = \delta_t + \gamma \lambda \hat A_{t+1}$. After an
    episode's last step, $\hat A_{t+1}$ is 0. After a termination, $V(s_{t+1})$ is 0, unlike after a truncation.

    `values_TN` [T + 1, N] has the values of the states before each step, and of the state after the last step.
    """
    going_on_TN = (~(terminated_TN | truncated_TN)).to(rewards_TN)
    next_TN = values_TN[1:] * (~terminated_TN).to(rewards_TN)
    delta_TN = rewards_TN + gamma * next_TN - values_TN[:-1]
    advantage_N, advantages = torch.zeros_like(rewards_TN[0]), []
    for delta_N, going_on_N in zip(delta_TN.flip(0), going_on_TN.flip(0), strict=True):
        advantage_N = delta_N + gamma * lam * going_on_N * advantage_N
        advantages.append(advantage_N)
    return torch.stack(advantages[::-1])


def ppo_loss(
    net: PolicyValue, batch: Transitions, settings: Settings, discrete: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss (clipped policy loss + clipped value loss - entropy bonus, over valid transitions) and metrics.

    Advantages are normalised over the minibatch. The metrics are the loss's terms (`entropy` in nats), `clipped`
    (fraction of clipped ratios) and `kl`, KL(old || new policy), estimated as in http://joschu.net/blog/kl-approx.html.
    """
    count = batch.valid.sum().clamp(min=1.0)

    def mean(x_B: Tensor) -> Tensor:
        return (x_B * batch.valid).sum() / count

    centred_B = batch.advantages - mean(batch.advantages)
    # Apply Bessel's correction, as `Tensor.std` does.
    std = (mean(centred_B**2) * count / (count - 1).clamp(min=1.0)).sqrt()
    advantages_B = centred_B / (std + 1e-8)
    remembered = () if batch.memory is None else (batch.starts, batch.memory)
    numbers_BP, values_B, *_ = net(batch.obs, *remembered)
    actions = policy(numbers_BP, discrete)
    log_ratio_B = actions.log_prob(batch.actions) - batch.log_probs
    # Ignore steps that only restart an environment: the policy did not choose the action, and the ratio may be inf.
    log_ratio_B = torch.where(batch.valid > 0, log_ratio_B, 0.0)
    ratio_B = log_ratio_B.exp()
    clipped_B = ratio_B.clamp(1 - settings.clip, 1 + settings.clip)
    policy_loss = -mean(torch.minimum(advantages_B * ratio_B, advantages_B * clipped_B))
    near_B = batch.values + (values_B - batch.values).clamp(-settings.clip, settings.clip)
    value_loss = 0.5 * mean(torch.maximum((values_B - batch.returns) ** 2, (near_B - batch.returns) ** 2))
    entropy = mean(actions.entropy())
    loss = policy_loss + settings.value * value_loss - settings.entropy * entropy
    with torch.no_grad():
        kl = mean(ratio_B - 1 - log_ratio_B)
        clipped = mean(((ratio_B - 1).abs() > settings.clip).to(ratio_B))
    terms = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, terms | {"kl": kl, "clipped": clipped}
