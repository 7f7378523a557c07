"""Gymnasium's environments: which there are, how they step, and what a policy earns in them.

Suffixes: N environments, O numbers of an observation, P numbers that describe a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.tasks.ppo import policy

EPISODES = 100
"""Episodes of an evaluation: what gymnasium's "solved" is a mean over."""


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

    seen, done, spec = envs.single_observation_space, envs.single_action_space, envs.spec
    envs.close()
    threshold = spec.reward_threshold if spec else None
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


@torch.no_grad()
def evaluate(
    act: Callable[[Tensor], Tensor], env: Environment, seed: int, episodes: int = EPISODES
) -> NDArray[np.float64]:
    """Undiscounted returns [episodes] of the greedy policy (the likeliest choice, the mean action).

    Args:
        act: observations [N, O] to the policy's numbers [N, P].
        env: where.
        seed: of the episodes' starts.
        episodes: one in each of so many environments.
    """
    envs = make_envs(env.id, episodes)
    obs_NO, _ = envs.reset(seed=seed)
    returns_N, running_N = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running_N.any():
        numbers_NP = act(torch.as_tensor(obs_NO, dtype=torch.float32))
        obs_NO, rewards_N, terminated_N, truncated_N = step_envs(envs, policy(numbers_NP, env.discrete).mode)
        returns_N += rewards_N * running_N
        running_N &= ~(terminated_N | truncated_N)
    envs.close()
    return returns_N
