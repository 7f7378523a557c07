"""Control: policy and value networks of gymnasium's environments through the bottleneck, learnt by PPO.

A pass over what it learns from is one rollout: the network acts as it is then, and its transitions are gone through a
few times. The validation and test splits are fixed episodes, in which the greedy policy acts.

Suffixes: T steps of a rollout, N environments, B transitions, O numbers of an observation, P numbers that describe a
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.tasks.base import History, Metric, Recipe, Task
from gbfunc.tasks.pnets import PNETS, Interface
from gbfunc.tasks.pnets.base import seeded
from gbfunc.tasks.ppo import PolicyValue, Settings, Transitions, gae, policy, ppo_loss

EPISODES = 100
"""Episodes of an evaluation: what gymnasium's "solved" is a mean over."""

# Streams of random numbers that one seed gives, so that evaluations never see an episode of training.
_RESETS, _ORDER, _ACTIONS, _CHECKS, _FINAL = range(5)


class Environment(NamedTuple):
    """What a network must know of an environment.

    Attributes:
        id: its name in gymnasium's registry.
        n_obs: numbers of an observation, O.
        n_actions: choices, or numbers of an action.
        discrete: whether an action is one of so many choices.
        threshold: mean return at which gymnasium calls it solved; None where it does not say.
    """

    id: str
    n_obs: int
    n_actions: int
    discrete: bool
    threshold: float | None


def find_environment(env_id: str) -> Environment:
    """Look up an environment with observations that are vectors, and actions that are choices or vectors.

    Raises:
        ImportError: if gymnasium, or what it needs for this environment, is missing.
        ValueError: if there is no such environment, or if its spaces are others.
    """
    envs = make_envs(env_id, 1)
    from gymnasium.spaces import Box, Discrete

    seen, done = envs.single_observation_space, envs.single_action_space
    threshold = envs.spec.reward_threshold if envs.spec else None
    envs.close()
    if isinstance(seen, Box) and len(seen.shape) == 1:
        if isinstance(done, Discrete) and int(done.start) == 0:
            return Environment(env_id, seen.shape[0], int(done.n), True, threshold)
        if isinstance(done, Box) and len(done.shape) == 1:
            return Environment(env_id, seen.shape[0], done.shape[0], False, threshold)
    raise ValueError(f"environment {env_id!r} must have vectors as observations, and choices from 0 or vectors as "
                     f"actions, got {seen} and {done}")  # fmt: skip


def make_envs(env_id: str, n: int) -> Any:
    """`n` environments as one `gymnasium.vector.VectorEnv`, each started anew by the step after its last one.

    Raises:
        ImportError: if gymnasium, or what it needs for this environment, is missing.
        ValueError: if there is no such environment, or it starts anew in another way.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("the control task needs gymnasium: pip install 'gbfunc[control]'") from error
    try:
        envs = gymnasium.make_vec(env_id, num_envs=n)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"environment {env_id!r} needs more packages: {error}") from error
    except gymnasium.error.Error as error:
        raise ValueError(f"no environment {env_id!r}: {error}") from error
    mode = envs.metadata.get("autoreset_mode")
    if mode != gymnasium.vector.AutoresetMode.NEXT_STEP:
        raise ValueError(f"environment {env_id!r} must start anew at the next step, its mode is {mode}")
    return envs


def step_envs(envs: Any, actions: Tensor) -> tuple[NDArray[Any], ...]:
    """Observations, rewards, and whether episodes terminated or were truncated; vectors are clipped to their box."""
    array = actions.numpy()
    if actions.is_floating_point():
        array = np.clip(array, envs.action_space.low, envs.action_space.high)
    return envs.step(array)[:4]


SETTINGS: Mapping[str, Settings] = MappingProxyType(
    {
        "CartPole-v1": Settings(env_steps=51_200, n_envs=8, reward_scale=0.02, lr=1e-2, dense_lr=1e-2),
        "Pendulum-v1": replace(
            Settings(env_steps=98_304, n_envs=8, horizon=256, epochs=10, minibatches=8, gamma=0.9),
            **dict(entropy=0.0, reward_scale=0.05, lr=1e-2, dense_lr=3e-3),
        ),
    }
)
"""Settings by environment, chosen on seeds 100 to 102, which no reported result uses."""


def control_settings(env_id: str) -> Settings:
    """Settings that train well in an environment; PPO's defaults where nothing is known of it."""
    return SETTINGS.get(env_id, Settings())


