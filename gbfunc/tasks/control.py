"""Control: policy and value networks of gymnasium's environments through the bottleneck, learnt by PPO.

Suffixes: T steps of a rollout, N environments, B observations, O numbers of an observation, P numbers that describe a
policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gbfunc import Plan, TrainState, make_train_step, materialize, torch_optimizer
from gbfunc.hypernets import Hypernet, constant
from gbfunc.tasks.environments import Environment, evaluate, make_envs, step_envs
from gbfunc.tasks.ppo import Settings, Transitions, gae, policy, ppo_loss
from gbfunc.train import seeded
from gbfunc.types import GenomeLike

_CPU = torch.device("cpu")
# Streams of random numbers that one seed gives, so that evaluations never see an episode of training.
_RESETS, _ORDER, _ACTIONS, _CHECKS, _FINAL = range(5)

SETTINGS: Mapping[str, Settings] = MappingProxyType(
    {
        "CartPole-v1": Settings(env_steps=51_200, n_envs=8, reward_scale=0.02, lr=1e-2, dense_lr=1e-2),
        "Pendulum-v1": Settings(
            env_steps=98_304,
            n_envs=8,
            horizon=256,
            epochs=10,
            minibatches=8,
            gamma=0.9,
            entropy=0.0,
            reward_scale=0.05,
            lr=1e-2,
            dense_lr=3e-3,
        ),
    }
)
"""Settings by environment, chosen on seeds 100 to 102, which no reported figure uses."""


def control_settings(env_id: str) -> Settings:
    """Settings that train well in an environment; PPO's defaults where nothing is known of it."""
    return SETTINGS.get(env_id, Settings())


class Training(NamedTuple):
    """What training gave.

    Attributes:
        state: the last state.
        history: a row an evaluation: `env_steps` so far, `mean_return` and `std_return` over its episodes; `loss`,
            `value_loss`, `entropy` (nats) and `kl` of the last minibatch; `seconds` since the start.
        solved: environment steps at the first evaluation whose mean return reached the threshold, or None.
        steps: gradient steps.
        seconds: evaluations included.
    """

    state: TrainState
    history: list[dict[str, float]]
    solved: int | None
    steps: int
    seconds: float


class ActorCritic(nn.Module):
    """Two tanh networks, `actor` and `critic`: observations [B, O] -> the policy's numbers [B, P] and values [B].

    Weights start orthogonal with gain sqrt(2), the policy's last layer with 0.01, the value's with 1; biases start at
    zero. Where actions are continuous, their log deviation `log_std` does not depend on the observation.

    Args:
        env: gives O and P.
        hidden: units of the hidden layers of each network.
        seed: of the initial weights; torch's global generator is left as it was.
    """

    actor: nn.Sequential
    critic: nn.Sequential
    log_std: nn.Parameter

    def __init__(self, env: Environment, hidden: Sequence[int] = (64, 64), seed: int = 0) -> None:
        super().__init__()
        self.discrete = env.discrete
        with seeded(seed, _CPU):
            self.actor = _tanh_mlp((env.n_obs, *hidden, env.n_actions), 0.01)
            self.critic = _tanh_mlp((env.n_obs, *hidden, 1), 1.0)
        if not env.discrete:
            self.log_std = nn.Parameter(torch.zeros(env.n_actions))

    def act(self, obs_BO: Tensor) -> Tensor:
        """The policy's numbers [B, P]: see `policy`."""
        out = self.actor(obs_BO)
        return out if self.discrete else torch.cat([out, self.log_std.expand_as(out)], -1)

    def forward(self, obs_BO: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's numbers [B, P] and values [B]."""
        return self.act(obs_BO), self.critic(obs_BO).squeeze(-1)


def _tanh_mlp(sizes: Sequence[int], head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 2):
        layer = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(layer.weight, head_gain if i == len(sizes) else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def control_rules(env: Environment, pnet: ActorCritic) -> tuple[tuple[str, Hypernet | None], ...]:
    """Rules for `make_plan`: where left and right are alike, the policy's hidden biases stay at zero.

    Without them its outputs are odd functions of the observation, up to a constant: what CartPole's symmetry asks for.
    """
    if env.id != "CartPole-v1":
        return ()
    hidden = "|".join(str(i) for i in range(0, len(pnet.actor) - 1, 2))
    return ((rf"^actor\.({hidden})\.bias$", constant(0.0)),)


class _Front(NamedTuple):
    """Where the environments of training stand: observations [N, O], and whether the next step only restarts [N]."""

    obs: NDArray[Any]
    restarts: NDArray[np.bool_]


@torch.no_grad()
def _rollout(envs: Any, net: ActorCritic, front: _Front, settings: Settings) -> tuple[Transitions, _Front]:
    """Act for T steps in N environments: T * N transitions, and where the environments stand then."""
    obs, restarts, rows = [front.obs], [front.restarts], []
    for _ in range(settings.horizon):
        numbers_NP = net.act(torch.as_tensor(obs[-1], dtype=torch.float32))
        actions = policy(numbers_NP, net.discrete).sample()
        obs_NO, *row = step_envs(envs, actions)
        obs.append(obs_NO)
        restarts.append(row[1] | row[2])
        rows.append((actions, *row))
    actions, rewards, terminated, truncated = zip(*rows, strict=True)
    obs_TNO = torch.as_tensor(np.stack(obs), dtype=torch.float32)
    numbers, values = net(obs_TNO.flatten(0, 1))
    values_TN = values.unflatten(0, obs_TNO.shape[:2])
    actions_B = torch.stack(actions).flatten(0, 1)
    rewards_TN = torch.as_tensor(np.stack(rewards), dtype=torch.float32) * settings.reward_scale
    terminated_TN, truncated_TN = (torch.as_tensor(np.stack(x)) for x in (terminated, truncated))
    advantages_TN = gae(rewards_TN, values_TN, terminated_TN, truncated_TN, settings.gamma, settings.lam)
    data = Transitions(
        obs=obs_TNO[:-1].flatten(0, 1),
        actions=actions_B,
        log_probs=policy(numbers[: len(actions_B)], net.discrete).log_prob(actions_B),
        advantages=advantages_TN.flatten(),
        returns=(advantages_TN + values_TN[:-1]).flatten(),
        values=values_TN[:-1].flatten(),
        valid=torch.as_tensor(~np.stack(restarts[:-1]), dtype=torch.float32).flatten(),
    )
    return data, _Front(obs[-1], restarts[-1])


def train_control(
    env: Environment,
    pnet: ActorCritic,
    plan: Plan,
    settings: Settings,
    seed: int,
    report: Callable[[dict[str, float]], None] = lambda row: None,
) -> Training:
    """Train the genome of `plan` by PPO; a plan whose tensors are all direct is PPO on the dense networks.

    The learning rate falls linearly to zero. The same seed gives the same training on the same machine.

    Args:
        env: where.
        pnet: the p-net that the plan was made for.
        plan: which of its tensors are generated, and how.
        settings: of PPO.
        seed: of the g-nets, the environments, the actions and the order of transitions.
        report: is told every row of the history.

    Raises:
        ValueError: for a rollout that its minibatches do not divide.
        FloatingPointError: for a loss or gradient that is not finite.
    """
    start, size = time.perf_counter(), settings.n_envs * settings.horizon
    if size % settings.minibatches:
        raise ValueError(f"{settings.minibatches} minibatches do not divide a rollout of {size} transitions")
    per_update = settings.epochs * settings.minibatches
    optimizer = torch_optimizer(
        torch.optim.Adam, lr=lambda step: settings.lr * (1 - step // per_update / settings.updates), eps=1e-5
    )
    train_step = make_train_step(
        *(plan, pnet, lambda net, batch: ppo_loss(net, batch, settings, env.discrete), optimizer),
        donate=True,
        clip_norm=settings.clip_norm,
        on_nonfinite="raise",
    )
    state, history, solved = train_step.init(seed), [], None
    envs = make_envs(env.id, settings.n_envs)
    front = _Front(envs.reset(seed=stream(seed, _RESETS))[0], np.zeros(settings.n_envs, dtype=bool))
    order = torch.Generator().manual_seed(stream(seed, _ORDER))
    net = grow(plan, state, pnet)
    for update in range(1, settings.updates + 1):
        with seeded(stream(seed, _ACTIONS, update), _CPU):
            data, front = _rollout(envs, net, front, settings)
        for _ in range(settings.epochs):
            for index_B in torch.randperm(size, generator=order).chunk(settings.minibatches):
                state, info = train_step(state, Transitions(*(x[index_B] for x in data)))
        net = grow(plan, state, pnet)
        if update % settings.eval_every == 0 or update == settings.updates:
            returns = evaluate(net.act, env, stream(seed, _CHECKS, update))
            row = {"env_steps": update * size, "mean_return": returns.mean(), "std_return": returns.std()}
            row |= {k: info.aux[k].item() for k in ("value_loss", "entropy", "kl")} | {"loss": info.loss.item()}
            history.append({k: float(v) for k, v in row.items()} | {"seconds": time.perf_counter() - start})
            report(history[-1])
            if solved is None and env.threshold is not None and returns.mean() >= env.threshold:
                solved = update * size
    envs.close()
    return Training(state, history, solved, per_update * settings.updates, time.perf_counter() - start)


def grow(plan: Plan, genome: GenomeLike, pnet: ActorCritic) -> ActorCritic:
    """`materialize`, known to be what it was made from."""
    return cast(ActorCritic, materialize(plan, genome, pnet))


def final_returns(net: ActorCritic, env: Environment, seed: int) -> NDArray[np.float64]:
    """Returns of `evaluate` over episodes that training with this seed never saw."""
    return evaluate(net.act, env, stream(seed, _FINAL))


def stream(seed: int, *path: int) -> int:
    """A seed below 2**32 for one of the streams of random numbers that `seed` gives."""
    return int(np.random.SeedSequence((seed, *path)).generate_state(1)[0])