@dataclass(frozen=True)
class Rollouts:
    """What is learned from: where the network acts, and how; its length is that of one rollout, every pass counted."""

    env: Environment
    settings: Settings

    def __len__(self) -> int:
        return self.settings.n_envs * self.settings.horizon * self.settings.epochs

    def to(self, device: torch.device | str) -> Rollouts:
        """The same; `ValueError` for a device that environments are not on."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"the control task runs on the CPU, where its environments are; got --device {device}")
        return self


@dataclass(frozen=True)
class Episodes:
    """What is measured on: so many episodes, of which a seed decides the starts."""

    env: Environment
    seed: int
    number: int = EPISODES

    def to(self, device: torch.device | str) -> Episodes:
        """The same: environments are on the CPU."""
        return self


def control(env: str = "CartPole-v1", env_steps: int | None = None) -> Task:
    """The task of acting well in an environment of gymnasium's.

    Args:
        env: its name.
        env_steps: length of the training, in steps of all environments together; None for what is known to be good.

    Raises:
        ImportError: if gymnasium, or what it needs for this environment, is missing.
        ValueError: if there is no such environment, or it has other spaces, or for less than one rollout.
    """
    settings = control_settings(env)
    if env_steps is not None:
        size = settings.n_envs * settings.horizon
        if type(env_steps) is not int or env_steps < size:
            raise ValueError(f"env_steps must be at least one rollout, {size:,} steps, got {env_steps!r}")
        settings = replace(settings, env_steps=env_steps)
    return control_task(find_environment(env), settings)


def control_task(env: Environment, settings: Settings) -> Task:
    """The task of an environment, with such settings of PPO.

    The learning rate falls linearly to zero, from rollout to rollout. A seed decides the environments, the actions and
    the order of transitions.
    """
    interface = Interface((env.n_obs,), env.n_actions, actions="choice" if env.discrete else "vector")
    size, per_rollout = settings.n_envs * settings.horizon, settings.epochs * settings.minibatches
    recipe = Recipe(
        lr=settings.lr,
        dense_lr=settings.dense_lr,
        betas=(0.9, 0.999),
        eps=1e-5,
        batch_size=size // settings.minibatches,
        epochs=settings.updates,
        measure_every=settings.eval_every * per_rollout,
        clip_norm=settings.clip_norm,
        schedule=lambda recipe, lr, steps: lambda step: lr * (1 - step // per_rollout * per_rollout / steps),
    )

    def counts(steps: int) -> dict[str, float]:
        return {"env_steps": -(-steps // per_rollout) * size}

    def facts(history: History) -> dict[str, Any]:
        limit = env.threshold
        solved = (row["env_steps"] for row in history if limit is not None and row["val_mean_return"] >= limit)
        known = {"env": env.id, "episodes": EPISODES, "threshold": limit}
        trained = history[-1]["env_steps"] if history else None
        return known | {"env_steps": trained, "env_steps_to_solve": next(solved, None)}

    return Task(
        name="control",
        interface=interface,
        train=Rollouts(env, settings),
        val=Episodes(env, stream(0, _CHECKS)),
        test=Episodes(env, stream(0, _FINAL)),
        # Left and right are alike in CartPole.
        pnet=PNETS["actor_critic"](interface, odd=env.id == "CartPole-v1"),
        settings=lambda pnet, genome_params: recipe,
        compression=10.0,
        loss=lambda net, batch: ppo_loss(net, batch, settings, env.discrete),
        evaluate=return_metrics,
        metrics=(Metric("mean_return", "", digits=1), Metric("std_return", "", higher_is_better=False, digits=1)),
        batches=rollout_batches,
        resumable=False,
        counts=counts,
        facts=facts,
    )


def rollout_batches(
    place: Rollouts, recipe: Recipe, generator: torch.Generator, net: Callable[[], PolicyValue]
) -> Iterator[Transitions]:
    """Minibatches of one rollout after the other; the seed of the generator names the streams of random numbers."""
    settings, seed = place.settings, generator.initial_seed()
    size, used = settings.n_envs * settings.horizon, len(place) // recipe.batch_size * recipe.batch_size
    envs = make_envs(place.env.id, settings.n_envs)
    try:
        front = _Front(envs.reset(seed=stream(seed, _RESETS))[0], np.zeros(settings.n_envs, bool))
        order = torch.Generator().manual_seed(stream(seed, _ORDER))
        for rollout in count(1):
            with seeded(stream(seed, _ACTIONS, rollout)):
                data, front = _rollout(envs, net(), front, settings, place.env.discrete)
            index = torch.cat([torch.randperm(size, generator=order) for _ in range(settings.epochs)])
            for index_B in index[:used].split(recipe.batch_size):
                yield Transitions(*(x[index_B] for x in data))
    finally:
        envs.close()


class _Front(NamedTuple):
    """Where the environments of training stand: observations [N, O], and whether the next step only restarts [N]."""

    obs: NDArray[Any]
    restarts: NDArray[np.bool_]


@torch.no_grad()
def _rollout(envs: Any, net: PolicyValue, front: _Front, settings: Settings, discrete: bool) -> tuple[Any, _Front]:
    """Act for T steps in N environments: T * N transitions, and where the environments stand then."""
    obs, restarts, rows = [front.obs], [front.restarts], []
    for _ in range(settings.horizon):
        actions = policy(net(torch.as_tensor(obs[-1], dtype=torch.float32))[0], discrete).sample()
        obs_NO, *row = step_envs(envs, actions)
        obs.append(obs_NO)
        restarts.append(row[1] | row[2])
        rows.append((actions, *map(torch.as_tensor, row)))
    actions_TN, rewards_TN, terminated_TN, truncated_TN = map(torch.stack, zip(*rows, strict=True))
    obs_TNO = torch.as_tensor(np.stack(obs), dtype=torch.float32)
    numbers, values = net(obs_TNO.flatten(0, 1))
    values_TN, actions_B = values.unflatten(0, obs_TNO.shape[:2]), actions_TN.flatten(0, 1)
    rewards_TN = rewards_TN.float() * settings.reward_scale
    advantages_TN = gae(rewards_TN, values_TN, terminated_TN, truncated_TN, settings.gamma, settings.lam)
    data = Transitions(
        obs=obs_TNO[:-1].flatten(0, 1),
        actions=actions_B,
        log_probs=policy(numbers[: len(actions_B)], discrete).log_prob(actions_B),
        advantages=advantages_TN.flatten(),
        returns=(advantages_TN + values_TN[:-1]).flatten(),
        values=values_TN[:-1].flatten(),
        valid=torch.as_tensor(~np.stack(restarts[:-1]), dtype=torch.float32).flatten(),
    )
    return data, _Front(obs[-1], restarts[-1])


@torch.no_grad()
def evaluate(net: PolicyValue, episodes: Episodes) -> NDArray[np.float64]:
    """Undiscounted returns of the greedy policy (the likeliest choice, the mean action), one per episode."""
    envs = make_envs(episodes.env.id, episodes.number)
    obs_NO, _ = envs.reset(seed=episodes.seed)
    returns_N, running_N = np.zeros(episodes.number), np.ones(episodes.number, dtype=bool)
    while running_N.any():
        numbers_NP, _ = net(torch.as_tensor(obs_NO, dtype=torch.float32))
        best = policy(numbers_NP, episodes.env.discrete).mode
        obs_NO, rewards_N, terminated_N, truncated_N = step_envs(envs, best)
        returns_N += rewards_N * running_N
        running_N &= ~(terminated_N | truncated_N)
    envs.close()
    return returns_N


def return_metrics(net: PolicyValue, episodes: Episodes) -> dict[str, float]:
    """Mean and deviation of the returns of `evaluate`."""
    returns = evaluate(net, episodes)
    return {"mean_return": float(returns.mean()), "std_return": float(returns.std())}


def stream(seed: int, *path: int) -> int:
    """A seed below 2**32 for one of the streams of random numbers that `seed` gives."""
    return int(np.random.SeedSequence((seed, *path)).generate_state(1)[0])
